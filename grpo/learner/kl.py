"""Estimates of KL(policy || reference) from tokens that the policy sampled; measured, never part of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def estimate_kl(policy_log_probs: Sequence[Tensor], reference_log_probs: Sequence[Tensor]) -> dict[str, float]:
    """Two estimates, each per token and per sequence, in nats.

    With r = log pi_ref(o_t) - log pi(o_t) for sampled tokens o_t, the sampled estimate is the mean of -r: unbiased, and
    negative by chance where the two are close. The low-variance one is the mean of exp(r) - r - 1: unbiased too, never
    negative (Schulman 2020, "Approximating KL divergence", k1 and k3; the second also in DeepSeekMath, arXiv 2402.03300,
    Eq. 4). Per sequence means the sum over a response's tokens, averaged over responses.

    Args:
        policy_log_probs, reference_log_probs: for each response (response length,), of the same tokens.

    Returns:
        ``per_token``, ``per_token_low_variance``, ``per_sequence``, ``per_sequence_low_variance``; 0 where no response has
        a token.
    """
    difference = torch.cat(list(policy_log_probs)).double() - torch.cat(list(reference_log_probs)).double()
    sampled, low_variance = difference.sum().item(), (torch.expm1(-difference) + difference).sum().item()
    tokens, sequences = max(1, len(difference)), len(policy_log_probs)
    return {
        "per_token": sampled / tokens,
        "per_token_low_variance": low_variance / tokens,
        "per_sequence": sampled / sequences,
        "per_sequence_low_variance": low_variance / sequences,
    }
