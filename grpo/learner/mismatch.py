"""Engine and learner hold the same weights and still give a token slightly different probabilities: how much, and a remedy."""

from __future__ import annotations

import torch
from torch import Tensor

NOTICEABLE = 0.1  # nats: a difference in log-probability that is counted


def mismatch_sums(learner_log_probs: Tensor, engine_log_probs: Tensor) -> dict[str, Tensor]:
    """Sums over tokens, so that those of several parts of a batch can be added; each a number in float64 on its device.

    Args:
        learner_log_probs: (tokens,) under the weights that sampled them.
        engine_log_probs: (tokens,) as the engine reported them for the distribution it drew from. Where ``top_p`` or
            ``min_tokens`` narrow that down, this too is part of the difference.

    Returns:
        ``mean``: sum of absolute differences; ``above``: tokens whose difference is above ``NOTICEABLE``; ``kl``: sum of
        log p_engine - log p_learner, whose mean is the sampled estimate of KL(engine || learner).
    """
    difference = engine_log_probs.double() - learner_log_probs.double()
    absolute = difference.abs()
    return {
        "mean": absolute.sum(),
        "above": (absolute > NOTICEABLE).sum().double(),
        "kl": difference.sum(),
    }


def importance_weights(learner_log_probs: Tensor, engine_log_probs: Tensor, cap: float) -> Tensor:
    """min(p_learner / p_engine, cap) of each token: truncated importance sampling, which corrects the gradient for the
    distribution that the tokens were really drawn from (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; Ionides 2008).

    Args:
        learner_log_probs, engine_log_probs: equal shapes, without gradient.
    """
    return torch.exp(learner_log_probs - engine_log_probs).clamp(max=cap)
