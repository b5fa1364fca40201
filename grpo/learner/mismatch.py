"""Mismatch of engine and learner: different log-probs of a token under the same weights, and their correction."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.learner.masking import masked_normalize

NOTICEABLE = 0.1  # difference of log-probs (nats) above which a token is counted


def mismatch(learner_log_probs: Tensor, engine_log_probs: Tensor) -> dict[str, Tensor]:
    """Measure the mismatch of each token.

    Args:
        learner_log_probs: under the weights that sampled the tokens.
        engine_log_probs: of the same shape, under the distribution that the engine drew from. ``top_p`` and ``min_tokens``
            restrict that distribution, which adds to the mismatch.

    Returns:
        float64, or bool: ``mismatch_mean``, the absolute difference; ``mismatch_above``, whether it is above ``NOTICEABLE``;
        ``mismatch_kl``, log p_engine - log p_learner, whose mean is the sampled estimate of KL(engine || learner).
    """
    difference = engine_log_probs.double() - learner_log_probs.double()
    absolute = difference.abs()
    return {"mismatch_mean": absolute, "mismatch_above": absolute > NOTICEABLE, "mismatch_kl": difference}


def importance_weights(
    learner_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, cap: float, mode: str
) -> tuple[Tensor, Tensor]:
    """Importance weights p_learner / p_engine of each token, or of whole responses, truncated at ``cap``.

    They correct the gradient for the distribution that the tokens were drawn from (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"; Ionides 2008).

    Args:
        learner_log_probs, engine_log_probs, mask: (batch, length), without gradient.
        mode: ``token_truncate``: a token's ratio; ``sequence_truncate``: the product of a response's ratios, for each of its
            tokens.

    Returns:
        weights, and whether each is at the cap, both (batch, length).
    """
    difference = learner_log_probs - engine_log_probs
    if mode == "sequence_truncate":
        difference = masked_normalize(difference, mask, dim=1)[:, None].expand_as(difference)
    ratio = torch.exp(difference)
    return ratio.clamp(max=cap), ratio >= cap
