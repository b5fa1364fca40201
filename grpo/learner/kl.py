"""Estimates of KL(policy || reference) from tokens that the policy sampled: measured, and as a term of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def low_variance(log_probs: Tensor, reference: Tensor) -> Tensor:
    """exp(r) - r - 1 of each token, with r = log pi_ref - log pi (k3; GRPO's term, DeepSeekMath, arXiv 2402.03300, Eq. 4).

    Its mean is KL(policy || reference). The mean of its gradient is not that one's, but KL(reference || policy)'s (Tang and
    Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477).

    Args:
        log_probs: of sampled tokens, with gradient.
        reference: of the same shape, without.
    """
    difference = reference - log_probs
    return torch.expm1(difference) - difference


def naive(log_probs: Tensor, reference: Tensor) -> Tensor:
    """-r of each token (k1), with the gradient of r^2 / 2, which is -r times that of log pi: KL(policy || reference)'s.

    The gradient of -r itself is that of log pi, whose mean is 0: it would pull nowhere (arXiv 2506.09477). Arguments as of
    :func:`low_variance`.
    """
    difference = log_probs - reference
    half_square = difference.square() / 2
    return difference.detach() + (half_square - half_square.detach())


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # as KlEstimator in grpo/study/methods.py
    "low_variance": low_variance,
    "naive": naive,
}
