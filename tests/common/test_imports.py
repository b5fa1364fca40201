"""What a command imports: seconds of each of some hundred stages. Seen in processes of their own, after real work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from study_parts import ROOT, activate

# Each takes long, and the mini model needs none of them; but for a run's entry in MLflow, and for torch's own optimizer.
NOT_FOR_THE_MINI_MODEL = {
    *(
        "datasets",
        "dvc",
        "IPython",
        "jinja2",
        "matplotlib",
        "multiprocess",
        "networkx",
        "openai",
        "ray",
        "sklearn",
        "torchvision",
    ),
    *("transformers", "huggingface_hub", "math_verify", "latex2sympy2_extended"),
}
OF_A_RUN = {"mlflow", "pandas", "scipy"}
OF_THE_OPTIMIZER = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx"}
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
    needed: dict[str, set[str]] = {
        "--help": set(),
        "study check": set(),
        "dataset main": set(),
        "training_inputs": set(),
        "model main": {"torch"} | OF_A_RUN | OF_THE_OPTIMIZER,
        "math_baseline": {"torch", "jinja2"} | OF_A_RUN,  # its page of examples is a template
        "train grpo_learning_rate 3e-4 --seed 0": {"torch"} | OF_A_RUN | OF_THE_OPTIMIZER,
        "train grpo_learning_rate 1e-3 --seed 0": {"torch"} | OF_A_RUN | OF_THE_OPTIMIZER,
        "select grpo_learning_rate": {"pandas", "scipy"},  # for its intervals
        "train grpo_baselines reinforce_with_baseline --seed 0": OF_A_RUN,  # takes over the winner's results, its equal
        "sft_dataset main": set(),
        "train sft_experiment examples_32 --seed 0": {"torch"} | OF_A_RUN | OF_THE_OPTIMIZER,
    }
    for command, packages in needed.items():
        modules = loaded(project, command)
        assert modules & ({"torch"} | NOT_FOR_THE_MINI_MODEL | OF_A_RUN | OF_THE_OPTIMIZER) == packages, command
