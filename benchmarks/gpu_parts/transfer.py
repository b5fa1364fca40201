"""The part of benchmarks/gpu.py that sends new weights to vLLM in a separate process."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_parts.sampling import make_tokenizer
from benchmarks.gpu_parts.tools import ROOT, WARM_UP, Row, Rows, Setting, Skipped, make_model, require, seconds_of


def asynchronous(setting: Setting) -> Rows:
    """Measure weight updates of vLLM in a separate process: on one GPU, between two GPUs, and through Ray."""
    require("vllm", "ray", "pydantic", "tokenizers")
    from grpo.models.checkpoint import save_checkpoint

    model = make_model(setting.scale, setting.device, torch.bfloat16 if setting.on_gpu else torch.float32)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        save_checkpoint(Path(folder), model, make_tokenizer(model.config.vocab_size))
        pair = Pair(setting, Path(folder), model, ends)
        yield "through Ray", "", pair.through_ray
        yield "on one GPU (CUDA IPC)", "equal checksums", lambda: pair.sent(0)
        yield "between two GPUs (NCCL)", "equal checksums", lambda: pair.sent(1)


@dataclass
class Pair:
    """A policy in this process, on the first GPU, and generators that sample with it on a GPU each.

    Attributes:
        ends: exit stack that ends the last generator, and Ray.
        visible: the GPUs, by the names of CUDA_VISIBLE_DEVICES as it was before any generator started.
    """

    setting: Setting
    folder: Path
    model: Any
    ends: ExitStack
    generators: dict[int, Any] = field(default_factory=dict, init=False)
    visible: list[str] = field(default_factory=lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","), init=False)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def through_ray(self) -> Row:
        """Send through CPU memory and Ray's object store."""
        import ray

        from grpo.rollout.engine import SamplingParams
        from grpo.training.asynchronous.actors import Policy

        generator, params = self._start(0), SamplingParams(min_tokens=1, max_tokens=1)

        def hand_over(version: int) -> None:
            weights = ray.put({name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()})
            ray.get(generator.generate.remote([[1]], params, 1, 0, (), Policy(version, weights)))

        times = [self._seconds(partial(hand_over, self._another())) for _ in range(WARM_UP + self.setting.repeats)]
        return {"seconds_with_a_token": statistics.median(times[WARM_UP:]), "mb": self._bytes() / 2**20}

    def sent(self, gpu: int) -> Row:
        """Send from this process's GPU to the generator's."""
        from grpo.rollout.vllm_weights import require_equal_weights
        from grpo.training.asynchronous.transfer import RemoteLlm, Sender, Weights

        if not self.setting.on_gpu:
            raise Skipped("weights are sent between GPUs")
        if gpu >= torch.cuda.device_count():
            raise Skipped("one GPU only")
        generator, sender = self.generators.get(gpu) or self._start(gpu), Sender(kept=1)
        copying, sending = [], []
        for _ in range(WARM_UP + self.setting.repeats):
            version = self._another()
            copying.append(self._seconds(partial(sender.keep, self.model, version)))
            sending.append(self._seconds(partial(sender.send, version, generator)))
        require_equal_weights(RemoteLlm(generator), Weights(sender.versions[version]))
        seconds = statistics.median(sending[WARM_UP:])
        return {
            "equal": True,
            "seconds": seconds,
            "gb_per_s": self._bytes() / 1e9 / seconds,
            "seconds_connecting": sending[0] - seconds,
            "seconds_copy": statistics.median(copying[WARM_UP:]),
        }

    def _start(self, gpu: int) -> Any:
        """Start a generator that sees one GPU; this process keeps the first one."""
        import ray

        from grpo.study.methods import GrpoConfig
        from grpo.training.asynchronous.actors import Generator
        from grpo.training.step import RunSetup

        self.ends.close()  # the one before
        env = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        on_gpu = self.setting.on_gpu
        if on_gpu:
            env["CUDA_VISIBLE_DEVICES"] = self.visible[gpu]
        self.ends.enter_context(patch.dict(os.environ, env))
        ray.shutdown()  # what a run in this process may have left
        ray.init(address="local", include_dashboard=False, logging_level="ERROR", num_gpus=int(on_gpu))
        self.ends.callback(ray.shutdown)
        make = partial(make_engine, self.folder, str(self.model.dtype).removeprefix("torch."), "cuda" if on_gpu else "cpu")
        unused: Any = None  # of a run that only takes over weights
        setup = RunSetup(GrpoConfig(), 0, [], unused, unused, unused)
        generator = ray.remote(num_gpus=int(on_gpu))(Generator).remote(make, setup)
        ray.get(generator.start.remote())
        self.generators[gpu] = generator
        return generator

    def _another(self) -> int:
        """Change all weights; return the new version."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        return next(self.versions)

    def _bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def _seconds(self, work: Any) -> float:
        return seconds_of(self.setting.device, work)


def make_engine(folder: Path, precision: str, device: str) -> tuple[Any, Any, Any]:
    """Runs in the generator's process; has what :class:`grpo.training.asynchronous.actors.Generator` needs."""
    from grpo.models.checkpoint import load_tokenizer
    from grpo.rollout.vllm_engine import VllmEngine, VllmSettings
    from grpo.training.asynchronous.transfer import Weights

    return VllmEngine(folder, None, VllmSettings(precision, device, 0.4, 64)), Weights(), load_tokenizer(folder)
