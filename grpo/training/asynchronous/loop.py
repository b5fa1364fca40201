"""The asynchronous GRPO loop: while the learner trains on one batch, the generator samples the next ones."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from itertools import islice

from grpo.common.records import response_tokens
from grpo.study.methods import GrpoConfig
from grpo.training.asynchronous.remote import RemoteLearner, RolloutPipeline, ScoredRollouts
from grpo.training.asynchronous.replay import ReplayBuffer
from grpo.training.context import RunContext
from grpo.training.step import lag_metrics


def train_grpo_asynchronously(pipeline: RolloutPipeline, ctx: RunContext[GrpoConfig, RemoteLearner]) -> None:
    """Train for ``n_grpo_steps`` steps, or until ``ctx.validation`` says that the run is over.

    The steps are those of :func:`grpo.training.grpo.train_grpo`. With a lag of L, the batch of step k is ordered when step
    k - 1 - L has been trained, and sampled by that version; so its tokens are at most L versions old when step k trains on
    them. With L = 0 generator and learner take turns, and the result is that of the synchronous loop.

    The batches that older versions sampled are part of the saved state, as these versions' weights are not.
    """
    config, log, saved, learner = ctx.setup.config, ctx.log, ctx.saved, ctx.learner
    settings = config.asynchronous
    assert settings is not None
    n, lag = config.n_grpo_steps, settings.max_policy_lag
    groups = config.n_prompts_per_rollout_batch
    buffer = ReplayBuffer(config.group_size, groups, settings.replay_capacity, settings.replay_max_age, ctx.setup.seed)
    ordered: deque[Future[ScoredRollouts]] = deque()
    if saved.step == 0:
        with log.phase("evaluation"):
            ctx.validation(0, [])
    else:
        buffer.restore(saved.loop["buffer"])
        ordered += map(arrived, saved.loop["arrived"])
    for step in range(saved.step + 1 + len(ordered), min(n, saved.step + 1 + lag) + 1):
        ordered.append(pipeline.order(step))
    for step in range(saved.step + 1, n + 1):
        with log.phase("waiting"):
            newest = ordered.popleft().result()

        with log.phase("training"):
            buffer.add(newest.rollouts)
            rollouts = buffer.draw(step, version=step - 1)
            updates = learner.train(rollouts, version=step - 1)

        with log.phase("synchronization"):
            pipeline.synchronize(learner.model, policy_version=step)
            if step + 1 + lag <= n:
                ordered.append(pipeline.order(step + 1 + lag))

        with log.phase("evaluation"):
            over = ctx.validation(step, updates)

        metrics = newest.metrics | lag_metrics(rollouts, step - 1) | buffer.metrics()
        times = newest.times | {"training_peak_mb": learner.peak_mb}
        log.step(step, updates, metrics, response_tokens(rollouts), times)
        if over:
            break
        if saved.due(step):
            saved.save(step, {"buffer": buffer.state(), "arrived": [order.result() for order in islice(ordered, lag)]})


def arrived(rollouts: ScoredRollouts) -> Future[ScoredRollouts]:
    """An order that arrived before the run was taken up."""
    order: Future[ScoredRollouts] = Future()
    order.set_result(rollouts)
    return order
