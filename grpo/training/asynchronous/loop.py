"""The GRPO loop with generator and learner apart: while the learner trains on one batch, the next ones are being sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from grpo.config import GrpoConfig
from grpo.tracking import RunLog
from grpo.training.asynchronous.remote import RemoteLearner, RolloutPipeline
from grpo.training.asynchronous.replay import ReplayBuffer
from grpo.training.step import lag_metrics


def train_grpo_asynchronously(
    config: GrpoConfig,
    seed: int,
    pipeline: RolloutPipeline,
    learner: RemoteLearner,
    validate: Callable[[int, list[dict[str, float]]], bool],
    log: RunLog,
) -> None:
    """Train for ``config.n_grpo_steps`` steps, or until ``validate`` says that the run is over.

    The steps are those of :func:`grpo.training.grpo.train_grpo`. With a lag of L, the batch of step k is ordered when step
    k - 1 - L has been trained, and sampled by that version or (``weights: newest``) a later one; so its tokens are at most L
    versions old when step k trains on them. With L = 0 generator and learner take turns, and the result is that of the
    synchronous loop.

    Args:
        validate, log: as of :func:`grpo.training.grpo.train_grpo`.
    """
    apart = config.asynchronous
    assert apart is not None
    n, lag = config.n_grpo_steps, apart.max_policy_lag
    groups = config.n_prompts_per_rollout_batch
    buffer = ReplayBuffer(config.group_size, groups, apart.replay_capacity, apart.replay_max_age, seed)
    with log.phase("evaluation"):
        validate(0, [])
    ordered = deque(pipeline.order(step) for step in range(1, min(n, 1 + lag) + 1))
    for step in range(1, n + 1):
        with log.phase("waiting"):
            delivery = ordered.popleft().result()

        with log.phase("training"):
            buffer.add(delivery.batch)
            batch = buffer.draw(step, version=step - 1)
            updates = learner.train(batch, version=step - 1)

        with log.phase("synchronization"):
            pipeline.synchronize(learner.model, policy_version=step)
            if step + 1 + lag <= n:
                ordered.append(pipeline.order(step + 1 + lag))

        with log.phase("evaluation"):
            over = validate(step, updates)

        metrics = delivery.metrics | lag_metrics(batch, step - 1) | buffer.metrics()
        log.step(step, updates, metrics, batch.tokens, delivery.times | {"training_peak_mb": learner.peak_mb})
        if over:
            break
