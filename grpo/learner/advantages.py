"""Rewards normalised within their group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.common.errors import UserError


def normalize_within_groups(
    raw_rewards: Tensor, group_size: int, advantage_eps: float, normalize_by_std: bool, baseline: str = "group_mean"
) -> Tensor:
    """A = (r - mean of its group) / (std of its group + eps); without the division as in Dr. GRPO.

    With ``leave_one_out`` the baseline is the mean of the group's other rewards (RLOO, arXiv 2402.14740). As
    r - (sum - r) / (G - 1) = G / (G - 1) (r - mean), that is another factor, the same for all.

    The standard deviation is the unbiased one (``torch.std``). Groups are consecutive: grouping goes by position, as two
    groups may hold the same question. DeepSeekMath, arXiv 2402.03300, Section 4.1.2.

    Args:
        raw_rewards: (n_groups * group_size,).

    Returns:
        Advantages of the same shape, in float32.

    Raises:
        UserError: the rewards are no whole number of groups, or are too large for float32, in which losses are computed.
    """
    if len(raw_rewards) % group_size:
        raise UserError(f"group_size: {len(raw_rewards)} rewards are no whole number of groups of {group_size}.")
    groups = raw_rewards.double().view(-1, group_size)
    # Rounding leaves a mean of equal rewards a little beside them, which the division by their tiny std would blow up.
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    # In float64, so that small differences of large rewards count; what is left of them float32 represents as well.
    advantages = (groups - groups.mean(dim=1, keepdim=True)).float()
    if normalize_by_std and group_size > 1:
        advantages = advantages / (advantages.std(dim=1, keepdim=True) + advantage_eps)
    if baseline == "leave_one_out" and group_size > 1:
        advantages = advantages * (group_size / (group_size - 1))
    advantages = torch.where(equal, 0.0, advantages).flatten()
    if not (advantages.isfinite() & raw_rewards.float().isfinite()).all():
        raise UserError(
            f"reward: rewards from {raw_rewards.min().item():g} to {raw_rewards.max().item():g} do not fit float32, in which "
            "losses are computed. Return finite numbers below 1e38."
        )
    return advantages


def normalize_scores(
    scores: Sequence[dict[str, float]],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
    baseline: str = "group_mean",
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Normalise the rewards of scored responses within each group.

    Args:
        scores: ``reward``, ``format_reward`` and ``answer_reward`` of each response, those of a group side by side.

    Returns:
        advantages and raw rewards, each (n_groups * group_size,), and metadata: means of the three rewards, their spread, and
        ``zero_signal_fraction`` (groups in which all rewards are equal, so that they train nothing).
    """
    raw_rewards = torch.tensor([score["reward"] for score in scores], dtype=torch.float64)
    advantages = normalize_within_groups(raw_rewards, group_size, advantage_eps, normalize_by_std, baseline)
    groups = raw_rewards.view(-1, group_size)
    metadata = {
        "reward": raw_rewards.mean().item(),
        "reward_std": raw_rewards.std(correction=0).item(),
        "reward_min": raw_rewards.min().item(),
        "reward_max": raw_rewards.max().item(),
        "format_reward": sum(score["format_reward"] for score in scores) / len(scores),
        "answer_reward": sum(score["answer_reward"] for score in scores) / len(scores),
        "zero_signal_fraction": (groups == groups[:, :1]).all(dim=1).double().mean().item(),
    }
    return advantages, raw_rewards.float(), metadata
