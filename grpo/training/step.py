"""The parts of one GRPO step, which the synchronous and the asynchronous loop put together in their own ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo.common.records import Completion, Problem, Rollout
from grpo.evaluation.evaluate import encode_prompts, grader_timeouts, score_sampled
from grpo.learner.advantages import normalize_scores
from grpo.learner.learner import Batch, Learner
from grpo.rollout.engine import Engine, SamplingParams, derive_seed
from grpo.study.methods import GrpoConfig, SamplingConfig
from grpo.tasks.task import Format, ScoreFn
from grpo.training.order import items_of_step

# One question, its prompt's token ids, and one of its G completions; those of a group side by side.
Sampled = list[tuple[Problem, tuple[int, ...], Completion]]


def rollout_sampling(config: SamplingConfig, format: Format) -> SamplingParams:
    """The sampling settings of training rollouts."""
    return SamplingParams(
        temperature=config.sampling_temperature,
        top_p=config.sampling_top_p,
        min_tokens=config.sampling_min_tokens,
        max_tokens=config.sampling_max_tokens,
        stop=format.stop,
    )


def sample_rollouts(
    config: GrpoConfig, format: Format, seed: int, step: int, problems: Sequence[Problem], tokenizer: Any, engine: Engine
) -> Sampled:
    """Ask the step's questions, G times each; the same arguments and weights give the same rollouts."""
    questions = items_of_step(problems, seed, step, config.n_prompts_per_rollout_batch)
    prompts = encode_prompts(tokenizer, questions, format)
    groups = engine.generate(
        prompts, rollout_sampling(config, format), n=config.group_size, seed=derive_seed(seed, "rollout", step)
    )
    return [(q, p, c) for q, p, group in zip(questions, prompts, groups, strict=True) for c in group]


def score_rollouts(config: GrpoConfig, sampled: Sampled, score: ScoreFn) -> tuple[Batch, dict[str, float]]:
    """Reward each completion, and normalise the rewards within each group.

    Returns:
        the rollout batch, and what is logged of it.
    """
    rollouts = score_sampled(score, sampled)
    advantages, raw_rewards, rewards = normalize_scores(
        [rollout.rewards for rollout in rollouts], config.group_size, config.advantage_eps, config.use_std_normalization
    )
    return Batch(rollouts, raw_rewards, advantages), rollout_metrics(rewards, rollouts)


def rollout_metrics(rewards: dict[str, float], rollouts: list[Rollout]) -> dict[str, float]:
    """What is logged of a rollout batch: train rewards, groups without signal, response lengths (tokens), and how many answers
    took the grader too long.
    """
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return {
        "train/reward": rewards["reward"],
        "train/format_reward": rewards["format_reward"],
        "train/answer_reward": rewards["answer_reward"],
        "train/zero_signal_fraction": rewards["zero_signal_fraction"],
        "train/response_length": sum(lengths) / len(lengths),
        "train/response_length_max": max(lengths),
        "train/cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "train/grader_timeouts": grader_timeouts(rollouts),
    }


def train_on(
    config: GrpoConfig, learner: Learner, batch: Batch, version: int
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """All optimizer steps on one rollout batch: each epoch goes through it in train batches.

    The ratio's denominator is the policy that sampled. Where that is the learner as it is now, its log-probabilities are
    computed before the first update (and with one update they are the current ones: ratios are exactly 1). Where a rollout
    comes from older weights, it is what the engine noted when it drew the tokens.

    Args:
        version: of the learner's policy, in GRPO steps.

    Returns:
        the metrics of each update, and the drift from the starting weights where that is measured.
    """
    stale = any(rollout.completion.policy_version != version for rollout in batch.rollouts)
    if stale:
        batch = replace(batch, old_log_probs=[torch.tensor(r.completion.log_probs) for r in batch.rollouts])
    elif config.updates_per_rollout_batch > 1:
        batch = replace(batch, old_log_probs=learner.log_probs(batch.rollouts))
    drift = learner.drift(batch.rollouts, batch.old_log_probs)
    updates = [
        learner.update(batch.slice(start, start + config.train_batch_size))
        for _ in range(config.epochs_per_rollout_batch)
        for start in range(0, config.rollout_batch_size, config.train_batch_size)
    ]
    return updates, drift


def lag_metrics(batch: Batch, version: int) -> dict[str, float]:
    """How many versions lie between the policy that sampled a token and the one that is trained on it.

    Args:
        version: of the learner's policy before the updates on this batch.

    Returns:
        mean, smallest and largest lag over the batch's response tokens.
    """
    lags = [(version - r.completion.policy_version, len(r.completion.token_ids)) for r in batch.rollouts]
    tokens = sum(n for _, n in lags)
    return {
        "lag_mean": sum(lag * n for lag, n in lags) / max(1, tokens),
        "lag_min": min(lag for lag, _ in lags),
        "lag_max": max(lag for lag, _ in lags),
    }
