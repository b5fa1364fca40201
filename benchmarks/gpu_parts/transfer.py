"""The part of benchmarks/gpu.py that sends new weights to vLLM in a separate process."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_parts.checksums import are_equal, checksums_of_policy, checksums_of_vllm
from benchmarks.gpu_parts.sampling import make_tokenizer
from benchmarks.gpu_parts.tools import ROOT, WARM_UP, Row, Rows, Setting, Skipped, make_model, require, seconds_of

WAYS = (  # name, transport of Ray Direct Transport, number of GPUs
    ("through Ray", None, 1),
    ("on one GPU (CUDA IPC)", "cuda_ipc", 1),
    ("between two GPUs (NCCL)", "nccl", 2),
)


def asynchronous(setting: Setting) -> Rows:
    """Measure weight updates of vLLM in a separate process: through CPU memory, on one GPU, and between two GPUs."""
    require("vllm", "ray", "pydantic", "tokenizers")
    from grpo.models.checkpoint import save_checkpoint

    model = make_model(setting.scale, "cpu", torch.bfloat16 if setting.on_gpu else torch.float32)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), model, make_tokenizer(model.config.vocab_size))
        for name, transport, gpus in WAYS:
            yield name, "equal checksums", partial(updates, setting, Path(folder), size, transport, gpus)


def updates(setting: Setting, folder: Path, size: int, transport: str | None, gpus: int) -> Row:
    """Time a learner's copies of its weights, and the loading of each into a generator."""
    if transport is not None and not setting.on_gpu:
        raise Skipped("weights are sent between GPUs")
    if setting.on_gpu and gpus > torch.cuda.device_count():
        raise Skipped("one GPU only")
    if transport == "nccl" and find_spec("cupy") is None:
        raise Skipped("not installed: cupy")
    import ray

    from grpo.rollout.engine import SamplingParams
    from grpo.study.config import GrpoConfig
    from grpo.training.asynchronous.start import start_actors
    from grpo.training.step import RunSetup

    unused: Any = None  # in a run that only loads weights
    setup = RunSetup(GrpoConfig(), 0, [], unused, unused, unused)
    each = {"num_cpus": 1.0, "num_gpus": gpus / 2 if setting.on_gpu else 0.0}
    makers = (partial(make, folder, "cuda" if setting.on_gpu else "cpu") for make in (make_generator, make_learner))
    copying, loading, sampling = [], [], []
    ray.shutdown()  # what a run in this process may have left
    with (
        patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}),
        start_actors(setup, *makers, each, each, transport) as (pipeline, learner),
    ):

        def call(actor: Any, function: Callable[[Any], Any]) -> Any:
            return ray.get(actor.__ray_call__.remote(function))

        sample = partial(pipeline.generate, [[1]], SamplingParams(min_tokens=1, max_tokens=1), 1, 0)
        for version in range(1, WARM_UP + setting.repeats + 1):
            call(learner.actor, change_all_weights)
            copying.append(seconds_of("cpu", lambda new=version: pipeline.synchronize(learner.model, new)))
            loading.append(seconds_of("cpu", sample))
            sampling.append(seconds_of("cpu", sample))
        theirs = call(pipeline.generator, lambda actor: checksums_of_vllm(actor.engine._llm))
        ours = call(learner.actor, lambda actor: checksums_of_policy(actor.learner.model, theirs))
    ray.shutdown()
    seconds = statistics.median(loading[WARM_UP:]) - statistics.median(sampling[WARM_UP:])
    return {
        "equal": are_equal(theirs, ours),
        "seconds": seconds,
        "gb_per_s": size / 1e9 / seconds,
        "seconds_copy": statistics.median(copying[WARM_UP:]),
    }


# ------------------------------------------------------------------------------------------------------- in the actors


def make_generator(folder: Path, device: str) -> tuple[Any, Any, Any]:
    from grpo.models.checkpoint import load_tokenizer
    from grpo.rollout.vllm_engine import VllmEngine, VllmSettings
    from grpo.training.asynchronous.actors import Weights

    settings = VllmSettings("bfloat16" if device == "cuda" else "float32", device, 0.4, 64)
    return VllmEngine(folder, None, settings), Weights(), load_tokenizer(folder)


def make_learner(folder: Path, device: str) -> tuple[Any, Any]:
    from grpo.models.checkpoint import load_model

    return SimpleNamespace(model=load_model(folder, None, device)), None


def change_all_weights(actor: Any) -> None:
    with torch.no_grad():
        for parameter in actor.learner.model.parameters():
            parameter.mul_(1.01)
