"""Group-normalized advantages; a study adds its own by an import path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError, own_errors
from grpo.common.imports import import_object, require_arguments

SAME = 1e-9  # rewards that differ by at most this are equal, as .1 + .2 and .3
ROUNDING = 1e-13  # or by at most this share of the largest, which is some hundred times float64's rounding


def are_equal(groups: Tensor) -> Tensor:
    """Whether all rewards of each group (n_groups, group_size) are equal but for rounding: (n_groups,)."""
    largest = groups.abs().amax(dim=1)
    return groups.amax(dim=1) - groups.amin(dim=1) <= (ROUNDING * largest).clamp(min=SAME)


def normalize_within_groups(
    raw_rewards: Tensor,
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
    baseline: str = "group_mean",
) -> Tensor:
    """Compute A = (r - group mean) / (group std + eps); without ``normalize_by_std``, A = r - group mean as in Dr. GRPO.

    DeepSeekMath, arXiv 2402.03300, Section 4.1.2. The standard deviation is the unbiased one (``torch.std``). With
    ``leave_one_out`` the baseline is the mean of the group's other rewards (RLOO, arXiv 2402.14740). Since
    r - (sum - r) / (G - 1) = G / (G - 1) (r - mean), this is a constant factor.

    Groups are consecutive rewards: two groups may have the same question, so grouping goes by position. A reward NaN (the
    reward function abstained) counts neither in a mean nor in a standard deviation, and its advantage is 0.

    Args:
        raw_rewards: (n_groups * group_size,).

    Returns:
        advantages (n_groups * group_size,), in float32.

    Raises:
        UserError: the rewards are not a whole number of groups, or do not fit float32, in which losses are computed.
    """
    if len(raw_rewards) % group_size:
        raise UserError(f"group_size: {len(raw_rewards)} rewards are not a whole number of groups of {group_size}.")
    groups = raw_rewards.double().view(-1, group_size)
    counts, counted = (~groups.isnan()).sum(dim=1, keepdim=True), groups[~groups.isnan()]
    # In the place of NaN the mean of the others changes neither their mean nor their distances from it.
    groups = torch.where(groups.isnan(), groups.nanmean(dim=1, keepdim=True).nan_to_num(), groups)
    # Subtract in float64, so that small differences between large rewards survive; float32 can hold the differences.
    advantages = (groups - groups.mean(dim=1, keepdim=True)).float()
    if normalize_by_std and group_size > 1:
        counted_more = ((group_size - 1) / (counts - 1).clamp(min=1)).sqrt()  # as if NaN had been at no distance; mostly 1
        advantages = advantages / (advantages.std(dim=1, keepdim=True) * counted_more + advantage_eps)
    if baseline == "leave_one_out" and group_size > 1:
        advantages = advantages * (counts / (counts - 1).clamp(min=1)).float()
    # What rounding leaves of equal rewards, a division by their tiny std would magnify.
    advantages = torch.where(are_equal(groups)[:, None], 0.0, advantages).flatten()
    advantages = torch.where(raw_rewards.isnan(), 0.0, advantages)
    _require_float32(counted, advantages)
    return advantages


def _require_float32(raw_rewards: Tensor, advantages: Tensor) -> None:
    if not (advantages.isfinite().all() and raw_rewards.float().isfinite().all()):
        raise UserError(
            f"reward: rewards from {raw_rewards.min().item():g} to {raw_rewards.max().item():g} do not fit float32, in which "
            "losses are computed. Return finite numbers below 1e38."
        )


Advantage = Callable[..., Tensor]
"""(rewards, lengths in tokens, **advantage_options) -> advantages; each (groups, group_size), a group's responses in a row.

A reward is NaN where the reward function abstains; whatever is returned for it, its advantage is 0."""


def own_advantages(path: str, options: Mapping[str, Any], rewards: Tensor, lengths: Tensor) -> Tensor:
    """Compute advantages with a function of the user's own.

    Args:
        path: MODULE:NAME of an :data:`Advantage`.
        rewards, lengths: (groups, group_size), float64.

    Returns:
        advantages (groups * group_size,), in float32.

    Raises:
        UserError: there is no such function, it has no such options, or it does not return a finite number for each response.
    """
    function: Advantage = import_object(path)
    remedy = "It is called with rewards, lengths and advantage_options."
    require_arguments(function, f"advantage: {path}", remedy, rewards, lengths, **options)
    with torch.no_grad(), own_errors(f"advantage: {path}"):
        returned = function(rewards.clone(), lengths.clone(), **options)
    counted = ~rewards.isnan()
    if not isinstance(returned, Tensor) or returned.shape != rewards.shape or not returned[counted].isfinite().all():
        raise UserError(f"advantage: {path} must return a finite number for each reward, a tensor of the shape of `rewards`.")
    advantages = torch.where(counted, returned.float(), 0.0)
    _require_float32(rewards[counted], advantages)
    return advantages.flatten()


def try_advantage(path: str, options: Mapping[str, Any], group_size: int) -> None:
    """Try :func:`own_advantages` on a group of unlike rewards and a group of like ones; errors are the same."""
    lengths = torch.arange(1.0, 2 * group_size + 1, dtype=torch.float64).view(2, group_size)
    own_advantages(path, options, (lengths == 1.0).double(), lengths)


def reward_statistics(scores: Sequence[dict[str, float]], advantages: Tensor, group_size: int) -> dict[str, float]:
    """Compute reward statistics of scored responses.

    Args:
        scores: ``reward``, ``format_reward`` and ``answer_reward`` of each response. A reward NaN does not count; without any
            other, the statistics are NaN.
        advantages: (n_groups * group_size,), those of a group side by side.

    Returns:
        means of the three rewards; standard deviation, minimum and maximum of the reward; ``zero_signal_fraction``, the share
        of groups whose advantages are all 0.
    """
    counted = [score["reward"] for score in scores if not math.isnan(score["reward"])] or [math.nan]
    raw_rewards = torch.tensor(counted, dtype=torch.float64)
    return {
        "reward": raw_rewards.mean().item(),
        "reward_std": raw_rewards.std(correction=0).item(),
        "reward_min": raw_rewards.min().item(),
        "reward_max": raw_rewards.max().item(),
        "format_reward": sum(score["format_reward"] for score in scores) / len(scores),
        "answer_reward": sum(score["answer_reward"] for score in scores) / len(scores),
        "zero_signal_fraction": (advantages.view(-1, group_size) == 0.0).all(dim=1).double().mean().item(),
    }
