"""The stage's own lines of dvc.lock, against what DVC writes."""

from __future__ import annotations

import shutil
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import dumps_yaml, modify_yaml, parse_yaml
from workflow_parts import ROOT

sys.path.insert(0, str(ROOT / "workflow"))

import repro_stage

AWKWARD: dict[str, Any] = {
    "cmd": "grpo train " + "a long command that goes on " * 9,
    "deps": [{"path": "1e5", "hash": "md5", "md5": "12e34"}],
    "params": {
        "params.yaml": {"a": 1e-5, "b": [1, {"c": None}], "d": "3e-5", "é": "ü: x", "lines": "one\n  two\n", "none": {}}
    },
}
FIRST, MIDDLE, LAST = "dataset@main", "train@1e-4-0", "page"
LONG = "x" * 200  # YAML writes such a key in another form, which the quick way leaves to DVC


@pytest.mark.parametrize(
    "names", [[FIRST], [MIDDLE], [LAST], ["new@1e-5"], ["1e5"], ["a: b"], [MIDDLE, "new", LAST], [LONG], [LONG, MIDDLE]]
)
@pytest.mark.parametrize("more", ["", "datasets: []\n"])
def test_dvc_lock_has_the_bytes_that_dvc_gives_it(tmp_path: Path, names: list[str], more: str) -> None:
    stages = "".join(f"  {name}:\n    cmd: x\n    outs:\n    - path: y\n      size: 3e-05\n" for name in (FIRST, MIDDLE, LAST))
    written = []
    for way in ("DVC's", "ours"):
        path = tmp_path / way / "dvc.lock"
        path.parent.mkdir()
        path.write_text(f"schema: '2.0'\nstages:\n{stages}{more}")
        for name in names:
            with modify_yaml(str(path)) if way == "DVC's" else repro_stage.modify_own(str(path), stage=name) as content:
                content["stages"].update({name: AWKWARD})
        written.append(path.read_bytes())
    assert written[0] == written[1] != b""
    assert b"a long command" in written[1]


def test_the_projects_own_dvc_lock(tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    shutil.copy(ROOT / "dvc.lock", path)
    stages = parse_yaml(path.read_text(), path)["stages"]
    for name in list(stages)[::9]:
        assert repro_stage.parse_own(path.read_text(), str(path), stage=name)["stages"] == {name: stages[name]}
        with repro_stage.modify_own(str(path), stage=name) as content:
            content["stages"].update({name: dict(stages[name])})
    assert path.read_bytes() == (ROOT / "dvc.lock").read_bytes()
    assert len(stages) > 100


@pytest.mark.parametrize("name", [FIRST, MIDDLE, LAST, "new", "1e5", LONG])
@pytest.mark.parametrize("more", ["", "datasets: []\n"])
def test_a_stage_is_read_as_dvc_reads_it(name: str, more: str) -> None:
    written = dumps_yaml({"schema": "2.0", "stages": {stage: deepcopy(AWKWARD) for stage in (FIRST, "1e5", MIDDLE)}}) + more
    by_dvc = parse_yaml(written, "dvc.lock")["stages"].get(name)
    assert repro_stage.parse_own(written, "dvc.lock", stage=name)["stages"].get(name) == by_dvc
    assert (by_dvc is None) == (name in (LAST, "new", LONG))


def test_other_files_are_read_whole() -> None:
    assert repro_stage.parse_own("schema: '2.0'\nstages:\n  a: {}\n", "dvc.yaml", stage="b")["stages"] == {"a": {}}
