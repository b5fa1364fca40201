"""`python zero_shot.py`: the base model's zero-shot accuracy under the active study's prompts.

By the stage `math_baseline` and what it needs, on the study's validation problems. `--file validation.jsonl` takes the rows of
a file instead: MATH's (`problem`, `level`, ...), GSM8K's, or others with the columns `question` and `answer`. The active study
has model, prompts and card: `grpo study use gsm8k` or `math-24gb-first`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(*command: str) -> None:
    """Run a command of the project's environment; a failure ends the script with its code."""
    if shutil.which(command[0]) is None:
        print(f"{command[0]} is not on PATH. Activate the environment first: `. .venv/bin/activate`.", file=sys.stderr)
        sys.exit(2)
    # DVC runs commands with the login shell; that of a service user may be /bin/false.
    if code := subprocess.run(command, env=os.environ | {"SHELL": "/bin/sh"}).returncode:
        sys.exit(code)


def figures_of(stage: str) -> dict[str, Any]:
    """Bring a stage up to date, and read its figures, which exist also if it had nothing to do."""
    run("dvc", "repro", stage)
    figures: dict[str, Any] = json.loads(Path(f"reports/{stage}.json").read_text())
    return figures


def shown(estimate: dict[str, float]) -> str:
    """An estimate with its 95% interval."""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


def figures_or_file(stage: str, about: str | None) -> dict[str, Any]:
    """The figures of a stage; with ``--file`` none, as they are printed by the command that asks the file's questions."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", help="JSONL, JSON, CSV or Parquet; results in data/evaluations/")
    file = parser.parse_args().file
    if file is None:
        return figures_of(stage)
    if not Path(file).is_file():
        parser.error(f"{file}: no such file")
    run("dvc", "repro", "model@main")
    run("grpo", stage, "--file", file)
    return {}


if __name__ == "__main__":
    for prompt, values in figures_or_file("math_baseline", __doc__).items():
        print(f"{prompt}: answer reward {shown(values['accuracy'])}, {values['categories']}")
