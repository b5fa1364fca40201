"""Mismatch of engine and learner: different log-probs of a token under the same weights, and their correction."""

from __future__ import annotations

import torch
from torch import Tensor

NOTICEABLE = 0.1  # difference of log-probs (nats) above which a token is counted


def mismatch_sums(learner_log_probs: Tensor, engine_log_probs: Tensor) -> dict[str, Tensor]:
    """Sum the mismatch over tokens; sums of several microbatches can be added.

    Args:
        learner_log_probs: (tokens,) under the weights that sampled the tokens.
        engine_log_probs: (tokens,) under the distribution that the engine drew from. ``top_p`` and ``min_tokens`` restrict that
            distribution, which adds to the mismatch.

    Returns:
        float64 scalars on the tokens' device: ``mean``, the sum of absolute differences; ``above``, the number of tokens whose
        difference is above ``NOTICEABLE``; ``kl``, the sum of log p_engine - log p_learner, whose mean is the sampled estimate
        of KL(engine || learner).
    """
    difference = engine_log_probs.double() - learner_log_probs.double()
    absolute = difference.abs()
    return {
        "mean": absolute.sum(),
        "above": (absolute > NOTICEABLE).sum().double(),
        "kl": difference.sum(),
    }


def importance_weights(learner_log_probs: Tensor, engine_log_probs: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(p_learner / p_engine, cap) of each token.

    They correct the gradient for the distribution that the tokens were drawn from (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"; Ionides 2008).

    Args:
        learner_log_probs, engine_log_probs: equal shapes, without gradient.
    """
    return torch.exp(learner_log_probs - engine_log_probs).clamp(max=cap)
