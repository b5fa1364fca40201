"""The GRPO loop with generator and learner apart: while the learner trains on one batch, the next ones are being sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice

from grpo.study.methods import GrpoConfig
from grpo.tracking.run_log import RunLog
from grpo.training.asynchronous.remote import Delivery, RemoteLearner, RolloutPipeline
from grpo.training.asynchronous.replay import ReplayBuffer
from grpo.training.state import SavedState
from grpo.training.step import lag_metrics


def train_grpo_asynchronously(
    config: GrpoConfig,
    seed: int,
    pipeline: RolloutPipeline,
    learner: RemoteLearner,
    validate: Callable[[int, list[dict[str, float]]], bool],
    log: RunLog,
    saved: SavedState,
) -> None:
    """Train for ``config.n_grpo_steps`` steps, or until ``validate`` says that the run is over.

    The steps are those of :func:`grpo.training.grpo.train_grpo`. With a lag of L, the batch of step k is ordered when step
    k - 1 - L has been trained, and sampled by that version or (``weights: newest``) a later one; so its tokens are at most L
    versions old when step k trains on them. With L = 0 generator and learner take turns, and the result is that of the
    synchronous loop.

    Args:
        validate, log, saved: as of :func:`grpo.training.grpo.train_grpo`. The batches that older versions sampled are part of
            the saved state, as these versions' weights are not.
    """
    apart = config.asynchronous
    assert apart is not None
    n, lag = config.n_grpo_steps, apart.max_policy_lag
    groups = config.n_prompts_per_rollout_batch
    buffer = ReplayBuffer(config.group_size, groups, apart.replay_capacity, apart.replay_max_age, seed)
    ordered: deque[Future[Delivery]] = deque()
    if saved.step == 0:
        with log.phase("evaluation"):
            validate(0, [])
    else:
        buffer.restore(saved.loop["buffer"])
        ordered += map(arrived, saved.loop["arrived"])
    for step in range(saved.step + 1 + len(ordered), min(n, saved.step + 1 + lag) + 1):
        ordered.append(pipeline.order(step))
    for step in range(saved.step + 1, n + 1):
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
        if saved.due(step):
            saved.save(step, {"buffer": buffer.state(), "arrived": [order.result() for order in islice(ordered, lag)]})


def arrived(delivery: Delivery) -> Future[Delivery]:
    """An order that was delivered before the run was taken up."""
    order: Future[Delivery] = Future()
    order.set_result(delivery)
    return order
