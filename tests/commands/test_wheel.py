"""The package as a wheel, installed away from its source: it must bring along all that it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from study_parts import ROOT

SECRETS = {
    name: f"keep-this-secret-{name}"
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY")
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python in an environment with this one's packages and the project from its wheel."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    wheel = next(tmp_path.glob("grpo_study-*.whl"))
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    in_git = subprocess.run(["git", "ls-files", "grpo"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert set(in_git) - names == set()

    # An environment with this one's packages, but for the project, whose .pth file is not followed there.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    return python


@pytest.mark.slow
def test_a_project_from_the_wheel_runs_to_its_report(python: Path, tmp_path: Path) -> None:
    """Two commands; then an edit of the reward makes the stages stale that depend on it, and no others."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MLFLOW_TRACKING_URI"}} | SECRETS
    env["PATH"] = f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(*command: str, folder: Path = tmp_path / "lab") -> str:
        ran = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "keep-this-secret" not in ran.stdout + ran.stderr
        return ran.stdout

    where = run(str(python), "-P", "-c", "import grpo; print(grpo.__file__)", folder=tmp_path)
    assert where.startswith(str(python.parents[1]))
    assert "make repro" in run("grpo", "init", "lab", "--git", folder=tmp_path)
    file = tmp_path / "lab/studies/first.yaml"
    shorter = {"steps: 1200": "steps: 40", "n_grpo_steps: 40": "n_grpo_steps: 2", "every: 8": "every: 1", "[0, 1, 2]": "[0, 1]"}
    text = file.read_text()
    for long, short in shorter.items():
        assert long in text
        text = text.replace(long, short)
    file.write_text(text)
    run("grpo", "study", "use", "first")
    assert "Done." in run("make", "repro")
    page = (tmp_path / "lab/reports/writeup.md").read_text()
    assert "letters ends above exact by at least 0.05" in page and "(own)" in page
    assert json.loads((tmp_path / "lab/data/training_inputs/rewards.json").read_text())["code"]
    assert "up to date" in run("dvc", "status")
    written = [path for path in (tmp_path / "lab").rglob("*") if path.is_file()]
    assert len(written) > 100 and not [path for path in written if b"keep-this-secret" in path.read_bytes()]

    with (tmp_path / "lab/studies/my_rewards.py").open("a") as rewards:
        rewards.write("\n# edited\n")
    run("dvc", "repro", "training_inputs")
    stale = run("dvc", "status", "--json")
    assert "train@rewards-letters" in stale and "model@main" not in stale and "dataset@main" not in stale
