"""A toy pipeline that stands in for the study, and what is needed to run, watch and disturb it.

It has three layers; its stages take no time, DVC and Snakemake about a second each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from dvc.utils.serialize import load_yaml

ROOT = Path(__file__).parents[2]

# `ran.txt` is no output of any stage: it counts what was really run.
DVC_YAML = """
stages:
  source:
    cmd: mkdir -p data && echo ${base} > data/source && echo source >> ran.txt
    params: [base]
    outs: [data/source]
  train:
    matrix: {arm: "${arms}", seed: [0]}
    cmd: >-
      test ${item.arm} != ${broken} && mkdir -p data/runs && grep -Eo '${item.arm}"?: [0-9]+' params.yaml |
      cat data/source - > data/runs/${item.arm}-${item.seed} && echo train-${item.arm} >> ran.txt
    deps: [data/source]
    params: ["scales.${item.arm}"]
    outs: ["data/runs/${item.arm}-${item.seed}"]
    meta: {resources: train}
  report.final-one:
    cmd: cat data/runs/* > report.txt && echo report >> ran.txt
    deps: [data/runs]
    outs:
      - report.txt: {cache: false}
    meta: {resources: small}
"""
PARAMS = """
base: 1
arms: ["1e-4", no_std]
scales: {"1e-4": 2, no_std: 3}
broken: none
resources:
  small: {gpus: 0, cpus: 1, mem_mb: 100, runtime_min: 5}
  train: {gpus: 0, cpus: 64, mem_mb: 100, runtime_min: 5}
"""
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
    """The environment of every command: this interpreter's programs first, nothing of the machine's GPUs or Slurm."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SNAKEMAKE_", "DVC_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    git = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t"}
    return {**kept, **git, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "DVC_NO_ANALYTICS": "1", **extra}


def call(repo: Path, *command: str, ok: bool = True, timeout: float = 120) -> str:
    """Run a command in the repository and return all it printed."""
    done = subprocess.run(
        command, cwd=repo, env=environment(DVC_SITE_CACHE_DIR=str(repo / ".dvc" / "site")), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def snakemake(repo: Path, *arguments: str, profile: str = "local", **options: Any) -> str:
    """Run `snakemake --profile PROFILE` as a user would."""
    return call(repo, "snakemake", "--profile", profile, *arguments, **options)


def ran(repo: Path) -> list[str]:
    """What ran since the last question."""
    path = repo / "ran.txt"
    lines = sorted(path.read_text().split()) if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def edit(repo: Path, file: str, old: str, new: str) -> None:
    """Replace a piece of a file that must be there."""
    text = (repo / file).read_text()
    assert old in text
    (repo / file).write_text(text.replace(old, new))


def lock(repo: Path) -> dict[str, Any]:
    """The stages of dvc.lock."""
    return dict(load_yaml(str(repo / "dvc.lock"))["stages"])


def new_repo(repo: Path) -> Path:
    """The toy pipeline in a new repository, with the project's own workflow folder."""
    repo.mkdir()
    shutil.copytree(ROOT / "workflow", repo / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("local", "slurm"):
        (repo / name).symlink_to((ROOT / name).readlink())
    (repo / "dvc.yaml").write_text(DVC_YAML)
    (repo / "params.yaml").write_text(PARAMS)
    # Were data/ not ignored by git already, DVC would write .gitignore files into it, in the order in which stages end; they
    # would be part of the hash of data/runs.
    shutil.copy(ROOT / ".gitignore", repo / ".gitignore")
    call(repo, "git", "init", "--quiet")
    call(repo, "dvc", "init", "--quiet")
    return repo


def processes(folder: Path) -> list[psutil.Process]:
    """The running processes whose working folder is this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
