"""The loop of expert iteration (CS336 assignment 5, Algorithm 2): fine-tune the policy on its own correct answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tqdm import tqdm

from grpo.common.records import Rollout, response_tokens, whole
from grpo.evaluation.evaluate import summarize
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.rollout.engine import derive_seed
from grpo.study.config import ExpertIterationConfig
from grpo.training.step import RunContext, Updates, compute_rewards, sample, task_metrics


def train_by_expert_iteration(ctx: RunContext[ExpertIterationConfig, Learner]) -> None:
    """Train ``ctx.learner.model`` for ``n_ei_steps`` steps, or until ``ctx.validation`` ends the run."""
    config, log, learner, engine = ctx.setup.config, ctx.log, ctx.learner, ctx.sampler.engine
    for step in ctx.steps():
        with log.phase("rollout"):
            rollouts = sample(ctx.setup, ctx.sampler, step, config.ei_batch_size)

        with log.phase("scoring"):
            rollouts = compute_rewards(ctx.setup, rollouts, ctx.sampler.world)
            correct = [rollout for rollout in rollouts if whole(rollout.rewards["reward"]) == 1.0]

        with log.phase("training"):
            updates = fine_tune(config, correct, learner, derive_seed(ctx.setup.seed, "fine-tuning", step))

        with log.phase("synchronization"):
            engine.synchronize(learner.model, policy_version=step)

        with log.phase("evaluation"):
            over = ctx.validation(step, updates)

        if not correct:
            tqdm.write(f"step {step}: none of {len(rollouts)} rollouts has reward 1, so nothing was trained.")
        metrics = expert_metrics(rollouts, correct) | task_metrics(ctx.setup, rollouts)
        rows = updates or [NO_UPDATE | learner.loss_scale()]
        log.step(step, rows, metrics, response_tokens(rollouts))
        if over:
            break


# The metrics that are logged for a step without correct rollouts, and so without an update.
NO_UPDATE = dict.fromkeys(("loss", "gradient_norm", "token_entropy", "mean_nll"), math.nan) | {
    "skipped_update": 0.0,
    "learning_rate": math.nan,
}


def fine_tune(config: ExpertIterationConfig, correct: Sequence[Rollout], learner: Learner, seed: int) -> Updates:
    """Train on the correct rollouts for ``config.epochs_per_ei_step`` epochs, in shuffled batches; the last may be smaller.

    It trains on the sampled token ids, without tokenizing text again, and returns the metrics of each optimizer step.
    """
    updates = []
    for epoch in range(config.epochs_per_ei_step):
        shuffled = random.Random(derive_seed(seed, epoch)).sample(correct, len(correct))
        for start in range(0, len(shuffled), config.train_batch_size):
            batch = shuffled[start : start + config.train_batch_size]
            updates.append(learner.sft_update(texts_of(batch), config.normalize_constant))
    return updates


def expert_metrics(rollouts: Sequence[Rollout], correct: Sequence[Rollout]) -> dict[str, float]:
    """Means of a step's rollouts, with the number of correct ones and the share of questions solved."""
    found = summarize(rollouts) | {
        "correct": len(correct),
        "solved": len({r.problem.id for r in correct}) / len({r.problem.id for r in rollouts}),
    }
    columns = ("reward", "format_reward", "answer_reward", "correct", "solved", "response_length", "cut_off", "grader_timeouts")
    return {f"train/{name}": found[name] for name in columns}
