"""Expert iteration (CS336 assignment 5, Algorithm 2): fine-tune on those of the policy's own answers that are right."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from grpo.common.records import Problem, Rollout
from grpo.evaluation.evaluate import encode_prompts, grader_timeouts, score_sampled
from grpo.learner.learner import Learner
from grpo.rollout.engine import Engine, derive_seed
from grpo.study.methods import ExpertIterationConfig
from grpo.tasks.task import Format, ScoreFn
from grpo.tracking.run_log import RunLog
from grpo.training.order import items_of_step
from grpo.training.state import SavedState
from grpo.training.step import rollout_sampling
from grpo.training.validation import Validation


def train_by_expert_iteration(
    config: ExpertIterationConfig,
    seed: int,
    problems: Sequence[Problem],
    tokenizer: Any,
    engine: Engine,
    learner: Learner,
    format: Format,
    score: ScoreFn,
    validate: Validation,
    log: RunLog,
    saved: SavedState,
) -> None:
    """Train ``learner.model`` for ``config.n_ei_steps`` steps, or until ``validate`` says that the run is over.

    The arguments are those of :func:`grpo.training.grpo.train_grpo`.
    """
    sampling = rollout_sampling(config, format)
    if saved.step == 0:
        with log.phase("evaluation"):
            validate(0, [])
    for step in range(saved.step + 1, config.n_ei_steps + 1):
        with log.phase("rollout"):
            questions = items_of_step(problems, seed, step, config.ei_batch_size)
            prompts = encode_prompts(tokenizer, questions, format)
            groups = engine.generate(prompts, sampling, n=config.group_size, seed=derive_seed(seed, "rollout", step))

        with log.phase("scoring"):
            sampled = [(q, p, c) for q, p, group in zip(questions, prompts, groups, strict=True) for c in group]
            rollouts = score_sampled(score, sampled)
            correct = [rollout for rollout in rollouts if rollout.rewards["reward"] == 1.0]

        with log.phase("training"):
            updates = fine_tune(config, correct, learner, derive_seed(seed, "fine-tuning", step))

        with log.phase("synchronization"):
            engine.synchronize(learner.model, policy_version=step)

        with log.phase("evaluation"):
            over = validate(step, updates)

        tokens = sum(len(rollout.completion.token_ids) for rollout in rollouts)
        log.step(step, updates or [NOTHING_TO_LEARN], expert_metrics(rollouts, correct), tokens)
        if over:
            break
        if saved.due(step):
            saved.save(step)


# In the place of an update's metrics at a step whose rollouts were all wrong.
NOTHING_TO_LEARN = dict.fromkeys(("loss", "gradient_norm", "token_entropy", "mean_nll"), math.nan) | {
    "skipped_update": 0.0,
    "learning_rate": math.nan,
}


def fine_tune(config: ExpertIterationConfig, correct: Sequence[Rollout], learner: Learner, seed: int) -> list[dict[str, float]]:
    """``config.epochs_per_ei_step`` times through the correct rollouts, in batches; a last batch may be smaller.

    The sampled token ids are trained on as they are.

    Returns:
        the metrics of each optimizer step.
    """
    updates = []
    for epoch in range(config.epochs_per_ei_step):
        shuffled = random.Random(derive_seed(seed, epoch)).sample(correct, len(correct))
        for start in range(0, len(shuffled), config.train_batch_size):
            batch = shuffled[start : start + config.train_batch_size]
            prompts = [rollout.prompt_ids for rollout in batch]
            responses = [rollout.completion.token_ids for rollout in batch]
            updates.append(learner.sft_update(prompts, responses, config.normalize_constant))
    return updates


def expert_metrics(rollouts: Sequence[Rollout], correct: Sequence[Rollout]) -> dict[str, float]:
    """What is logged of a step's rollouts: rewards, how many are correct, questions solved, response lengths (tokens), and how
    many answers took the grader too long.
    """
    n = len(rollouts)
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    return {
        **{f"train/{key}": sum(r.rewards[key] for r in rollouts) / n for key in ("reward", "format_reward", "answer_reward")},
        "train/correct": len(correct),
        "train/solved": len({r.problem.id for r in correct}) / len({r.problem.id for r in rollouts}),
        "train/response_length": sum(lengths) / n,
        "train/cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / n,
        "train/grader_timeouts": grader_timeouts(rollouts),
    }
