"""The GRPO loop (DeepSeekMath, arXiv 2402.03300, Algorithm 1, without the reward model and the KL term)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo.common.records import Problem
from grpo.learner.learner import Learner
from grpo.rollout.engine import Engine
from grpo.study.methods import GrpoConfig
from grpo.tasks.task import Format, ScoreFn
from grpo.tracking.run_log import RunLog
from grpo.training.state import SavedState
from grpo.training.step import sample_rollouts, score_rollouts, train_on


def train_grpo(
    config: GrpoConfig,
    seed: int,
    problems: Sequence[Problem],
    tokenizer: Any,
    engine: Engine,
    learner: Learner,
    format: Format,
    score: ScoreFn,
    validate: Callable[[int, list[dict[str, float]]], bool],
    log: RunLog,
    saved: SavedState,
) -> None:
    """Train ``learner.model`` for ``config.n_grpo_steps`` steps, or until ``validate`` says that the run is over.

    Args:
        problems: the training set.
        engine: samples with the policy's weights.
        format: how the problems are put.
        score: rewards the completions.
        validate: called with the step and its updates' metrics, before the first step and after each; decides itself when to
            evaluate, and returns True if the run is to end here.
        log: receives one row for each optimizer step and the time of each phase.
        saved: where the run was taken up, and where its state is saved.
    """
    if saved.step == 0:
        with log.phase("evaluation"):
            validate(0, [])
    for step in range(saved.step + 1, config.n_grpo_steps + 1):
        with log.phase("rollout"):
            sampled = sample_rollouts(config, format, seed, step, problems, tokenizer, engine)

        with log.phase("scoring"):
            batch, metrics = score_rollouts(config, sampled, score)

        with log.phase("training"):
            updates, drift = train_on(config, learner, batch, version=step - 1)

        with log.phase("synchronization"):
            engine.synchronize(learner.model, policy_version=step)

        with log.phase("evaluation"):
            over = validate(step, updates)

        log.step(step, updates, metrics | drift, tokens=batch.tokens)
        if over:
            break
        if saved.due(step):
            saved.save(step)
