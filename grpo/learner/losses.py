"""Per-token losses and the microbatch steps that back-propagate them, by the handouts' names."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.learner.masking import masked_mean, masked_normalize, token_weights


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """REINFORCE: -A log pi(o_t) (Williams 1992).

    Args:
        raw_rewards_or_advantages: (batch, 1), one for each response.
        policy_log_probs: (batch, length).

    Returns:
        (batch, length)
    """
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(rho A, clip(rho, 1 - eps, 1 + eps) A) with rho = pi / pi_old (PPO, arXiv 1707.06347, Eq. 7).

    Args:
        advantages: (batch, 1).
        policy_log_probs, old_log_probs: (batch, length).
        cliprange: eps.

    Returns:
        per-token loss (batch, length); ``ratio`` and ``clipped`` (bool: the clipped term was the smaller one).
    """
    ratio = torch.exp(policy_log_probs - old_log_probs)
    unclipped = ratio * advantages
    clipped = torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange) * advantages
    metadata = {"ratio": ratio.detach(), "clipped": (clipped < unclipped).detach()}
    return -torch.minimum(unclipped, clipped), metadata


def _require(value: Tensor | None, name: str, loss_type: str) -> Tensor:
    if value is None:
        raise ValueError(f"loss_type {loss_type} needs {name}")
    return value


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The per-token loss of one of the four types, and its metadata.

    ``no_baseline`` takes raw_rewards, ``reinforce_with_baseline`` advantages, ``grpo_no_clip`` advantages and
    old_log_probs (-rho A), ``grpo_clip`` all of these and cliprange.

    Args:
        policy_log_probs: (batch, length); the rewards are (batch, 1), old_log_probs (batch, length).

    Returns:
        (batch, length) and ``ratio``, ``clipped`` where old log-probabilities were given.

    Raises:
        ValueError: an unknown type, or an argument that the type needs is None.
    """
    if loss_type == "grpo_clip":
        if cliprange is None:
            raise ValueError("loss_type grpo_clip needs cliprange")
        return compute_grpo_clip_loss(
            _require(advantages, "advantages", loss_type),
            policy_log_probs,
            _require(old_log_probs, "old_log_probs", loss_type),
            cliprange,
        )
    if loss_type == "grpo_no_clip":
        ratio = torch.exp(policy_log_probs - _require(old_log_probs, "old_log_probs", loss_type))
        return -ratio * _require(advantages, "advantages", loss_type), _ratio_metadata(ratio)
    if loss_type == "no_baseline":
        weight = _require(raw_rewards, "raw_rewards", loss_type)
    elif loss_type == "reinforce_with_baseline":
        weight = _require(advantages, "advantages", loss_type)
    else:
        raise ValueError(f"unknown loss_type {loss_type!r}")
    metadata = {} if old_log_probs is None else _ratio_metadata(torch.exp(policy_log_probs - old_log_probs))
    return compute_naive_policy_gradient_loss(weight, policy_log_probs), metadata


def _ratio_metadata(ratio: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio.detach(), "clipped": torch.zeros_like(ratio, dtype=torch.bool)}


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    length_normalization: str = "masked_mean",
    constant_normalizer: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one microbatch, already divided for accumulation, with its gradients added to the leaves.

    Each response's token losses are reduced by ``length_normalization``, then averaged over the
    ``gradient_accumulation_steps`` equal microbatches of an optimizer step. A response without tokens adds nothing.

    Args:
        policy_log_probs, response_mask, old_log_probs: (microbatch, length).
        raw_rewards, advantages: (microbatch, 1).
        weights: (microbatch, 1) or (microbatch, length) weight of each token, where they were worked out over the whole
            optimizer batch beforehand (:func:`grpo.learner.masking.response_weights`); then the microbatch may be of any
            size, and the number of accumulation steps and the normalisation do not matter.

    Returns:
        the scalar loss (detached) and the metadata of :func:`compute_policy_gradient_loss`.
    """
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    if weights is None:
        n_sequences = len(policy_log_probs) * gradient_accumulation_steps
        by_token = token_weights(response_mask, length_normalization, n_sequences, constant_normalizer)
    else:
        by_token = response_mask * weights
    loss = masked_normalize(per_token * by_token, response_mask)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metadata


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of one microbatch, summed over each response's tokens and averaged over responses.

    Args:
        policy_log_probs, response_mask: (microbatch, length).
        gradient_accumulation_steps: equal microbatches of an optimizer step.
        normalize_constant: divides each response's sum.
        weights: (microbatch,) weight of each response in place of that average, where microbatches differ in size.

    Returns:
        the scalar loss (detached) and ``mean_nll``, the mean over response tokens.
    """
    per_response = masked_normalize(-policy_log_probs, response_mask, dim=-1, constant_normalizer=normalize_constant)
    loss = per_response.mean() / gradient_accumulation_steps if weights is None else (per_response * weights).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {"mean_nll": masked_mean(-policy_log_probs.detach(), response_mask)}
