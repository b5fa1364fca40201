"""The classes of the three Ray actors: generator, scorer and learner. They are plain classes, independent of each other.

Every method returns its value and its cost. ``start`` builds the actor's parts in the actor's own process, with a function
given to the constructor, so that its errors reach the caller unchanged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import torch

from grpo.common.memory import peak_mb, reset_peak
from grpo.common.records import Completion, Rollout
from grpo.evaluation.evaluate import Sampler
from grpo.learner.learner import Learner
from grpo.models.lora import without_adapters
from grpo.rollout.engine import Engine, SamplingParams
from grpo.study.methods import GrpoConfig
from grpo.training.asynchronous.transfer import Receiver, Sender, gpu, is_alive
from grpo.training.context import RunSetup, Updates
from grpo.training.state import copy_to_cpu, write_durably
from grpo.training.step import sample, score, train_on


@dataclass
class Cost:
    """Cost of a call: seconds without those to load new weights, these seconds, and peak memory (MiB)."""

    seconds: float
    weights_s: float = 0.0
    peak_mb: float = 0.0


def costed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method to return its value and its cost."""

    @functools.wraps(method)
    def measured(self: Any, *arguments: Any) -> tuple[Any, Cost]:
        device = _device()
        reset_peak(device)
        start = time.perf_counter()
        value = method(self, *arguments)
        seconds, weights_s = time.perf_counter() - start, getattr(self, "weights_s", 0.0)
        return value, Cost(seconds - weights_s, weights_s, peak_mb(device))

    return measured


def _device() -> str:
    """Device of an actor: the one GPU that Ray shows it, once it has used it, else the CPU."""
    return "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]


class Generator:
    """The actor that samples, with the weights of the requested version.

    Args:
        make: builds the engine, the model that it takes weights from (or a
            :class:`grpo.training.asynchronous.transfer.Weights`), and the tokenizer.
    """

    def __init__(self, make: Callable[[], tuple[Engine, Any, Any]], setup: RunSetup[GrpoConfig]):
        self.make, self.setup = make, setup
        self.weights_s = 0.0

    @costed
    def start(self) -> None:
        """Start the engine."""
        self.engine, self.model, tokenizer = self.make()
        self.sampler = Sampler(self.engine, tokenizer, self.setup.format, self.setup.score)

    @costed
    def context(self) -> int | None:
        """See :class:`grpo.rollout.engine.Engine`."""
        return self.engine.context

    @costed
    def sample(self, step: int, version: int, weights: list[Any]) -> list[Rollout]:
        """Sample the rollouts of a step.

        Args:
            version: the policy version that samples them.
            weights: a reference to its weights, in a list so that Ray fetches them only if needed; an empty list if the learner
                has already sent them.
        """
        self._take_over(version, weights)
        return sample(self.setup, self.sampler, step, self.setup.config.n_prompts_per_rollout_batch)

    @costed
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, version: int, weights: list[Any]
    ) -> list[list[Completion]]:
        """Sample as :meth:`grpo.rollout.engine.Engine.generate`, with a version's weights."""
        self._take_over(version, weights)
        return self.engine.generate(prompts, params, n, seed)

    def receiver(self) -> Receiver:
        """What :class:`grpo.training.asynchronous.transfer.Sender` needs to know; it also calls the next two methods."""
        engine: Any = self.engine
        return Receiver(gpu(), engine.policy_version, engine._check)

    def call_llm(self, method: str, *arguments: Any) -> Any:
        """Call a method of the ``vllm.LLM``."""
        engine: Any = self.engine
        return getattr(engine._llm, method)(*arguments)

    def has_taken_over(self, version: int) -> None:
        """Take note that weights of this version have arrived."""
        engine: Any = self.engine
        engine.policy_version = version

    def _take_over(self, version: int, weights: list[Any]) -> None:
        start = time.perf_counter()
        if self.engine.policy_version != version:
            if not weights:
                raise RuntimeError(f"the generator has weights of version {self.engine.policy_version}, not {version}")
            self.model.load_state_dict(ray.get(weights[0]))
            self.engine.synchronize(self.model, version)
        self.weights_s = time.perf_counter() - start


class Scorer:
    """The actor that scores rollouts."""

    def __init__(self, setup: RunSetup[GrpoConfig]):
        self.setup = setup

    @costed
    def start(self) -> None:
        """Do nothing: there is nothing to start."""

    @costed
    def score(self, rollouts: list[Rollout]) -> tuple[list[Rollout], dict[str, float]]:
        """See :func:`grpo.training.step.score`."""
        return score(self.setup, rollouts)


class LearnerActor:
    """The actor that holds the :class:`grpo.learner.learner.Learner`.

    Args:
        make: builds the learner, and a function that saves its model as a checkpoint.
    """

    def __init__(self, make: Callable[[], tuple[Learner, Callable[[Path], None]]], config: GrpoConfig):
        self.make, self.config = make, config
        self.sender: Sender | None = None
        self.writer, self.writing = ThreadPoolExecutor(1, thread_name_prefix="state"), cast("Future[None] | None", None)

    @costed
    def start(self) -> None:
        """Load the model."""
        self.learner, self.save_model = self.make()

    @costed
    def train(self, rollouts: list[Rollout], version: int) -> Updates:
        """See :func:`grpo.training.step.train_on`."""
        updates, _ = train_on(self.config, self.learner, rollouts, version)
        return updates

    @costed
    def weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights, in CPU memory."""
        with without_adapters(self.learner.model, merge=True) as model:
            return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}

    @costed
    def keep(self, version: int) -> None:
        """Copy the policy's current weights for a later :meth:`send`."""
        settings = self.config.asynchronous
        assert settings is not None
        self.sender = self.sender or Sender(settings.max_policy_lag + 1)
        self.sender.keep(self.learner.model, version)

    def send(self, version: int, generator: Any) -> tuple[bool, Cost]:
        """See :meth:`grpo.training.asynchronous.transfer.Sender.send`; runs concurrently with all other methods.

        Returns:
            whether the generator was alive, and the cost; memory is counted with training's.
        """
        assert self.sender is not None
        start, alive = time.perf_counter(), True
        try:
            self.sender.send(version, generator)
        except Exception:  # NCCL and others report a dead peer by errors of many kinds
            alive = is_alive(generator)
            if alive:
                raise
        return alive, Cost(time.perf_counter() - start)

    @costed
    def write_state(self, file: Path) -> None:
        """Copy :meth:`grpo.learner.learner.Learner.state` to CPU memory, and start writing it."""
        self.writing = self.writer.submit(write_durably, file, copy_to_cpu(self.learner.state()))

    @costed
    def is_written(self) -> bool:
        """Whether the last state is on disk; raises the error of a failed write."""
        if self.writing is None or not self.writing.done():
            return False
        self.writing.result()
        return True

    @costed
    def read_state(self, file: Path) -> None:
        """Resume from a file of :meth:`write_state`."""
        self.learner.restore(torch.load(file, map_location="cpu", weights_only=True))

    @costed
    def token_entropies(self, rollouts: list[Rollout]) -> list[float]:
        """See :meth:`grpo.learner.learner.Learner.token_entropies`."""
        return self.learner.token_entropies(rollouts)

    @costed
    def save(self, folder: Path) -> None:
        """Save the model as a checkpoint."""
        self.save_model(folder)
