"""The loop's side of the actors: an engine that also samples ahead, and a learner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from grpo.common.records import Completion, Problem, Rollout
from grpo.rollout.engine import SamplingParams
from grpo.training.asynchronous.actor_worker import ActorWorker, WorkerLost
from grpo.training.asynchronous.replay import Group
from grpo.training.context import Updates


@dataclass
class ScoredRollouts:
    """A scored rollout batch, its metrics, and its times and memory (named as in timing files)."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    times: dict[str, float]


# The record types of a saved state, which torch.load reads with weights_only.
torch.serialization.add_safe_globals([ScoredRollouts, Group, Rollout, Completion, Problem])


class RolloutPipeline:
    """Generator and scorer, each called from its own thread, so that they work while the learner trains.

    For evaluation it is also an engine (:class:`grpo.rollout.engine.Engine`).

    Args:
        learner: gives the starting weights; if its ``model`` is None, it sends the weights itself.
    """

    def __init__(self, generator: ActorWorker, scorer: ActorWorker, learner: RemoteLearner):
        self.generator, self.scorer = generator, scorer
        self._learner = learner
        self.synchronize(learner.model, 0)
        self._generating = ThreadPoolExecutor(1, thread_name_prefix="generator")
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._idle_since = time.perf_counter()

    @property
    def policy_version(self) -> int:
        """The newest version of the policy."""
        return self._current[0]

    @property
    def context(self) -> int | None:
        """See :class:`grpo.rollout.engine.Engine`."""
        (context, _) = self._generating.submit(self.generator.call, "context").result()
        return cast("int | None", context)

    def synchronize(self, model: Any, policy_version: int) -> None:
        """Sample all later requests with these weights.

        Args:
            model: a reference to the weights; None if the learner sends them.
        """
        if model is None:
            self._learner.keep(policy_version)
        self._current: tuple[int, Any] = (policy_version, model)

    def request(self, step: int) -> Future[ScoredRollouts]:
        """Request the sampled and scored rollouts of a step; requests are served in order."""
        sampled = self._generating.submit(self._sample, step, self._current)
        return self._scoring.submit(self._score, sampled)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        """Sample with the newest weights, after all earlier requests."""

        def ask(version: int, weights: Any) -> Any:
            (groups, _), _ = self._ask_generator("generate", prompts, params, n, seed, version=version, weights=weights)
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
        version, weights = policy
        waited = time.perf_counter() - self._idle_since
        (sampled, cost), sending_s = self._ask_generator("sample", step, version=version, weights=weights, keep=True)
        self._idle_since = time.perf_counter()
        times = {"rollout_s": cost.seconds, "generator_synchronization_s": cost.weights_s + sending_s}
        return sampled, times | {"generator_waiting_s": waited, "rollout_peak_mb": cost.peak_mb}

    def _ask_generator(
        self, method: str, *arguments: Any, version: int, weights: Any, keep: bool = False
    ) -> tuple[tuple[Any, Any], float]:
        """Sample with a version: the generator's result, and the seconds in which the learner sent the weights."""
        if weights is not None:
            return self.generator.call(method, *arguments, version, [weights], keep=keep), 0.0
        sending_s = 0.0

        def send(actor: Any) -> None:
            nonlocal sending_s
            sending_s = self._learner.send(version, actor)

        return self.generator.call(method, *arguments, version, [], keep=keep, before=send), sending_s

    def _score(self, sampled: Future[tuple[Any, dict[str, float]]]) -> ScoredRollouts:
        reference, times = sampled.result()
        (rollouts, metrics), cost = self.scorer.call("score", reference)
        return ScoredRollouts(rollouts, metrics, times | {"scoring_s": cost.seconds})


class RemoteLearner:
    """The learner's actor, which writes and reads its own states (:class:`grpo.training.state.PartElsewhere`).

    If it dies, a new actor resumes from the newest state and trains the batches since then again, which gives the same weights.

    Args:
        sends: the actor sends its weights to the generator from GPU to GPU.
    """

    def __init__(self, worker: ActorWorker, sends: bool = False):
        self.worker, self.sends = worker, sends
        self.peak_mb = 0.0
        self._kept: list[tuple[str, tuple[Any, ...]]] = []  # the call for the newest version
        self._at_state: tuple[list[Any], int, int] = [], 0, 0  # at write_state: _kept, recovery calls, restarts

    def train(self, rollouts: list[Rollout], version: int) -> Updates:
        """See :func:`grpo.training.step.train_on`."""
        with self.worker.lock:
            updates, cost = self.worker.call("train", rollouts, version)
            self.worker.recovery.append(("train", (rollouts, version)))
        self.peak_mb = cost.peak_mb
        return updates  # type: ignore[no-any-return]

    def write_state(self, file: Path) -> None:
        """See :class:`grpo.training.state.PartElsewhere`."""
        with self.worker.lock:
            self.worker.call("write_state", file.absolute())
            self._at_state = list(self._kept), len(self.worker.recovery), self.worker.restarts

    def is_written(self) -> bool:
        """See :class:`grpo.training.state.PartElsewhere`."""
        *_, restarts = self._at_state
        while True:
            with self.worker.lock:  # one question between two trainings
                written, _ = self.worker.call("is_written")
                if self.worker.restarts != restarts:
                    return False
            if written:
                return True
            time.sleep(0.05)

    def saved(self, file: Path) -> None:
        """See :class:`grpo.training.state.PartElsewhere`. Recovery starts from this state from now on."""
        with self.worker.lock:
            kept, before, _ = self._at_state
            self.worker.recovery[:before] = [("read_state", (file.absolute(),)), *kept]

    def read_state(self, file: Path) -> None:
        """See :class:`grpo.training.state.PartElsewhere`."""
        with self.worker.lock:
            self.worker.call("read_state", file.absolute())
            self.worker.recovery[:] = [("read_state", (file.absolute(),))]

    @property
    def model(self) -> Any:
        """A reference to the policy's weights for the generator; None if the actor sends them."""
        if self.sends:
            return None
        weights, _ = self.worker.call("weights", keep=True)
        return weights

    def keep(self, version: int) -> None:
        """Copy the current weights in the actor, to be sent while training continues."""
        with self.worker.lock:
            self.worker.call("keep", version)
            self._kept = [("keep", (version,))]
            self.worker.recovery += self._kept

    def send(self, version: int, generator: Any) -> float:
        """Send a kept version to the generator's actor, if that has another one.

        Returns:
            the seconds that it took.

        Raises:
            WorkerLost: one of the two actors was lost. The generator may wait forever then, and must be restarted.
        """
        try:
            alive, cost = self.worker.call_concurrently("send", version, generator)
        except WorkerLost as lost:
            raise WorkerLost(f"lost the learner, which {lost}, while it took over weights") from lost
        if not alive:
            raise WorkerLost("has died before it had its weights")
        return float(cost.seconds)

    def token_entropies(self, rollouts: list[Rollout]) -> list[float]:
        """See :meth:`grpo.learner.learner.Learner.token_entropies`."""
        entropies, _ = self.worker.call("token_entropies", rollouts)
        return entropies  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Save the policy as a checkpoint."""
        self.worker.call("save", folder.absolute())
