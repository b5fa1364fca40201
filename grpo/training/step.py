"""The parts of one step, which the loops put together in their own ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from grpo.common.records import Problem, Rollout, response_tokens
from grpo.common.world import ALONE, World
from grpo.evaluation.evaluate import Sampler, grader_timeouts, sample_rollouts, score_rollouts
from grpo.learner.advantages import normalize_scores
from grpo.learner.learner import Learner
from grpo.rollout.engine import SamplingParams, derive_seed
from grpo.study.methods import GrpoConfig, SamplingConfig
from grpo.tasks.rewards import soft_overlong_punishment
from grpo.tasks.task import Format
from grpo.training.context import RunSetup, Updates
from grpo.training.order import items_of_step

Sampling = TypeVar("Sampling", bound=SamplingConfig)


def rollout_sampling(config: SamplingConfig, format: Format) -> SamplingParams:
    """The sampling settings of training rollouts."""
    return SamplingParams(
        temperature=config.sampling_temperature,
        top_p=config.sampling_top_p,
        min_tokens=config.sampling_min_tokens,
        max_tokens=config.sampling_max_tokens,
        stop=format.stop,
    )


def sample(setup: RunSetup[Sampling], sampler: Sampler, step: int, n_questions: int) -> list[Rollout]:
    """Ask the step's questions, G times each; the same seed, step and weights give the same rollouts.

    Returns:
        those of this process's share of the questions.
    """
    questions = items_of_step(setup.data, setup.seed, step, n_questions)
    return ask(setup, sampler, questions, derive_seed(setup.seed, "rollout", step))


def ask(setup: RunSetup[Sampling], sampler: Sampler, questions: Sequence[Problem], seed: int) -> list[Rollout]:
    """Sample G rollouts of each question of this process's share."""
    return sample_rollouts(sampler, questions, rollout_sampling(setup.config, setup.format), setup.config.group_size, seed)


def reward(setup: RunSetup[Sampling], rollouts: list[Rollout], world: World) -> list[Rollout]:
    """Write rewards into this process's rollouts; those of all processes, in the order of the questions.

    With ``overlong_buffer`` the reward that is trained on has the punishment of long responses in it; validation's has not.
    """
    score_rollouts(setup.score, rollouts)
    if isinstance(setup.config, GrpoConfig) and (buffer := setup.config.overlong_buffer) is not None:
        for rollout in rollouts:
            length = len(rollout.completion.token_ids)
            punishment = soft_overlong_punishment(length, setup.config.sampling_max_tokens, buffer)
            rollout.rewards = rollout.rewards | {"reward": rollout.rewards["reward"] + punishment}
    return world.join(rollouts, each=setup.config.group_size)


def score(setup: RunSetup[GrpoConfig], rollouts: list[Rollout], world: World = ALONE) -> tuple[list[Rollout], dict[str, float]]:
    """Write rewards into the rollouts, and advantages: the rewards, normalised within each group.

    Returns:
        the rollouts of all processes, and what is logged of them.
    """
    rollouts = reward(setup, rollouts, world)
    return rollouts, set_advantages(setup.config, rollouts) | of_the_task(setup, rollouts)


def set_advantages(config: GrpoConfig, rollouts: list[Rollout]) -> dict[str, float]:
    """Write advantages into all scored rollouts of a batch; returns what is logged of them."""
    advantages, _, means = normalize_scores(
        [rollout.rewards for rollout in rollouts],
        config.group_size,
        config.advantage_eps,
        config.use_std_normalization,
        config.baseline,
    )
    for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True):
        rollout.advantage = advantage
    return rollout_metrics(means, rollouts)


def of_the_task(setup: RunSetup[Sampling], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the run's task has logged of a rollout batch."""
    return {f"train/{name}": value for name, value in setup.task.training_measures(rollouts).items()}


def rollout_metrics(means: dict[str, float], rollouts: list[Rollout]) -> dict[str, float]:
    """What is logged of a rollout batch: train rewards, groups without signal, response lengths (tokens), and how many answers
    took the grader too long.

    Args:
        means: as :func:`grpo.learner.advantages.normalize_scores` gives them.
    """
    return {
        "train/reward": means["reward"],
        "train/format_reward": means["format_reward"],
        "train/answer_reward": means["answer_reward"],
        "train/zero_signal_fraction": means["zero_signal_fraction"],
        "train/response_length": response_tokens(rollouts) / len(rollouts),
        "train/response_length_max": max(len(r.completion.token_ids) for r in rollouts),
        "train/cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "train/grader_timeouts": grader_timeouts(rollouts),
    }


def train_on(config: GrpoConfig, learner: Learner, rollouts: list[Rollout], version: int) -> tuple[Updates, dict[str, float]]:
    """All optimizer steps on one rollout batch: each epoch goes through it in train batches.

    The ratio's denominator is the policy that sampled. Where that is the learner as it is now, its log-probabilities are
    computed before the first update (and with one update they are the current ones: ratios are exactly 1). Where a rollout
    comes from older weights, it is what the engine noted when it drew the tokens. With ``importance_cap`` it is the learner as
    it is now in either case, and the importance weights lead from what the engine noted to that (the decoupled objective of
    Hilton et al. 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641).

    Args:
        version: of the learner's policy, in GRPO steps.

    Returns:
        the metrics of each update, and the drift from the starting weights where that is measured.
    """
    old_log_probs: Sequence[torch.Tensor | None] = [None] * len(rollouts)
    stale = any(rollout.completion.policy_version != version for rollout in rollouts)
    if stale and config.importance_cap is None:
        old_log_probs = [torch.tensor(rollout.completion.log_probs) for rollout in rollouts]
    elif config.updates_per_rollout_batch > 1:
        old_log_probs = learner.log_probs(rollouts)
    reference: Sequence[torch.Tensor | None] = [None] * len(rollouts)
    if config.kl_coefficient:
        reference = learner.reference_log_probs(rollouts)
    for i, rollout in enumerate(rollouts):
        rollout.old_log_probs, rollout.reference_log_probs = old_log_probs[i], reference[i]
        rollout.group = i // config.group_size
    drift = learner.drift(rollouts)
    updates = [
        learner.update(rollouts[start : start + config.train_batch_size])
        for _ in range(config.epochs_per_rollout_batch)
        for start in range(0, config.rollout_batch_size, config.train_batch_size)
    ]
    return updates, drift


def lag_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """How many versions lie between the policy that sampled a token and the one that is trained on it.

    Args:
        version: of the learner's policy before the updates on these rollouts.

    Returns:
        mean, smallest and largest lag over the response tokens.
    """
    lags = [(version - r.completion.policy_version, len(r.completion.token_ids)) for r in rollouts]
    tokens = sum(n for _, n in lags)
    return {
        "lag_mean": sum(lag * n for lag, n in lags) / max(1, tokens),
        "lag_min": min(lag for lag, _ in lags),
        "lag_max": max(lag for lag, _ in lags),
    }
