"""The classes of the three Ray actors: generator, scorer and learner. They are plain classes, independent of each other.

Generator and learner are built in the actor's own process: ``start`` calls a function given to the constructor, so that its
errors reach the caller unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from grpo.common.process import peak_mb, reset_peak
from grpo.common.records import Completion, Rollout
from grpo.evaluation.evaluate import Sampler
from grpo.learner.learner import Learner
from grpo.models.checkpoint import named_as_saved
from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of
from grpo.rollout.engine import Draw, SamplingParams
from grpo.study.methods import GrpoConfig
from grpo.training.asynchronous.transfer import Sender, Weights, gpu
from grpo.training.state import copy_to_cpu, write_durably
from grpo.training.step import RunSetup, Updates, sample, score, train_on

SENDING, WRITING = "sending", "writing"  # Ray concurrency groups of the learner, with a thread each


@dataclass(frozen=True)
class Policy:
    """A version of the policy, by which the generator samples.

    Attributes:
        weights: a reference to its weights, which Ray fetches only if the generator has another version; None if the learner
            sends them.
    """

    version: int
    weights: Any = None


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
    """The actor that samples, with the weights of the requested version.

    Args:
        make: builds the engine, the model that it takes weights from (or a
            :class:`grpo.training.asynchronous.transfer.Weights`), and the tokenizer.
    """

    def __init__(self, make: Callable[[], tuple[Any, Any, Any]], setup: RunSetup[GrpoConfig]):
        self.make, self.setup = make, setup

    def start(self) -> tuple[int | None, bool]:
        """Start the engine; returns its context, and whether it takes weights under the names of a checkpoint, as vLLM does."""
        self.engine, self.model, tokenizer = self.make()
        self.sampler = Sampler(self.engine, tokenizer, self.setup.format, self.setup.score)
        self.idle_since = time.perf_counter()
        return self.engine.context, isinstance(self.model, Weights)

    def sample(self, step: int, policy: Policy, sending_s: float = 0.0) -> tuple[list[Rollout], dict[str, float]]:
        """Sample the rollouts of a step.

        Args:
            sending_s: seconds in which the learner sent the policy's weights.

        Returns:
            the rollouts, and times and memory.
        """
        device, asked = _device(), time.perf_counter()
        reset_peak(device)
        self._take_over(policy)
        ready = time.perf_counter()
        rollouts = sample(self.setup, self.sampler, step, self.setup.config.n_prompts_per_rollout_batch)
        times = {
            "rollout_s": time.perf_counter() - ready,
            "generator_synchronization_s": ready - asked + sending_s,
            "generator_waiting_s": max(0.0, asked - self.idle_since - sending_s),
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
        draws: Sequence[Draw],
        policy: Policy,
        sending_s: float = 0.0,
    ) -> list[list[Completion]]:
        """Sample as :meth:`grpo.rollout.engine.Engine.generate`; the other arguments are those of :meth:`sample`."""
        self._take_over(policy)
        groups: list[list[Completion]] = self.engine.generate(prompts, params, n, seed, *([draws] if draws else []))
        self.idle_since = time.perf_counter()
        return groups

    def receiver(self) -> tuple[str | None, int, bool]:
        """This process's GPU, the version of the engine's weights, and whether to compare checksums after a transfer.

        :class:`grpo.training.asynchronous.transfer.Sender` calls this and the next two methods.
        """
        return gpu(), self.engine.policy_version, self.engine._check

    def call_llm(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the ``vllm.LLM``."""
        return getattr(self.engine._llm, method)(*arguments, **named)

    def has_taken_over(self, version: int) -> None:
        """Take note that weights of this version have arrived."""
        self.engine.policy_version = version

    def _take_over(self, policy: Policy) -> None:
        if self.engine.policy_version != policy.version:
            if policy.weights is None:
                raise RuntimeError(f"the generator has weights of version {self.engine.policy_version}, not {policy.version}")
            self.model.load_state_dict(ray.get(policy.weights))
            self.engine.synchronize(self.model, policy.version)


class Scorer:
    """The actor that scores rollouts."""

    def __init__(self, setup: RunSetup[GrpoConfig]):
        self.setup = setup

    def score(self, sampled: tuple[list[Rollout], dict[str, float]]) -> ScoredRollouts:
        """Score what :meth:`Generator.sample` returned (:func:`grpo.training.step.score`)."""
        start = time.perf_counter()
        rollouts, metrics = score(self.setup, sampled[0])
        return ScoredRollouts(rollouts, metrics, sampled[1] | {"scoring_s": time.perf_counter() - start})


class LearnerActor:
    """The actor that holds the :class:`grpo.learner.learner.Learner`.

    ``send`` and ``write_state`` run concurrently with the other methods.

    Args:
        make: builds the learner, and a function that saves its model as a checkpoint.
    """

    def __init__(self, make: Callable[[], tuple[Learner, Callable[[Path], None]]], config: GrpoConfig):
        self.make, self.config = make, config

    def start(self) -> None:
        """Load the model."""
        self.learner, self.save_model = self.make()
        assert self.config.asynchronous is not None
        self.sender = Sender(self.config.asynchronous.max_policy_lag + 1)

    def train(self, rollouts: list[Rollout], version: int) -> tuple[Updates, float]:
        """Take a step's updates (:func:`grpo.training.step.train_on`); returns their metrics and the peak memory (MiB)."""
        device = _device()
        reset_peak(device)
        return train_on(self.config, self.learner, rollouts, version), peak_mb(device)

    def weights(self, as_saved: bool = False) -> dict[str, torch.Tensor]:
        """The policy's weights, in CPU memory, under its own names or (``as_saved``) those of its checkpoint."""
        with without_adapters(self.learner.model, merge=True) as model:
            weights = named_as_saved(model, weights_of(model)) if as_saved else weights_of(model)
            return {name: tensor.cpu() for name, tensor in weights}

    def keep(self, version: int) -> None:
        """Copy the policy's current weights for a later :meth:`send`."""
        self.sender.keep(self.learner.model, version)

    def send(self, version: int, generator: Any, after: list[Any]) -> float:
        """Send a kept version to the generator (:meth:`grpo.training.asynchronous.transfer.Sender.send`).

        Args:
            after: references to what the generator computes before.

        Returns:
            the seconds that it took.
        """
        if after:
            ray.wait(after, fetch_local=False)
        start = time.perf_counter()
        try:
            self.sender.send(version, generator)
        except Exception:  # NCCL and others report a dead peer by errors of many kinds; Ray says that it is dead
            ray.get(generator.receiver.remote(), timeout=30)
            raise
        return time.perf_counter() - start

    def copy_state(self) -> None:
        """Copy the learner's state to CPU memory for :meth:`write_state`."""
        self.copy = copy_to_cpu(self.learner.state())

    def write_state(self, file: Path) -> None:
        """Write the copied state."""
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
        """Save the model as a checkpoint."""
        self.save_model(folder)
