"""YAML files edited by hand: a mistake is named by its line, and a few lines cannot stand for more than anybody could read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.common.yaml_file import DEEPEST, MOST_BY_ALIASES, parse_yaml


def told(path: Path, text: str, kind: str = "safe") -> str:
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_yaml(path, kind)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n\tc: 2\n", ":3: not valid YAML (a tab in the indentation: use spaces)"),
        ("a: 1\nb: 2\na: 3\n", ':3: not valid YAML (found duplicate key "a"'),
        ("a: 1\n<<<<<<< HEAD\nb: 2\n=======\nb: 3\n>>>>>>> x\n", ":2: not valid YAML (<<<<<<< marks a merge conflict"),
        ("a:\n  b: 1\n=======\n  b: 3\n", ":3: not valid YAML (======= marks a merge conflict"),
        ("a: 1\nb: [\n", ":3: not valid YAML ("),
    ],
)
def test_a_mistake_is_named_by_its_line(tmp_path: Path, kind: str, text: str, message: str) -> None:
    assert told(tmp_path / "x.yaml", text, kind).startswith(message)


def doubling(levels: int) -> str:
    """Stands for 2**levels values and a few more: a line each is a list of two aliases of the line before."""
    return "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, levels + 1))


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (doubling(60), 16),  # line n+1 stands for 2**(n+1) - 1 values, so that 16 lines make 131,054
        ("a: &a [*a]\n", 1),
        ("b: 1\na: &a {b: {c: *a}}\n", 2),
        ("m0: &m0 {x: 1, y: 2}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 41)), None),
        ("a: " + "[" * 3000 + "]" * 3000, 1),
    ],
)
def test_what_stands_for_too_much_is_refused_at_once(tmp_path: Path, kind: str, text: str, line: int | None) -> None:
    start = time.perf_counter()
    message = told(tmp_path / "x.yaml", text, kind)
    assert time.perf_counter() - start < 2
    assert "aliases (`*name`) that contain themselves or expand to more than 100,000 values" in message
    assert line is None or message.startswith(f":{line}: ")


@pytest.mark.parametrize("kind", ["safe", "rt"])
def test_aliases_that_save_writing_stay(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {a: 1, b: [1, 2]}\nother: {<<: *base, a: 2}\nagain: *base\n")
    assert parse_yaml(path, kind) == {
        "base": {"a": 1, "b": [1, 2]},
        "other": {"a": 2, "b": [1, 2]},
        "again": {"a": 1, "b": [1, 2]},
    }
    path.write_text(doubling(12))
    assert len(parse_yaml(path, kind)) == 13
    path.write_text("a: " + "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1))
    assert parse_yaml(path, kind)


def test_a_large_file_without_aliases_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"a: [{', '.join('0' * (MOST_BY_ALIASES + 5))}]\n")
    assert len(parse_yaml(tmp_path / "x.yaml")["a"]) == MOST_BY_ALIASES + 5
