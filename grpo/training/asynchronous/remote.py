"""The loop's side of the actors: an engine that also samples ahead, and a learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray
import torch

from grpo.common.records import Completion, Episode, Problem, Rollout
from grpo.rollout.engine import CompletionSpec, SamplingParams
from grpo.training.asynchronous.actors import WRITING, ScoredRollouts
from grpo.training.asynchronous.replay import Group
from grpo.training.step import Updates

STUCK_AFTER_S = 1800.0  # an actor that takes longer for one call counts as lost
START_S = 900.0  # an actor's start: imports, the model, vLLM

# The record types of a saved state, which torch.load reads with weights_only.
torch.serialization.add_safe_globals([ScoredRollouts, Group, Rollout, Completion, Episode, Problem])


def result_of(call: Any, limit_s: float = STUCK_AFTER_S) -> Any:
    return ray.get(call, timeout=limit_s)


class RemoteLearner:
    """The learner's actor, which writes and reads its own states (:class:`grpo.training.state.RemoteStateful`).

    ``transport``: of Ray Direct Transport, which carries the weights from device to device; None sends them through Ray's
    object store in CPU memory.
    """

    def __init__(self, actor: Any, transport: str | None = None):
        self.actor, self.transport = actor, transport
        self.peak_mb = 0.0

    def train(self, rollouts: list[Rollout], version: int) -> Updates:
        updates: Updates
        updates, self.peak_mb = result_of(self.actor.train.remote(rollouts, version))
        return updates

    @property
    def model(self) -> Any:
        """A reference to a copy of the policy's current weights, which exists as long as the reference."""
        copy = self.actor.weights.options(tensor_transport=self.transport)
        weights = copy.remote(device=None if self.transport else "cpu")
        ray.wait([weights], timeout=STUCK_AFTER_S, fetch_local=False)
        return weights

    def write_state(self, file: Path) -> Callable[[], None]:
        result_of(self.actor.copy_state.remote())
        written = self.actor.write_state.options(concurrency_group=WRITING).remote(file.absolute())
        return lambda: result_of(written)

    def read_state(self, file: Path) -> None:
        result_of(self.actor.read_state.remote(file.absolute()))

    def log_probs(self, rollouts: list[Rollout], temperature: float) -> list[torch.Tensor]:
        return result_of(self.actor.log_probs.remote(rollouts, temperature))  # type: ignore[no-any-return]

    def token_entropies(self, rollouts: list[Rollout]) -> list[float]:
        return result_of(self.actor.token_entropies.remote(rollouts))  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        result_of(self.actor.save.remote(folder.absolute()))


class RolloutPipeline:
    """Generator and scorer, which work while the learner trains. Ray runs the calls of an actor in their order.

    For evaluation it is also an engine (:class:`grpo.rollout.engine.Engine`). ``learner``: gives the starting weights.
    ``loads_start``: the generator (vLLM) loads these too, which shows before training whether it can.
    """

    def __init__(self, generator: Any, scorer: Any, learner: RemoteLearner, context: int | None, loads_start: bool):
        self.generator, self.scorer, self.learner, self.context = generator, scorer, learner, context
        self._loaded = None if loads_start else 0  # the version that the generator has when it comes to the next call
        self.synchronize(learner.model, 0)

    def synchronize(self, model: Any, policy_version: int) -> None:
        """Sample all later requests with these weights, given as a reference."""
        self._weights, self.policy_version = model, policy_version

    def request(self, step: int) -> Future[ScoredRollouts]:
        """Request the sampled and scored rollouts of a step."""
        scored: Future[ScoredRollouts] = self.scorer.score.remote(self._call("sample", step)).future()
        return scored

    def turns(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[CompletionSpec] = ()
    ) -> list[list[Completion]]:
        """Sample with the newest weights, after all earlier requests."""
        return result_of(self._call("generate", prompts, params, n, seed, draws))  # type: ignore[no-any-return]

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the generator, which first loads the newest version if it has another one."""
        loading = []
        if self._loaded != self.policy_version:
            loading = [self.generator.load.remote(self._weights, self.policy_version)]
            self._loaded = self.policy_version
        return getattr(self.generator, method).remote(*arguments, *loading)
