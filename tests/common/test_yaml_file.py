"""YAML files of users and strangers: a mistake is named by its line, and a few lines cannot stand for gigabytes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.common.yaml_file import DEEPEST, parse_yaml

DOUBLING = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 61))
MERGING = "m0: &m0 {x: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 61))


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", ":3: not valid YAML (found duplicate key"),
        (b"a: 1\nb: \xff\n", ": not valid YAML ("),
        *((bomb.encode(), ": not valid YAML (aliases stand for") for bomb in (DOUBLING, MERGING, "a: &a [*a]\n")),
        (b"[" * 200_000, ": not valid YAML (nested deeper than"),
    ],
    ids=["a key twice", "no UTF-8", "doubling aliases", "doubling merge keys", "a list in itself", "depth"],
)
def test_what_is_no_yaml_of_a_bounded_size_is_refused_at_once(tmp_path: Path, kind: str, text: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        parse_yaml(path, kind)
    assert str(caught.value).startswith(f"{path}{message}") and time.process_time() - start < 2


@pytest.mark.parametrize("kind", ["safe", "rt"])
def test_aliases_merge_keys_and_nesting_up_to_the_limit_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {a: 1, b: [1, 2]}\nother: {<<: *base, a: 2}\nagain: *base\n")
    base = {"a": 1, "b": [1, 2]}
    assert parse_yaml(path, kind) == {"base": base, "other": base | {"a": 2}, "again": base}
    path.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert parse_yaml(path, kind)
