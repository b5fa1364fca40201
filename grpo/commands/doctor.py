"""Check what would make a study's jobs fail on this machine, before they wait for it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

from grpo.commands import gpu_memory
from grpo.commands.gpu_memory import GIB
from grpo.common.errors import UserError, reason
from grpo.common.imports import pip_install
from grpo.study.config import MAIN, HubModel, SampledTraces
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.study.software import OPTIMIZER, VLLM, hardware, install_vllm, pins, software, torch_build, unlike_the_pins
from grpo.tasks.build import check_local_data
from grpo.tasks.rows import FORMATS, HubDataset, read_rows
from grpo.tasks.sft_dataset import HubTraces

HUB_TIMEOUT_S = 10.0
IN_FLOAT16 = "Set engine.dtype and learner.dtype to float16, as studies/math-24gb-turing.yaml does."


@dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do if it is not good."""

    name: str
    good: bool | None  # False if the study cannot run like this; None if unknown
    found: str
    remedy: str = ""


def examine(study: Study) -> list[Finding]:
    """Run all checks. They change nothing, and use the network only to ask the Hub, if the study needs it."""
    return [check(study) for check in (_gpus, _gpu_memory, _packages, _disk, _model_and_data)]


def report(findings: list[Finding]) -> str:
    """Format the findings as text."""
    lines = []
    for finding in findings:
        mark = {True: "ok     ", False: "MISSING", None: "unknown"}[finding.good]
        lines.append(f"{mark} {finding.name}: {finding.found}".replace("\n", "\n        "))
        if not finding.good:
            lines.append(f"        {finding.remedy}")
    return "\n".join(lines)


def _gpus(study: Study) -> Finding:
    """Check that there are enough GPUs for the largest stage, and that each can be used (torch also counts unusable ones)."""
    needed, seen, cuda = gpus_needed(study), torch.cuda.device_count(), torch.version.cuda
    about = f"the study's largest stage needs {needed}; torch {torch.__version__} sees {seen}, driver {hardware()['driver']}"
    if needed and not cuda:
        return Finding("GPUs", False, about, torch_build())
    if needed and not seen and shutil.which("sbatch"):
        return Finding("GPUs", None, about, f"Slurm's nodes may have them: `srun --gpus={needed} grpo doctor` looks at one.")
    if seen < needed:
        fewer = "choose a study for fewer GPUs (`grpo study list`), leave out the experiments that need so many (`arms: {}`)"
        remedy = f"{study.study} uses {needed}: {fewer}, install NVIDIA's driver, or check CUDA_VISIBLE_DEVICES."
        return Finding("GPUs", False, about, remedy)
    for i in range(needed):
        try:
            torch.ones(1, device=f"cuda:{i}").sum().item()
        except Exception as error:  # whatever torch, the driver or another process on the GPU raises
            remedy = f"CUDA {cuda} needs a newer driver, or `nvidia-smi` shows who uses the GPU."
            return Finding("GPUs", False, f"{about}; cuda:{i} cannot be used: {reason(error)}", remedy)
    if needed and "bfloat16" in (study.engine.dtype, study.learner.dtype) and not torch.cuda.is_bf16_supported(False):
        return Finding("GPUs", False, f"{about}; they compute no bfloat16 (Turing and older cards)", IN_FLOAT16)
    return Finding("GPUs", True, about)


def gpus_needed(study: Study) -> int:
    """GPUs that the largest stage needs: those reserved for it or named by its devices."""
    devices = (study.engine.device, study.learner.device)
    named = max((int(device.partition(":")[2] or 0) + 1 for device in devices if device.startswith("cuda")), default=0)
    processes = study.learner.processes if study.learner.device == "cuda" else 0
    experiments = [study.experiments[name] for name in study.active_experiments]
    kinds = {"small", "model", "evaluate", *(kind for entry in experiments for kind in (entry.resources, entry.timed))}
    return max(named, processes, *(resources.gpus for kind, resources in study.resources.items() if kind in kinds))


def _gpu_memory(study: Study) -> Finding:
    """Check that the study's GPU memory (:mod:`grpo.commands.gpu_memory`) fits the study's card and the one in this machine."""
    name = "GPU memory"
    if not any(device.startswith("cuda") for device in (study.engine.device, study.learner.device)):
        return Finding(name, True, "not needed")
    try:
        sizes = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(gpus_needed(study))]
    except (RuntimeError, AssertionError):  # no usable GPU, as `_gpus` reports
        sizes = []
    card = study.gpu_memory_gib or (min(sizes) if sizes else None)
    shape = gpu_memory.shape_of(study)
    if card is None or shape is None:
        what = "gpu_memory_gib in params.yaml" if card is None else "the shape of the model (data/model/config.json)"
        return Finding(name, None, f"not computed, as {what} is missing", "Add it, or run the stage `model` first.")
    problems = gpu_memory.problems(study, shape, card)
    # 0.97, as torch sees a little less memory than nvidia-smi.
    if study.gpu_memory_gib and sizes and min(sizes) < 0.97 * card:
        problems.append(f"a GPU here has {min(sizes):.1f} GiB, and the study is for {card:g}: set gpu_memory_gib to that")
    computed = f"computed, largest over the arms\n{gpu_memory.table(study, shape, card)}"
    return Finding(name, not problems, computed, "Does not fit. " + "; also ".join(problems))


def _packages(study: Study) -> Finding:
    """Check the packages that only some settings need: vLLM and bitsandbytes."""
    installed = software((*VLLM, OPTIMIZER))
    remedies, vllm = [], next((installed[name] for name in VLLM if name in installed), None)
    if study.engine.name == "vllm" and (vllm is None or unlike_the_pins({"vllm": vllm}, pins(["vllm"]))):
        install = install_vllm(study.engine.device)
        remedies.append(f"Needs vllm{pins(['vllm'])['vllm']}: {install}, or set engine.name to transformers.")
    if study.learner.optimizer == "adamw_8bit" and OPTIMIZER not in installed:
        remedies.append(f"{pip_install('8bit')}, or set learner.optimizer to adamw.")
    versions = f"vLLM {vllm or 'not installed'}, {OPTIMIZER} {installed.get(OPTIMIZER, 'not installed')}"
    return Finding("packages", not remedies, versions, " ".join(remedies))


def _disk(study: Study) -> Finding:
    """Check the disk: the weights, each run's checkpoints (twice, as DVC's cache may copy them) and saved states."""
    free, shape = shutil.disk_usage(Path.cwd()).free / GIB, gpu_memory.shape_of(study)
    if study.models[MAIN].source == "pretrain":
        return Finding("disk", free >= 2, f"{free:.0f} GiB free; the study may need 2", "Free some.")
    if shape is None:
        return Finding(
            "disk", None, f"{free:.0f} GiB free; the shape of the model is not known", "Run the stage `model` first."
        )
    weights = shape.parameters * gpu_memory.BYTES[study.learner.dtype] / GIB
    gpus_of_a_run = study.resources["train"].gpus
    at_once = max(1, torch.cuda.device_count() // gpus_of_a_run) if gpus_of_a_run else 1
    states = gpu_memory.STATES_ON_DISK * at_once * gpu_memory.saved_state_bytes(study, shape) / GIB
    runs = [effective_run(study, name, arm, study.seeds[0], []) for name, arm in study.arms]
    kept = sum((len(study.checkpoints) + len(run.config.keep_steps)) * len(study.seeds_of(run.experiment)) for run in runs)
    needed = 3 * weights + 2 * weights * kept + states  # the model: in the Hub's cache, in data/model and in DVC's cache
    needs = (
        f"{free:.0f} GiB free; the study may need {needed:.0f}: {2 * weights * kept:.0f} for {kept} checkpoints (twice, with "
        f"DVC's cache), {states:.0f} for the saved states of {at_once} run(s) in progress, {3 * weights:.0f} for the model"
    )
    remedy = "Free some, keep fewer checkpoints (`checkpoints:` in params.yaml), have fewer `seeds`, or leave experiments out."
    return Finding("disk", free >= needed, needs, remedy)


def _model_and_data(study: Study) -> Finding:
    """Check that the files that the study names are there with enough problems, and that the Hub has the others."""
    name, files = "model and data", [*study.named_files.values()]
    try:
        for path in files:
            if Path(path).suffix in FORMATS:
                read_rows(path, "tasks")
        for task in study.tasks:
            check_local_data(study.task(task), study.needed_problems(task))
    except UserError as error:
        return Finding(name, False, reason(error), "The stage `dataset` reads the same.")
    if missing := [path for path in files if not Path(path).exists()]:
        remedy = "Add them, or correct the paths in `models:` or `sft_datasets:`."
        return Finding(name, False, f"missing: {', '.join(missing)}", remedy)
    traces = study.sft_datasets.values()
    models = [*study.models.values(), *(entry.model for entry in traces if isinstance(entry, SampledTraces))]
    on_hub = [("model", model.repo) for model in models if isinstance(model, HubModel)]
    on_hub += [("dataset", repo) for task in study.tasks for repo in _hub_datasets(study.task(task))]
    on_hub += [("dataset", entry.repo) for entry in traces if isinstance(entry, HubTraces)]
    for kind, repo in on_hub:
        try:
            HfApi().repo_info(repo, repo_type=kind, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # whatever the network, the proxy or the Hub raises
            remedy = "Check the network, HF_ENDPOINT and HF_TOKEN; or download elsewhere and name local files in the study."
            return Finding(name, False, f"{repo}: cannot be reached ({type(error).__name__})", remedy)
    return Finding(name, True, ", ".join([*files, *(repo for _, repo in on_hub)]) or "made by the study itself")


def _hub_datasets(task: Any) -> list[str]:
    """The dataset on the Hub from which a task, or each part of a mixture, reads its problems."""
    source, parts = getattr(task, "source", None), getattr(task, "parts", {}).values()
    return [source.hub] if isinstance(source, HubDataset) else [repo for part in parts for repo in _hub_datasets(part)]
