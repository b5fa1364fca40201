"""The package as a wheel, installed away from its source: it must bring along all that it reads."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from study_parts import ROOT, shorten_quickstart

SECRETS = {
    name: f"keep-this-secret-{name}"
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
}


@pytest.mark.slow
def test_installed_from_its_wheel_it_trains_and_reports(tmp_path: Path) -> None:
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
    shorten_quickstart(site / "grpo/shipped/studies/quickstart.yaml")

    empty = tmp_path / "empty"
    empty.mkdir()
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MLFLOW_TRACKING_URI"}} | SECRETS
    code = "import grpo, grpo.cli; print(grpo.__file__); grpo.cli.main()"
    ran = subprocess.run([python, "-c", code, "quickstart"], cwd=empty, env=env, check=True, capture_output=True, text=True)
    assert ran.stdout.startswith(str(site / "grpo/__init__.py")) and "Done." in ran.stdout
    assert "grpo_learning_rate: " in ran.stdout and "standard error" in ran.stdout
    assert "GRPO" in (empty / "quickstart/reports/writeup.md").read_text()
    written = [path for path in empty.rglob("*") if path.is_file()]
    assert len(written) > 30 and not [path for path in written if b"keep-this-secret" in path.read_bytes()]
    assert "keep-this-secret" not in ran.stdout + ran.stderr
