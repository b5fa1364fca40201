"""The part of benchmarks/gpu.py that runs the mini study on the device."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_parts.tools import ROOT, Row, Rows, Setting, require, seconds_of

NEEDS = ("pydantic", "ruamel", "typer", "mlflow", "dvc", "math_verify", "filelock", "tokenizers")


def study(setting: Setting) -> Rows:
    """Train a run of the mini study on this device: kill it with SIGKILL, continue it, and check that it learns."""
    require(*NEEDS)
    from ruamel.yaml import YAML

    on_device = {"engine": {"device": setting.device}, "learner": {"device": setting.device}}
    run = "grpo_learning_rate/3e-4/0"
    with tempfile.TemporaryDirectory() as temporary, Path(temporary, "log.txt").open("w+", encoding="utf-8") as log:
        folder = Path(temporary)
        shutil.copytree(ROOT / "studies", folder / "studies")
        env = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}

        def start(*command: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-m", "grpo", *command], cwd=folder, env=env, stdout=log, stderr=log)

        def finish(process: subprocess.Popen[bytes], command: str) -> None:
            if process.wait():
                log.seek(0)
                raise RuntimeError(f"{command}: {' '.join(log.read().split())[-400:]}")

        def base_model() -> Row:
            budgets = {"packed": 4096, "padded": None}
            for name, budget in budgets.items():
                learner = {**on_device["learner"], "max_tokens_per_microbatch": budget}
                overlay = {
                    "extends": setting.scale.study,
                    "description": "One run on the device that is measured.",
                    "seeds": [0],
                }
                with (folder / f"studies/measured-{name}.yaml").open("w", encoding="utf-8") as file:
                    YAML().dump({**overlay, **on_device, "learner": learner, "save_state_every": 2}, file)
            finish(start("study", "use", "measured-packed"), "study use")
            finish(start("dataset", "main"), "dataset")
            return {"seconds": seconds_of("cpu", lambda: finish(start("model", "main"), "model"))}

        def measure(name: str) -> Row:
            finish(start("study", "use", f"measured-{name}"), "study use")
            shutil.rmtree(folder / "data/state", ignore_errors=True)
            killed = start("train", "grpo_learning_rate", "3e-4")
            while killed.poll() is None and not list(folder.glob("data/state/runs/**/step-*")):
                time.sleep(0.01)
            killed.send_signal(signal.SIGKILL)
            code = killed.wait()
            seconds = seconds_of("cpu", lambda: finish(start("train", "grpo_learning_rate", "3e-4"), "train"))
            timing = json.loads((folder / f"data/timing/{run}/timing.json").read_text(encoding="utf-8"))
            with (folder / f"data/runs/{run}/validation.csv").open(encoding="utf-8") as file:
                rewards = [float(point["val/answer_reward"]) for point in csv.DictReader(file)]
            return {
                "killed_by": -code,
                "resumed_after": timing["resumed_after"],
                "answer_reward_first": rewards[0],
                "answer_reward_last": rewards[-1],
                "seconds_rest_of_run": seconds,
            }

        yield "base model, on the CPU", "", base_model
        yield "packed", "resumed, and .5 more reward at the end", lambda: measure("packed")
        yield "padded", "resumed, and .5 more reward at the end", lambda: measure("padded")
