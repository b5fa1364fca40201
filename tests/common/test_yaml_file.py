"""YAML files edited by hand: a mistake is named by its line, and a few lines cannot stand for more than anybody could read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.common.yaml_file import DEEPEST, parse_yaml


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", ':3: not valid YAML (found duplicate key "a"'),
        (b"a: 1\n<<<<<<< HEAD\nb: 2\n=======\nb: 3\n>>>>>>> x\n", ":2: not valid YAML (<<<<<<< marks a merge conflict"),
        (b"a:\n  b: 1\n=======\n  b: 3\n", ":3: not valid YAML (======= marks a merge conflict"),
        (b"a: 1\nb: [\n", ":3: not valid YAML ("),
        (b"a: 1\nb: \xff\n", ":2: not UTF-8 text"),
        (b"a: " + b"1" * 5_000, ": not valid YAML (Exceeds the limit"),
    ],
)
def test_a_mistake_is_named_by_its_line(tmp_path: Path, kind: str, text: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        parse_yaml(path, kind)
    assert str(caught.value).startswith(f"{path}{message}")


DOUBLING = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 61))
MERGING = "m0: &m0 {x: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 61))


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    "text",
    [DOUBLING, MERGING, "a: &a [*a]\n", "b: 1\na: &a {b: {c: *a}}\n", "a: " + "[" * 3000 + "]" * 3000, "[" * 200_000],
)
def test_what_stands_for_too_much_is_refused_at_once(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(UserError, match=r"stand for more than 1,000,000 values|:1: nested deeper than 50 levels"):
        parse_yaml(path, kind)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("kind", ["safe", "rt"])
def test_aliases_and_merge_keys_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {a: 1, b: [1, 2]}\nother: {<<: *base, a: 2}\nagain: *base\n")
    base = {"a": 1, "b": [1, 2]}
    assert parse_yaml(path, kind) == {"base": base, "other": base | {"a": 2}, "again": base}


def test_nesting_up_to_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert parse_yaml(path)
    path.write_text("\n".join(" " * level + "a:" for level in range(DEEPEST + 1)))
    with pytest.raises(UserError, match=rf":{DEEPEST + 1}: nested deeper than {DEEPEST} levels"):
        parse_yaml(path)
