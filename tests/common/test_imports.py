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

from grpo.common import imports
from grpo.common.errors import UserError

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


# ------------------------------------------------------------------------------- files that have the name of another module

NAMES = ("torch", "json", "numpy", "sitecustomize", "usercustomize", "random", "typing", "sympy", "ray", "psutil", "pydantic")
OF_A_STUDY = """
import sys
from pathlib import Path
from grpo.common.imports import import_object, safe_environment, search_in, source_of
search_in(Path(sys.argv[1]))
import json, random, subprocess, torch
from grpo.grader.process import is_equal
from grpo.training.asynchronous.start import _start_ray
assert is_equal(r"\\frac{x^2-1}{x-1}", "x+1").equal  # by the grader's own process
assert subprocess.run([sys.executable, "-c", "import json, torch"], env=safe_environment()).returncode == 0  # as torchrun
assert source_of("package.inner:A").name == "inner.py"
assert import_object("own:Own").half == 0.5
_start_ray({"num_cpus": 1, "num_gpus": 0})
import ray
from own import Own
from grpo.training.asynchronous import actors  # by which torch is imported
from grpo.tasks.rows import Row
row = ray.remote(Row).remote("", {"a": Own("x")}, "")
assert type(ray.get(row.text.remote("a"))) is Own
"""


@pytest.mark.parametrize("command", [["-P", "-c", OF_A_STUDY], ["-m", "grpo", "--help"]])
def test_no_file_of_a_study_replaces_a_module(command: list[str], tmp_path: Path) -> None:
    """In this process and its children; modules beside the named one are found, and objects of theirs reach other processes."""
    study, ran = tmp_path / "study", tmp_path / "ran"
    for folder in (ran, study / "package"):
        folder.mkdir(parents=True)
    for name in (*NAMES, "package/__init__"):
        (study / f"{name}.py").write_text(f"import os\nos.mkdir({str(ran)!r} + '/' + __name__)\nraise ImportError\n")
    (study / "package/inner.py").write_text("A = 1\n")
    (study / "own.py").write_text("from own_helper import half\nclass Own(str):\n    half = half\n")
    (study / "own_helper.py").write_text("half = 0.5\n")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = [sys.executable, *command, str(study)]
    done = subprocess.run(program, cwd=study, env=environment, capture_output=True, text=True, check=False)
    assert not [*ran.iterdir()] and done.returncode == 0, done.stderr


def test_a_module_with_the_name_of_another_is_refused(tmp_path: Path) -> None:
    """One message with both files: otherwise the other module would be used in its place."""
    for name in ("random", "datasets", "mine"):
        (tmp_path / f"{name}.py").write_text("A = 1\n")
    imports.search_in(tmp_path)
    for name in ("random", "datasets"):
        with pytest.raises(UserError, match=f"{name}:A: .*{name}.py has the name of another module"):
            imports.source_of(f"{name}:A")
    assert imports.import_object("mine:A") == 1
