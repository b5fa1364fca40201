"""The study from a fresh copy of the repository, run whole through DVC, Snakemake and Slurm; commands that are disturbed."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
# What holds wall-clock figures or MLflow ids, and so differs between two equal studies.
DIFFERS = (
    "data/timing",
    "reports/timing.csv",
    "reports/timing.svg",
    "reports/curves",
    "reports/index.html",
    "reports/writeup.md",
    "reports/kissing_number",
)
# Finishes its step when it is told to stop, and saves, as `grpo train` does.
TRAINING = """
import pathlib, signal, sys, time
stopped = []
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda *_: stopped.append(1))
pathlib.Path("started").touch()
while not stopped:
    time.sleep(0.01)
time.sleep(%s)
pathlib.Path("saved").touch()
sys.exit(%s)
"""


def environment(**extra: str) -> dict[str, str]:
    """This environment's programs first, a name for commits, no tracking server, and no job of Slurm, Snakemake or DVC."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "SNAKEMAKE_", "DVC_", "MLFLOW_TRACKING_URI")) or key == "SLURM_CONF"
    }
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "DVC_NO_ANALYTICS": "1",
    }
    env |= {f"GIT_{who}_{what}": f"tests@{who}.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return env | extra


def sh(folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment in ``folder``."""
    program = [sys.executable, "-m", "grpo"] if command[0] == "grpo" else [command[0]]  # not every environment has the script
    command = (*program, *command[1:])
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if check:
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


def fresh_clone(target: Path) -> Path:
    """The repository's files as a new git repository with the smoke study active and no results."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if name.startswith("reports/") or name == "dvc.lock" or not (source.exists() or source.is_symlink()):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name, follow_symlinks=False)
    sh(target, "git", "init", "-q")
    sh(target, "grpo", "study", "use", "smoke")
    sh(target, "git", "add", "-A")
    sh(target, "git", "commit", "-qm", "smoke")
    return target


def lock(folder: Path) -> dict[str, Any]:
    """stage -> path -> md5 of its outputs in dvc.lock, those without wall-clock figures."""
    differs = tuple(f"{path}/" for path in DIFFERS)
    stages = YAML(typ="safe").load((folder / "dvc.lock").read_text())["stages"]
    return {
        stage: {out["path"]: out["md5"] for out in entry.get("outs", []) if not f"{out['path']}/".startswith(differs)}
        for stage, entry in stages.items()
    }


def digests(folder: Path) -> dict[str, str]:
    """relative path -> SHA-256 of every file of every run."""
    files = [
        path for root in ("data/runs", "data/checkpoints") for path in sorted((folder / root).rglob("*")) if path.is_file()
    ]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def processes(folder: Path) -> list[psutil.Process]:
    """The running processes whose working folder is this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
