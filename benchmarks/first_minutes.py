"""Measure the seconds until the first report of this commit and an older one, in turns, each from a fresh clone.

``python benchmarks/first_minutes.py OLD`` clones this repository, checks out OLD and the current commit in turns, and times
``make install``, ``make repro``, and ``make repro`` again with nothing to do, for the active study or ``--study`` (a name or a
file that both commits can compose). It takes over an hour; leave the machine idle, as other work distorts the times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = {"install": "make install", "repro": "make repro", "nothing_to_do": "make repro"}


def git(*arguments: str) -> str:
    """Run a git command in this repository and return its output."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def measure(commit: str, folder: Path, study: str | None) -> dict[str, dict[str, float]]:
    """Clone a commit and time its steps; raises CalledProcessError if one fails."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], check=True)
    # With this variable each process would compile everything again.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    # Empty caches, so that packages are downloaded as on a new machine.
    environment |= {"PIP_CACHE_DIR": f"{folder}.cache/pip", "UV_CACHE_DIR": f"{folder}.cache/uv"}
    shutil.rmtree(f"{folder}.cache", ignore_errors=True)
    found = {}
    for step, command in STEPS.items():
        if step == "repro" and study:
            use = [".venv/bin/grpo", "study", "use", study, "--force"]
            subprocess.run(use, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        load, began = os.getloadavg()[0], time.perf_counter()
        with folder.with_suffix(f".{step}.log").open("w") as log:
            subprocess.run(command, shell=True, check=True, cwd=folder, env=environment, stdout=log, stderr=log)
        found[step] = {"seconds": round(time.perf_counter() - began, 1), "load_before": round(load, 1)}
        print(f"{commit[:7]} {step}: {found[step]['seconds']} s", flush=True)
    return found


def main() -> None:
    """Measure, and write benchmarks/results/first_minutes.json."""
    parser = argparse.ArgumentParser(description="Measure the seconds until the first report, and those of an older commit.")
    parser.add_argument("old", help="the commit to compare with")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--study", help="name in studies/ or a study file; default: the active study")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the clones (a few GB)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first_minutes.json")
    options = parser.parse_args()

    study = str(Path(options.study).resolve()) if options.study and Path(options.study).exists() else options.study
    commits = {"old": git("rev-parse", options.old), "new": git("rev-parse", "HEAD")}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} threads",
        "python": sys.version.split()[0],
        "commits": commits,
        "study": options.study or "the active one",
        "turns": [],
    }
    for turn in range(options.turns):
        result["turns"].append({})
        for name, commit in commits.items():
            result["turns"][-1][name] = measure(commit, options.folder / f"{name}{turn}", study)
            options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
