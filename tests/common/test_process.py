"""What the same bits every time rest on; what the stages import; files that have the name of another module."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo.common.errors import AlreadyReported, ToBeResumed, UserError, own_errors


def _has_strict_mode() -> bool:
    cpu = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpu.exists() and "GenuineIntel" in cpu.read_text()


@pytest.mark.skipif(not _has_strict_mode(), reason="MKL promises its strict mode on Intel's processors only")
def test_a_product_does_not_depend_on_how_its_rows_are_shared_out() -> None:
    """What `grpo` runs under: row by row, in two threads or in one, the same bits (without it they differ)."""
    script = (
        "from grpo.common.process import fix_cpu_kernels; fix_cpu_kernels()\n"
        "import torch; torch.manual_seed(0); x, w = torch.randn(512, 64), torch.randn(768, 64)\n"
        "def product(rows, threads): torch.set_num_threads(threads); return torch.nn.functional.linear(x[:rows], w)\n"
        "full = product(512, 2)\n"
        "assert all(torch.equal(product(n, t), full[:n]) for n in (1, 2, 3, 100, 512) for t in (1, 2, 3))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc")
def test_freed_memory_is_used_again() -> None:
    """One, three and ten tensors at a time, of 1, 4 and 8 MB: the second time the system hands out no more pages."""
    script = (
        "import resource, torch\n"
        "from grpo.common.process import start_threads; start_threads(1)\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for size in (2**18, 2**20, 2**21):\n"
        "        for n in (1, 3, 10, 10, 3, 1) * 3: [torch.ones(size) for _ in range(n)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "first, second = faults(), faults()\n"
        "assert second < 1000, (first, second)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.nightly
def test_the_first_computation_of_a_process_is_like_any_other() -> None:
    """300 processes that begin with a cosine in two threads; without `start_threads` about 2% of them differ."""
    script = """
import hashlib, os, torch
from grpo.common.process import start_threads

torch.set_num_threads(1)  # the parent must start no threads: they do not survive a fork
x = torch.linspace(0, 150, 512 * 150 * 16)
results = set()
for _ in range(300):
    reading, writing = os.pipe()
    if os.fork() == 0:
        start_threads(2)
        os.write(writing, hashlib.sha1(torch.cos(x).numpy().tobytes()).digest())
        os._exit(0)
    os.close(writing)
    results.add(os.read(reading, 100))
    os.close(reading)
    os.wait()
assert len(results) == 1 and b"" not in results, results
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


# -------------------------------------------------------------------------------------------------------------------- imports


STAGES = """
import sys
from importlib import import_module

def load(modules, unwanted):
    for module in modules.split():
        import_module(module)
    found = {name for name in unwanted.split() if name in sys.modules}
    assert not found, (modules, found)

light = "datasets dvc IPython jinja2 matplotlib multiprocess networkx openai ray sklearn torchvision transformers"
light += " huggingface_hub math_verify latex2sympy2_extended sympy"
load("grpo.cli grpo.tasks.build grpo.tasks.sft_dataset grpo.study.training_inputs", light + " torch mlflow pandas scipy")
load("grpo.results.selection", light + " torch mlflow")
load("grpo.training.run", light + " torch")  # the reuse of a run
load("grpo.training.train grpo.training.grpo grpo.pretraining.base_model grpo.evaluation.evaluator", light)
"""


def test_a_stage_imports_what_it_needs() -> None:
    """In one process, from the commands that need least to those that train."""
    subprocess.run([sys.executable, "-c", STAGES], check=True)


# ------------------------------------------------------------------------------- files that have the name of another module

NAMES = ("torch", "json", "numpy", "sitecustomize", "usercustomize", "random", "typing", "sympy", "ray", "psutil", "pydantic")
OF_A_STUDY = """
import sys
from pathlib import Path
from grpo.common.imports import import_object, safe_environment, search_in, source_of
search_in(Path(sys.argv[1]))
import json, random, subprocess, torch
from grpo.grader.process import is_equal
assert is_equal(r"\\frac{x^2-1}{x-1}", "x+1").equal  # by the grader's own process
assert subprocess.run([sys.executable, "-c", "import json, numpy"], env=safe_environment()).returncode == 0  # as torchrun
assert source_of("package.inner:A").name == "inner.py"
assert import_object("own:Own").half == 0.5
"""
WITH_ACTORS = """
from grpo.training.asynchronous.start import _start_ray
_start_ray({"num_cpus": 1, "num_gpus": 0})
import ray
from own import Own
from grpo.training.asynchronous import actors  # by which torch is imported
from grpo.common.imports import is_import_path
assert ray.get(ray.remote(is_import_path).remote(Own("own:Own")))  # another process has loaded the class
"""


@pytest.mark.parametrize("program", [OF_A_STUDY, pytest.param(OF_A_STUDY + WITH_ACTORS, marks=pytest.mark.nightly)])
def test_no_file_of_a_study_replaces_a_module(program: str, tmp_path: Path) -> None:
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
    command = [sys.executable, "-P", "-c", program, str(study)]
    done = subprocess.run(command, cwd=study, env=environment, capture_output=True, text=True, check=False)
    assert not [*ran.iterdir()] and done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), ToBeResumed("x"), AlreadyReported(1), UserError("x")])
def test_what_ends_a_run_is_no_mistake_in_the_studys_own_code(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, own_errors("reward: own:reward"):
        raise error
    assert caught.value is error
