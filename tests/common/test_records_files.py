"""Reading and writing problems, JSON and YAML, folders that are whole or absent, and digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, dvc_hash, files_digest, read_json, write_csv, write_json, write_text
from grpo.common.records import Example, Problem, is_number, read_problems, whole, write_records
from grpo.common.yaml_file import parse_yaml

PROBLEMS = [
    Problem("a/1", "What is 1 + 1?", "2", 1, "sums"),
    Problem("a/2", "Ist “½”\u2028 \\frac{1}{2}?\nYes\r\n", "\\frac12", 5, "Brüche"),
    Problem("a/3", "?", "x"),
]


def test_problems_survive_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "problems.jsonl"
    write_records(path, PROBLEMS)
    assert read_problems(path) == PROBLEMS
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4 and lines[-1] == ""
    record = {"id": "a/1", "question": "What is 1 + 1?", "ground_truth": "2", "level": 1, "subject": "sums"}
    assert json.loads(lines[0]) == record
    assert "Brüche" in lines[1]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('{"id": "a", "question": "?"', id="cut off"),
        pytest.param('{"id": "a", "question": "?"}', id="a field missing"),
        pytest.param('{"id": "a", "question": "\\ud800", "ground_truth": "1"}', id="half of a surrogate pair"),
        pytest.param("[" * 100_000, id="nested too deeply"),
    ],
)
def test_the_number_of_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "problems.jsonl"
    write_records(path, PROBLEMS[:2])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"problems\.jsonl:3: .*dvc repro -f -s dataset"):
        read_problems(path)


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_last_line_may_lack_its_end_but_a_file_without_lines_is_damaged(tmp_path: Path, end: str) -> None:
    path = tmp_path / "problems.jsonl"
    write_text(path, '{"id": "a", "question": "?", "ground_truth": "1"}' + end)
    assert read_problems(path) == [Problem("a", "?", "1")]
    write_text(path, end)
    with pytest.raises(UserError, match=r"problems\.jsonl:1: damaged"):
        read_problems(path)


def test_a_reward_is_a_number_and_whole_where_only_rounding_says_otherwise() -> None:
    assert [whole(x) for x in (1 - 9e-7, 1 + 9e-7, -9e-7, 0.5, 1 - 2e-6)] == [1.0, 1.0, 0.0, 0.5, 1 - 2e-6]
    assert [is_number(x) for x in (1, np.float32(1), np.ones(()), "1", None, np.ones(1))] == [True] * 3 + [False] * 3


def test_a_record_that_no_file_can_hold_is_a_users_error_whoever_makes_it() -> None:
    with pytest.raises(UserError, match=r"Problem: question is '\\udc80', not text that UTF-8 can hold"):
        Problem("a", "\udc80", "1")
    with pytest.raises(UserError, match=r"Example: response is None, not text"):
        Example("?", None, "1", 1.0)  # type: ignore[arg-type]
    assert Problem("a", "😀", "1").question.encode() == b"\xf0\x9f\x98\x80"  # a whole pair is a character


# --------------------------------------------------------------------------------------------------------- whole folders


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_whole_folder_appears_at_the_end_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "runs/one"
    for content in ("old", "new"):
        with atomic_folder(target) as folder:
            assert names(folder) == []
            (folder / content).touch()
            assert (target.exists() and names(target)) == (content == "new" and ["old"])
        assert names(target) == [content] and names(tmp_path / "runs") == ["one"]


def test_the_old_folder_is_taken_apart_when_the_new_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill in the middle of that leaves no half of it."""
    target = tree(tmp_path / "one", {"old.txt": "old"})

    def killed(folder: Path, **_: object) -> None:
        if folder.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt), atomic_folder(target) as folder:
        (folder / "new.txt").write_text("new")
    assert names(target) == ["new.txt"]
    monkeypatch.undo()
    with atomic_folder(target):
        pass
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existed", [True, False])
def test_an_exception_leaves_the_old_folder_and_nothing_else(tmp_path: Path, error: type[BaseException], existed: bool) -> None:
    target = tmp_path / "one"
    if existed:
        target.mkdir()
        (target / "old.txt").write_text("old")
    with pytest.raises(error), atomic_folder(target) as folder:
        (folder / "new.txt").write_text("new")
        raise error
    assert names(tmp_path) == (["one"] if existed else [])
    assert not existed or (target / "old.txt").read_text() == "old"


@pytest.mark.parametrize("odd", [".one.draft", ".one.old.draft", "one"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_a_killed_process_left_is_not_taken_over(tmp_path: Path, odd: str, is_folder: bool) -> None:
    write_text(tmp_path / odd / "half.txt" if is_folder else tmp_path / odd, "half")
    for _ in range(2):
        with atomic_folder(tmp_path / "one") as folder:
            (folder / "new.txt").write_text("new")
    assert names(tmp_path / "one") == ["new.txt"]
    assert names(tmp_path) == ["one"]


def test_a_second_writer_of_a_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    target = tmp_path / "best_of_n"
    refused = rf"best_of_n: another process that writes it is already running \(process {os.getpid()} on "
    with atomic_folder(target) as folder:
        (folder / "first.txt").write_text("first")
        with pytest.raises(UserError, match=refused), atomic_folder(target):
            pass
        (folder / "second.txt").write_text("second")
    assert names(target) == ["first.txt", "second.txt"]
    assert names(tmp_path) == ["best_of_n"]


# -------------------------------------------------------------------------------------------------------- text, JSON and YAML


WRITE_OFTEN = """
import sys
from pathlib import Path
from grpo.common.files import write_text
for _ in range(300):
    write_text(Path(sys.argv[1]), sys.argv[2] * 50_000)
"""


def test_two_processes_may_write_one_text_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "winner.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_OFTEN, str(path), letter]) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert path.read_text() in ("a" * 50_000, "b" * 50_000)
    assert names(tmp_path) == ["winner.json"]


def test_text_and_json_are_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "value.json"
    value = {"z": 0.1 + 0.2, "a": [1, "é"]}
    write_json(path, value)
    assert read_json(path, made_by="x") == value
    assert list(read_json(path, made_by="x")) == ["z", "a"]
    assert "é" in path.read_text(encoding="utf-8")
    assert names(path.parent) == ["value.json"]

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "half")
    assert read_json(path, made_by="x") == value and names(path.parent) == ["value.json"]


def test_what_a_spreadsheet_would_compute_is_written_as_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", pd.DataFrame({"text": ["=1+1", "+1", "-1", "@a", "a=1"], "number": [-1.5] * 5}))
    expected = "text,number\n'=1+1,-1.5\n'+1,-1.5\n'-1,-1.5\n'@a,-1.5\na=1,-1.5\n"
    assert (tmp_path / "a.csv").read_text() == expected


def test_missing_and_damaged_json_name_the_stage(tmp_path: Path) -> None:
    path = tmp_path / "winner.json"
    with pytest.raises(UserError, match=r"winner\.json: no such file.*dvc repro select@x"):
        read_json(path, made_by="select@x")
    for content in ('{"a": ', "[" * 100_000, "1" * 5_000):
        path.write_text(content)
        with pytest.raises(UserError, match=r"winner\.json: damaged.*dvc repro -f -s select@x"):
            read_json(path, made_by="select@x")
    path.write_bytes(b"{\n\n\xff}")
    with pytest.raises(UserError, match=r"winner\.json:3: damaged \(.* Make it again\.$"):  # no stage makes it
        read_json(path, made_by="")


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    ("text", "message"),
    [(b"a: 1\nb: 2\na: 3\n", ":3: not valid YAML (found duplicate key"), (b"a: 1\nb: \xff\n", ": not valid YAML (")],
)
def test_what_is_no_yaml_is_refused(tmp_path: Path, kind: str, text: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        parse_yaml(path, kind)
    assert str(caught.value).startswith(f"{path}{message}")


# --------------------------------------------------------------------------------------------------------------- digests


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        write_text(root / name, content)
    return root


def test_a_digest_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    files = {"config.json": "{}", "sub/weights": "abc"}
    original = files_digest(tree(tmp_path / "one", files))
    assert files_digest(tree(tmp_path / "elsewhere" / "two", dict(reversed(files.items())))) == original
    assert len(original) == 16 and int(original, 16) >= 0
    others = [
        {"config.json": "{ }", "sub/weights": "abc"},
        {"config.json": "{}", "sub/weights": "abd"},
        {"config.json": "{}", "sub/other": "abc"},
        {"config.json": "{}"},
        {"config.json": "{}", "sub/weights": "abc", "empty": ""},
        {"config.json": "abc", "sub/weights": "{}"},
    ]
    digests = {files_digest(tree(tmp_path / f"other{i}", other)) for i, other in enumerate(others)}
    assert len(digests) == len(others)
    assert original not in digests
    tree(tmp_path, {"a/x": "1", "b/x": "1", "c/x": "2", "d/y": "1"})  # digests of single files
    assert files_digest(tmp_path / "a/x") == files_digest(tmp_path / "b/x")
    assert len({files_digest(tmp_path / name) for name in ("a/x", "c/x", "d/y")}) == 3


def test_what_python_compiled_is_no_part_of_a_digest(tmp_path: Path) -> None:
    """Python writes it while the first evaluation runs, and one taken up again would look like another."""
    code = tree(tmp_path / "room", {"a.py": "1", "deep/b.py": "2"})
    before = files_digest(code)
    tree(code, {"__pycache__/a.cpython-311.pyc": "x", "deep/__pycache__/b.cpython-311.pyc": "y"})
    assert files_digest(code) == before
    inside = tree(tmp_path / "__pycache__/room", {"a.py": "1", "deep/b.py": "2"})
    assert files_digest(inside) == before  # what lies above does not count
    assert files_digest(tree(inside, {"a.py": "3"})) != before


def test_the_hash_is_dvcs(workdir: Path) -> None:
    for name in ("best/metadata.json", "best/model.safetensors"):
        write_text(Path("kept") / name, name)
    write_text(Path("kept/best-of-all.json"), "ä\r\n")  # sorted by DVC as a path: before or after best/
    write_text(Path("kept/a b.txt"), "")
    dvc = str(Path(sys.executable).with_name("dvc"))
    for command in (["init", "--no-scm", "-q"], ["add", "-q", "kept"]):
        subprocess.run([dvc, *command], check=True, env=os.environ | {"DVC_NO_ANALYTICS": "1"})
    assert f"md5: {dvc_hash(Path('kept'))}" in Path("kept.dvc").read_text()
