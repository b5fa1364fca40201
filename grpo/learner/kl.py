"""Estimators of KL(policy || reference) from tokens that the policy sampled: as metrics, and as a term of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.learner.masking import within_float32


def estimate_kl(policy_log_probs: Sequence[Tensor], reference_log_probs: Sequence[Tensor]) -> dict[str, float]:
    """Estimate the KL divergence (nats) per token and per sequence, each with two estimators.

    With r = log pi_ref(o_t) - log pi(o_t) for sampled tokens o_t, the sampled estimator is the mean of -r: unbiased, but
    possibly negative if the two policies are close. The low-variance estimator is the mean of exp(r) - r - 1: unbiased and
    never negative (Schulman 2020, "Approximating KL divergence", k1 and k3; the second also in DeepSeekMath,
    arXiv 2402.03300, Eq. 4). Per sequence is the sum over a response's tokens, averaged over responses.

    Args:
        policy_log_probs, reference_log_probs: for each response (response length,), of the same tokens.

    Returns:
        ``per_token``, ``per_token_low_variance``, ``per_sequence``, ``per_sequence_low_variance``; 0 without any tokens.
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


def kl_term(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL term of each sampled token: exp(r) - r - 1 with r = log pi_ref - log pi.

    Its expectation is KL(policy || reference) (k3; GRPO's, DeepSeekMath, arXiv 2402.03300, Eq. 4). The expectation of its
    gradient is the gradient of KL(reference || policy) (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
    estimation for RL", arXiv 2506.09477).

    Args:
        log_probs: of sampled tokens, with gradient.
        reference: log-probs of the same shape, without gradient.
    """
    difference = within_float32(reference - log_probs)
    return torch.expm1(difference) - difference
