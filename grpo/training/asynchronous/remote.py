"""The actors as the loop sees them: an engine that also takes orders ahead, and a learner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch

from grpo.common.records import Completion, Problem, Rollout
from grpo.rollout.engine import SamplingParams
from grpo.training.asynchronous.replay import Group
from grpo.training.asynchronous.worker import ActorWorker
from grpo.training.context import Updates


@dataclass
class ScoredRollouts:
    """A scored rollout batch, what is logged of it, and what it cost (names as in timing files)."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    times: dict[str, float]


# The records that may stand in a saved state, which is read without running code from it.
torch.serialization.add_safe_globals([ScoredRollouts, Group, Rollout, Completion, Problem])


class RolloutPipeline:
    """Generator and scorer, each fed by a thread of its own, so that they work while the learner does.

    It is an engine (:class:`grpo.rollout.engine.Engine`) too, for evaluation.

    Args:
        weights: which version samples a batch, see :class:`grpo.study.methods.Asynchronous`.
        initial: a reference to the starting weights.
    """

    def __init__(self, generator: ActorWorker, scorer: ActorWorker, weights: Literal["scheduled", "newest"], initial: Any):
        self.generator, self.scorer, self._newest = generator, scorer, weights == "newest"
        self._current: tuple[int, Any] = (0, initial)
        self._generating = ThreadPoolExecutor(1, thread_name_prefix="generator")
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._idle_since = time.perf_counter()

    @property
    def policy_version(self) -> int:
        """The newest version of the policy."""
        return self._current[0]

    def synchronize(self, model: Any, policy_version: int) -> None:
        """What is ordered from now on is sampled with these weights.

        Args:
            model: a reference to them.
        """
        self._current = (policy_version, model)

    def order(self, step: int) -> Future[ScoredRollouts]:
        """Have the rollouts of a step sampled and scored, after all that was ordered before."""
        sampled = self._generating.submit(self._sample, step, self._current)
        return self._scoring.submit(self._score, sampled)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        """Sample with the newest weights, after what was ordered before."""

        def ask(version: int, weights: Any) -> Any:
            groups, _ = self.generator.call("generate", prompts, params, n, seed, version, [weights])
            self._idle_since = time.perf_counter()
            return groups

        groups: list[list[Completion]] = self._generating.submit(ask, *self._current).result()
        return groups

    def close(self) -> None:
        """End threads and actors."""
        for worker in (self.generator, self.scorer):
            worker.close()
        for threads in (self._generating, self._scoring):
            threads.shutdown(wait=True, cancel_futures=True)

    def _sample(self, step: int, policy: tuple[int, Any]) -> tuple[Any, dict[str, float]]:
        version, weights = self._current if self._newest else policy
        waited = time.perf_counter() - self._idle_since
        sampled, cost = self.generator.call("sample", step, version, [weights], keep=True)
        self._idle_since = time.perf_counter()
        times = {"rollout_s": cost.seconds, "generator_synchronization_s": cost.weights_s, "generator_waiting_s": waited}
        return sampled, times | {"rollout_peak_mb": cost.peak_mb}

    def _score(self, sampled: Future[tuple[Any, dict[str, float]]]) -> ScoredRollouts:
        reference, times = sampled.result()
        (rollouts, metrics), cost = self.scorer.call("score", reference)
        return ScoredRollouts(rollouts, metrics, times | {"scoring_s": cost.seconds})


class RemoteLearner:
    """The learner's actor. Its last saved state stays in Ray's object store; one that dies starts from there, and trains the
    batches since then again, which gives the same weights.
    """

    def __init__(self, worker: ActorWorker):
        self.worker = worker
        self.peak_mb = 0.0

    def train(self, rollouts: list[Rollout], version: int) -> Updates:
        """See :func:`grpo.training.step.train_on`."""
        updates, cost = self.worker.call("train", rollouts, version)
        self.peak_mb = cost.peak_mb
        self.worker.recovery.append(("train", (rollouts, version)))
        return updates  # type: ignore[no-any-return]

    def state(self) -> Any:
        """See :meth:`grpo.learner.learner.Learner.state`."""
        state, _ = self.worker.call("state", keep=True)
        self.worker.recovery[:] = [("restore", (state,))]
        return ray.get(state)

    def restore(self, state: Any) -> None:
        """See :meth:`grpo.learner.learner.Learner.restore`."""
        kept = ray.put(state)
        self.worker.call("restore", kept)
        self.worker.recovery[:] = [("restore", (kept,))]

    @property
    def model(self) -> Any:
        """A reference to the policy's weights, for the generator."""
        weights, _ = self.worker.call("weights", keep=True)
        return weights

    def token_entropies(self, rollouts: list[Rollout]) -> list[float]:
        """See :meth:`grpo.learner.learner.Learner.token_entropies`."""
        entropies, _ = self.worker.call("token_entropies", rollouts)
        return entropies  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Save the policy as a checkpoint."""
        self.worker.call("save", folder.absolute())
