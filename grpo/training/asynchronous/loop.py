"""The asynchronous GRPO loop: the generator samples the next batches while the learner trains on one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from itertools import islice
from typing import Any, cast

from grpo.common.records import response_tokens
from grpo.study.config import GrpoConfig
from grpo.training.asynchronous.actors import ScoredRollouts
from grpo.training.asynchronous.remote import STUCK_AFTER_S, RemoteLearner, RolloutPipeline
from grpo.training.asynchronous.replay import ReplayBuffer
from grpo.training.step import RunContext, lag_metrics


def train_grpo_asynchronously(ctx: RunContext[GrpoConfig, RemoteLearner]) -> None:
    """Train for ``n_grpo_steps`` steps, or until ``ctx.validation`` ends the run.

    A step does what a step of :func:`grpo.training.grpo.train_grpo` does. With ``max_policy_lag`` L, the batch of step k is
    requested after step k - 1 - L and sampled with the weights of that step, so its tokens are at most L versions old when
    step k trains on them. With L = 0 generator and learner take turns, and the results equal those of the synchronous loop.

    The saved state includes the batches sampled ahead, because it does not include the older weights that sampled them.
    """
    config, log, learner = ctx.setup.config, ctx.log, ctx.learner
    pipeline = cast(RolloutPipeline, ctx.sampler.engine)
    settings = config.asynchronous
    assert settings is not None
    n, lag = config.n_grpo_steps, settings.max_policy_lag
    buffer = ReplayBuffer(config, ctx.setup.seed)
    requested: deque[Future[ScoredRollouts]] = deque()  # the batch of the next step first
    if ctx.saved.step:
        buffer.restore(ctx.saved.loop["buffer"])
        requested += map(finished, ctx.saved.loop["arrived"])

    def state() -> dict[str, Any]:
        return {"buffer": buffer.state(), "arrived": [batch.result(STUCK_AFTER_S) for batch in islice(requested, lag)]}

    for step in ctx.steps(state):
        with log.phase("waiting"):
            for ahead in range(step + len(requested), min(n, step + lag) + 1):  # in the first step only
                requested.append(pipeline.request(ahead))
            newest = requested.popleft().result(STUCK_AFTER_S)

        with log.phase("training"):
            buffer.add(newest.rollouts)
            rollouts = buffer.draw(step, version=step - 1)
            updates = learner.train(rollouts, version=step - 1)

        with log.phase("synchronization"):
            pipeline.synchronize(learner.model, policy_version=step)
            if step + 1 + lag <= n:
                requested.append(pipeline.request(step + 1 + lag))

        with log.phase("evaluation"):
            over = ctx.validation(step, updates)

        metrics = newest.metrics | lag_metrics(rollouts, step - 1) | buffer.metrics()
        times = newest.times | {"training_peak_mb": learner.peak_mb}
        log.step(step, updates, metrics, response_tokens(rollouts), times)
        if over:
            break


def finished(rollouts: ScoredRollouts) -> Future[ScoredRollouts]:
    """Wrap a batch that arrived before the run was resumed."""
    batch: Future[ScoredRollouts] = Future()
    batch.set_result(rollouts)
    return batch
