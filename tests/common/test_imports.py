"""What a command imports: seconds of each of some hundred stages. Seen in processes of their own, after real work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from study_parts import activate

ROOT = Path(__file__).parents[2]
# Each takes longer than the rest of a stage's imports together, and the mini model needs none of them.
NOT_FOR_THE_MINI_MODEL = {
    *("datasets", "dvc", "IPython", "jinja2", "matplotlib", "mlflow", "multiprocess", "networkx", "openai", "pandas", "ray"),
    *("scipy", "sklearn", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx", "torchvision"),
    *("transformers", "huggingface_hub", "math_verify", "latex2sympy2_extended"),
}
PROGRAM = """
import json, sys
from grpo.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("modules", json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the smoke study, made short."""
    folder = tmp_path_factory.mktemp("smoke") / "project"
    folder.mkdir()
    params = activate("smoke", folder)
    params.write_text(re.sub(r"(?m)^( +(?:steps|n_grpo_steps):) \d+$", r"\1 2", params.read_text()))
    return folder


def loaded(project: Path, command: str) -> set[str]:
    """The modules of a process that has run ``grpo COMMAND``, and the packages that they are part of."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{project.parent}/mlflow.db"}
    arguments = [sys.executable, "-c", PROGRAM, *command.split()]
    done = subprocess.run(arguments, cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout.rpartition("modules ")[2])
    assert "grpo.cli" in modules
    return set(modules)


def test_a_stage_imports_what_it_needs(project: Path) -> None:
    """In the order in which they build upon one another."""
    stages = {  # and whether it computes with a model
        "--help": False,
        "study check": False,
        "dataset main": False,
        "training_inputs": False,
        "model main": True,
        "math_baseline": True,
        "train grpo_learning_rate 3e-4 --seed 0": True,
        "train grpo_learning_rate 1e-3 --seed 0": True,
        "select grpo_learning_rate": False,
        "train grpo_baselines reinforce_with_baseline --seed 0": False,  # equal to the winner, whose results it takes over
        "sft_dataset main": False,
        "train sft_experiment examples_32 --seed 0": True,
    }
    for command, computes in stages.items():
        modules = loaded(project, command)
        assert sorted(modules & NOT_FOR_THE_MINI_MODEL) == [], command
        assert ("torch" in modules) is computes, command
