"""The stage's own lines of dvc.lock, against what DVC writes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import modify_yaml
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
    for way in (modify_yaml, repro_stage.modify_lock):
        path = tmp_path / way.__module__ / "dvc.lock"
        path.parent.mkdir()
        path.write_text(f"schema: '2.0'\nstages:\n{stages}{more}")
        for name in names:
            with way(str(path)) as content:
                content["stages"].update({name: AWKWARD})
        written.append(path.read_bytes())
    assert written[0] == written[1] != b""
    assert b"a long command" in written[1]


def test_the_projects_own_dvc_lock(tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    shutil.copy(ROOT / "dvc.lock", path)
    with repro_stage.modify_lock(str(path)) as content:
        names = list(content["stages"])
        content["stages"].update({name: dict(content["stages"][name]) for name in names[::9]})
    assert path.read_bytes() == (ROOT / "dvc.lock").read_bytes()
    assert len(names) > 100
