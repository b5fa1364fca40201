"""The classes of the three Ray actors: generator, scorer and learner. They are plain classes, independent of each other.

Generator and learner are built in the actor's own process: ``start`` calls a function given to the constructor, so that its
errors reach the caller unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo.common.process import peak_mb, reset_peak
from grpo.common.records import Completion, Rollout
from grpo.learner.learner import Learner
from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of
from grpo.rollout.engine import CompletionSpec, SamplingParams
from grpo.rollout.sampling import Sampler, score_rollouts
from grpo.study.config import GrpoConfig
from grpo.training.state import copy_to_cpu, write_durably
from grpo.training.step import RunSetup, Updates, rewards_and_advantages, sample, update_policy

WRITING = "writing"  # Ray concurrency group of the learner, with a thread of its own


@dataclass(eq=False)
class Weights:
    """A policy's weights, in the place of a model where an engine needs no more (vLLM)."""

    _state: dict[str, torch.Tensor] = field(default_factory=dict)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state


@dataclass
class ScoredRollouts:
    """A scored rollout batch, its metrics, and its times and memory (named as in timing files)."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    times: dict[str, float]


def _device() -> str:
    """Device of an actor: the one GPU that Ray shows it, once it has used it, else the CPU."""
    return "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]


class Generator:
    """The actor that samples, with the weights that it loaded last.

    ``make``: builds the engine, the model that it takes weights from (or a :class:`Weights`), and the tokenizer.
    """

    def __init__(self, make: Callable[[], tuple[Any, Any, Any]], setup: RunSetup[GrpoConfig]):
        self.make, self.setup = make, setup

    def start(self) -> tuple[int | None, bool]:
        """Start the engine; returns its context, and whether it copies weights from a :class:`Weights`, as vLLM does."""
        self.engine, self.model, tokenizer = self.make()
        self.sampler = Sampler(self.engine, tokenizer, self.setup.format, self.setup.score)
        self.idle_since = time.perf_counter()
        return self.engine.context, isinstance(self.model, Weights)

    def load(self, weights: dict[str, torch.Tensor], version: int) -> float:
        """Load a version of the policy; return the seconds that it took."""
        start = time.perf_counter()
        self.model.load_state_dict(weights)
        self.engine.synchronize(self.model, version)
        if isinstance(self.model, Weights):
            self.model.load_state_dict({})  # the engine has its own copy
        return time.perf_counter() - start

    def sample(self, step: int, loading_s: float = 0.0) -> tuple[list[Rollout], dict[str, float]]:
        """Sample the rollouts of a step; return them, and times and memory. ``loading_s``: from :meth:`load` for this step."""
        device, start = _device(), time.perf_counter()
        reset_peak(device)
        rollouts = sample(self.setup, self.sampler, step, self.setup.config.n_prompts_per_rollout_batch)
        if self.setup.format.environment is not None:  # the environments, which rewards may read, are in this process
            score_rollouts(self.setup.score, rollouts)
        times = {
            "rollout_s": time.perf_counter() - start,
            "generator_synchronization_s": loading_s,
            "generator_waiting_s": max(0.0, start - self.idle_since - loading_s),
            "rollout_peak_mb": peak_mb(device),
        }
        self.idle_since = time.perf_counter()
        return rollouts, times

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        seed: int,
        draws: Sequence[CompletionSpec],
        loading_s: float = 0.0,
    ) -> list[list[Completion]]:
        """Sample as :meth:`grpo.rollout.engine.Engine.generate`."""
        groups: list[list[Completion]] = self.engine.generate(prompts, params, n, seed, *([draws] if draws else []))
        self.idle_since = time.perf_counter()
        return groups


class Scorer:
    def __init__(self, setup: RunSetup[GrpoConfig]):
        self.setup = setup

    def score(self, sampled: tuple[list[Rollout], dict[str, float]]) -> ScoredRollouts:
        """Score what :meth:`Generator.sample` returned (:func:`grpo.training.step.rewards_and_advantages`)."""
        start = time.perf_counter()
        rollouts, metrics = rewards_and_advantages(self.setup, sampled[0])
        return ScoredRollouts(rollouts, metrics, sampled[1] | {"scoring_s": time.perf_counter() - start})


class LearnerActor:
    """The actor that holds the :class:`grpo.learner.learner.Learner`.

    ``write_state`` runs concurrently with the other methods. ``make``: builds the learner, and a function that saves its model
    as a checkpoint.
    """

    def __init__(self, make: Callable[[], tuple[Learner, Callable[[Path], None]]], config: GrpoConfig):
        self.make, self.config = make, config

    def start(self) -> None:
        self.learner, self.save_model = self.make()

    def train(self, rollouts: list[Rollout], version: int) -> tuple[Updates, float]:
        """Take a step's updates (:func:`grpo.training.step.update_policy`); returns their metrics and the peak memory (MiB)."""
        device = _device()
        reset_peak(device)
        return update_policy(self.config, self.learner, rollouts, version), peak_mb(device)

    def weights(self, device: str | None = "cpu") -> dict[str, torch.Tensor]:
        """Copy the policy's weights to ``device`` (None: the model's)."""
        whole = torch.contiguous_format
        with without_adapters(self.learner.model, merge=True) as model:
            return {name: w.to(device or w.device, copy=True, memory_format=whole) for name, w in weights_of(model)}

    def copy_state(self) -> None:
        """Copy the learner's state to CPU memory for :meth:`write_state`."""
        self.copy = copy_to_cpu(self.learner.state())

    def write_state(self, file: Path) -> None:
        write_durably(file, self.copy)
        self.copy = None

    def read_state(self, file: Path) -> None:
        """Resume from a file of :meth:`write_state`."""
        self.learner.restore(torch.load(file, map_location="cpu", weights_only=True))

    def log_probs(self, rollouts: list[Rollout], temperature: float) -> list[torch.Tensor]:
        return self.learner.log_probs(rollouts, temperature)

    def token_entropies(self, rollouts: list[Rollout]) -> list[float]:
        return self.learner.token_entropies(rollouts)

    def save(self, folder: Path) -> None:
        self.save_model(folder)
