"""The handouts' scripts: figures also when a stage is up to date, and one message without the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def script(name: str, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the project's folder with this PATH."""
    command = [sys.executable, name, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)


def test_figures_are_shown_when_the_stage_is_up_to_date(tmp_path: Path) -> None:
    """A command that does nothing stands for DVC with nothing to do."""
    dvc = tmp_path / "dvc"
    dvc.write_text("#!/bin/sh\n")
    dvc.chmod(0o755)
    baseline, sampled = (json.loads((ROOT / f"reports/{stage}.json").read_text()) for stage in ("math_baseline", "best_of_n"))
    shown = script("zero_shot.py", str(tmp_path)).stdout
    assert all(f"{prompt}: answer reward {values['accuracy']['value']:.3f} (" in shown for prompt, values in baseline.items())
    shown = script("best_of_n.py", str(tmp_path)).stdout
    for prompt, values in sampled.items():
        assert all(f"{prompt}, N = {n}: pass {kinds['pass']['value']:.3f} (" in shown for n, kinds in values["n"].items())


def test_without_the_environment_there_is_one_message() -> None:
    done = script("zero_shot.py", "/nowhere")
    assert done.returncode == 2 and done.stderr.startswith("dvc is not on PATH.") and "Traceback" not in done.stderr
