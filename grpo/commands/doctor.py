"""Check this machine against a study's requirements."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo.commands import gpu_memory
from grpo.common.errors import reason
from grpo.common.imports import named_file
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.study.settings import MAIN, HubModel, SampledTraces
from grpo.study.software import OPTIMIZER, VLLM, hardware, install_vllm, software
from grpo.tasks.rows import HubDataset, LocalFiles
from grpo.tasks.sft_dataset import HubTraces, JsonlTraces

GIB = gpu_memory.GIB
HUB_TIMEOUT_S = 10.0
DRIVERS = {"12": "R525", "13": "R580"}  # minimum driver by CUDA version (NVIDIA, "CUDA Toolkit and minimum required driver")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        good: False if the study cannot run like this; None if unknown.
        remedy: what to do if it is not good.
    """

    name: str
    good: bool | None
    found: str
    remedy: str = ""


def examine(study: Study) -> list[Finding]:
    """Run all checks. They change nothing, and use the network only to ask the Hub, if the study needs it."""
    of_gpus, others = ([check(study) for check in checks] for checks in ((_gpus, _gpu_memory), (_memory, _disk, _files, _hub)))
    return [*_torch_and_driver(study), *of_gpus, *_packages(study), *others]


def report(findings: list[Finding]) -> str:
    """Format the findings as text."""
    lines = []
    for finding in findings:
        mark = {True: "ok     ", False: "MISSING", None: "unknown"}[finding.good]
        lines.append(f"{mark} {finding.name}: {finding.found}".replace("\n", "\n        "))
        if not finding.good:
            lines.append(f"        {finding.remedy}")
    return "\n".join(lines)


def _needs_gpu(study: Study) -> bool:
    return any(device.startswith("cuda") for device in (study.engine.device, study.learner.device))


def _torch_and_driver(study: Study) -> list[Finding]:
    needed, cuda, machine = _needs_gpu(study), torch.version.cuda, hardware()
    gpus = f"{machine['driver']}, for {', '.join(machine['gpus'])}" if machine["gpus"] else "nvidia-smi shows no GPU"
    build = "Install a CUDA build: https://pytorch.org/get-started/locally"
    return [
        Finding(
            "torch", bool(cuda) or not needed, f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPU'}", build
        ),
        Finding("driver", bool(machine["gpus"]) or not needed, gpus, "Install NVIDIA's driver, or use studies/mini.yaml."),
    ]


def _gpus(study: Study) -> Finding:
    """Check that there are enough GPUs for the largest stage, and that each can be used (torch also counts unusable ones)."""
    needed, seen = gpus_needed(study), torch.cuda.device_count()
    found = f"torch sees {seen}, the study's largest stage needs {needed}"
    if seen < needed:
        remedy = (
            f"{study.study} uses {needed}: choose a study for fewer GPUs (`grpo study list`), leave out the experiments that "
            "need so many (`arms: {}`), or check CUDA_VISIBLE_DEVICES."
        )
        return Finding("GPUs", False, found, remedy)
    for i in range(needed):
        try:
            torch.ones(1, device=f"cuda:{i}").sum().item()
        except Exception as error:  # whatever torch, the driver or another process on the GPU raises
            driver = DRIVERS.get((torch.version.cuda or "").partition(".")[0], "a driver for it")
            remedy = f"CUDA {torch.version.cuda} needs NVIDIA's {driver} or newer; `nvidia-smi` shows it, and who uses the GPU."
            return Finding("GPUs", False, f"{found}; cuda:{i} cannot be used: {reason(error)}", remedy)
    return Finding("GPUs", True, found + (", and can use them" if needed else ""))


def gpus_needed(study: Study) -> int:
    """GPUs that the largest stage needs: those reserved for it or named by its devices."""
    devices = (study.engine.device, study.learner.device)
    named = max((int(device.partition(":")[2] or 0) + 1 for device in devices if device.startswith("cuda")), default=0)
    processes = study.learner.processes if study.learner.device == "cuda" else 0
    experiments = [study.experiments[name] for name in study.active_experiments]
    kinds = {"small", "model", "evaluate", *(kind for one in experiments for kind in (one.resources, one.timed))}
    return max(named, processes, *(resources.gpus for kind, resources in study.resources.items() if kind in kinds))


def _gpu_memory(study: Study) -> Finding:
    """Check that the study's GPU memory (:mod:`grpo.commands.gpu_memory`) fits the study's card and the one in this machine."""
    name = "GPU memory"
    if not _needs_gpu(study):
        return Finding(name, True, "not needed")
    try:
        there = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(gpus_needed(study))]
    except (RuntimeError, AssertionError):  # no usable GPU, as `_gpus` reports
        there = []
    card = study.gpu_memory_gib or (min(there) if there else None)
    shape = gpu_memory.shape_of(study)
    if card is None or shape is None:
        what = "gpu_memory_gib in params.yaml" if card is None else "the shape of the model (data/model/config.json)"
        return Finding(name, None, f"not computed, as {what} is missing", "Add it, or run the stage `model` first.")
    problems = gpu_memory.problems(study, shape, card)
    # 0.97, as torch sees a little less memory than nvidia-smi.
    if study.gpu_memory_gib and there and min(there) < 0.97 * card:
        problems.append(
            f"a GPU here has {min(there):.1f} GiB, and the study is for {card:g}: set gpu_memory_gib to what it has"
        )
    found = f"computed, largest over the arms\n{gpu_memory.table(study, shape, card)}"
    return Finding(name, not problems, found, "Does not fit. " + "; also ".join(problems))


def _packages(study: Study) -> list[Finding]:
    installed, compiler = software((*VLLM, OPTIMIZER)), shutil.which("g++") or shutil.which("clang++")
    vllm = next((installed[name] for name in VLLM if name in installed), None)
    install = f"Needs vllm>=0.26,<0.33: {install_vllm(study.engine.device)}, or set engine.name to transformers."
    bits = "pip install bitsandbytes, or set learner.optimizer to adamw."
    wanted = (
        ("vLLM", study.engine.name == "vllm", vllm, vllm is not None and "0.26" <= str(vllm)[:4] < "0.33", install),
        (OPTIMIZER, study.learner.optimizer == "adamw_8bit", installed.get(OPTIMIZER), OPTIMIZER in installed, bits),
        ("C++ compiler", study.learner.compile, compiler, bool(compiler), "learner.compile needs one: install g++."),
    )
    lacking = {True: "not installed", False: "not installed, and not needed"}
    return [Finding(name, fits or not need, found or lacking[need], remedy) for name, need, found, fits, remedy in wanted]


def _memory(study: Study) -> Finding:
    available, needed = hardware()["memory_gib"], study.resources["train"].mem_mb / 1024
    remedy = "Lower resources.train.mem_mb if runs need less, or use a larger machine."
    return Finding("memory", available >= 0.9 * needed, f"{available} GiB; a run reserves {needed:.0f}", remedy)


def _disk(study: Study) -> Finding:
    """Check the disk: the weights, each run's checkpoints (twice, as DVC's cache may copy them) and saved states."""
    free, shape = shutil.disk_usage(Path.cwd()).free / GIB, gpu_memory.shape_of(study)
    if study.models[MAIN].source == "pretrain":
        return Finding("disk", free >= 2, f"{free:.0f} GiB free; the study may need 2", "Free some.")
    if shape is None:
        found = f"{free:.0f} GiB free; the shape of the model is not known"
        return Finding("disk", None, found, "Run the stage `model` first.")
    weights = shape.parameters * gpu_memory.BYTES[study.learner.dtype] / GIB
    each = study.resources["train"].gpus
    at_once = max(1, torch.cuda.device_count() // each) if each else 1
    state = gpu_memory.saved_state_bytes(study, shape) / GIB
    kept = 0
    for name in study.active_experiments:
        for arm in study.experiments[name].arms:
            config = effective_run(study, name, arm, study.seeds[0], []).config
            kept += (len(study.checkpoints) + len(config.keep_steps)) * len(study.seeds_of(name))
    checkpoints, states = 2 * weights * kept, gpu_memory.STATES_ON_DISK * at_once * state
    needed = 3 * weights + checkpoints + states  # the model: in the Hub's cache, in data/model and in DVC's cache
    found = (
        f"{free:.0f} GiB free; the study may need {needed:.0f}: {checkpoints:.0f} for {kept} checkpoints of {weights:.1f} "
        f"(twice, with DVC's cache), {states:.0f} for the saved states of {at_once} run(s) in progress "
        f"({gpu_memory.STATES_ON_DISK} of {state:.1f} each), {3 * weights:.0f} for the model"
    )
    remedy = "Free some, keep fewer checkpoints (`checkpoints:` in params.yaml), have fewer `seeds`, or leave experiments out."
    return Finding("disk", free >= needed, found, remedy)


def _files(study: Study) -> Finding:
    files = [source for source in _sources(study) if isinstance(source, LocalFiles)]
    wanted = [path for source in files for path in (source.train, source.validation) if path]
    wanted += [traces.path for traces in study.sft_datasets.values() if isinstance(traces, JsonlTraces)]
    missing = [path for path in wanted if not named_file(path).is_file()]
    found = f"missing: {', '.join(missing)}" if missing else ", ".join(wanted) or "none needed"
    return Finding("data files", not missing, found, "Add them, or correct `source` in `tasks:` or `path` in `sft_datasets:`.")


def _hub(study: Study) -> Finding:
    traces = study.sft_datasets.values()
    models = [getattr(model, "like", model) for model in study.models.values()]
    models += [one.model for one in traces if isinstance(one, SampledTraces)]
    wanted = [("model", model.repo) for model in models if isinstance(model, HubModel)]
    wanted += [("dataset", source.hub) for source in _sources(study) if isinstance(source, HubDataset)]
    wanted += [("dataset", one.repo) for one in traces if isinstance(one, HubTraces)]
    if not wanted:
        return Finding("Hugging Face Hub", True, "not needed")
    from huggingface_hub import HfApi

    try:
        for kind, repo in wanted:
            HfApi().repo_info(repo, repo_type=kind, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever the network, the proxy or the Hub raises
        remedy = "Check the network, HF_ENDPOINT and HF_TOKEN; or download elsewhere and name local files in the study."
        return Finding("Hugging Face Hub", False, f"{repo} cannot be reached ({type(error).__name__})", remedy)
    return Finding("Hugging Face Hub", True, f"{', '.join(repo for _, repo in wanted)} can be reached")


def _sources(study: Study) -> list[Any]:
    """Where each task's problems come from; None if it generates them."""
    return [getattr(study.task(name), "source", None) for name in study.tasks]
