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
    learner_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    cap: float,
    floor: float | None,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """Importance weights p_learner / p_engine of each token, or of whole responses, within bounds.

    They correct the gradient for the distribution that the tokens were drawn from (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"; Ionides 2008).

    Args:
        learner_log_probs, engine_log_probs, mask: (batch, length), without gradient.
        cap, floor: bounds of a weight; without ``floor`` there is no lower one.
        mode: ``token_...``: a token's ratio; ``sequence_...``: the product of a response's ratios, for each of its tokens.
            ``..._truncate``: a weight beyond a bound becomes the bound; ``..._mask``: it becomes 0.

    Returns:
        weights, and whether each is at a bound or beyond, both (batch, length).
    """
    difference = learner_log_probs - engine_log_probs
    if mode.startswith("sequence"):
        difference = masked_normalize(difference, mask, dim=1)[:, None].expand_as(difference)
    ratio, low = torch.exp(difference), -1.0 if floor is None else floor
    kept = torch.where((ratio < low) | (ratio > cap), 0.0, ratio) if mode.endswith("mask") else ratio.clamp(low, cap)
    return kept, (ratio >= cap) | (ratio <= low)
