"""Your own loss: DAPO's asymmetric clip, "Clip-Higher" (Yu et al. 2025, arXiv 2503.14476, Section 3.1, Eq. 10).

A symmetric clip limits unlikely tokens most: a probability of 0.01 may rise only to 0.012, while one of 0.9 is hardly limited.
DAPO lets the ratio rise further than it may fall (eps_low = 0.2, eps_high = 0.28), so that unlikely tokens can gain and entropy
does not collapse. This file shows how to write a loss; the setting `cliprange_high: 0.28` does the same, and `objective: dapo`
also averages over all tokens of a batch.

To use it, put this file beside the study's file, and add to the study:

    grpo:
      loss_type: "clip_higher:clip_higher"
      cliprange: 0.2                    # eps_low
      loss_options: {clip_high: 0.28}   # eps_high

or in one arm, to compare it with PPO's clip:

    experiments:
      grpo_off_policy_clip_ablation:
        arms:
          grpo_clip: {off_policy_rank: 1, loss_type: grpo_clip}
          clip_higher: {off_policy_rank: 1, loss_type: "clip_higher:clip_higher", loss_options: {clip_high: 0.28}}

It has an effect only off-policy (several updates per rollout batch, or rollouts of an older policy), as on-policy every ratio
is 1. In history.csv, `clip_fraction` is the share of clipped tokens and `clipped_above` the share clipped at the upper bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.learner.losses import LossInputs


def clip_higher(inputs: LossInputs, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -min(rho A, clip(rho, 1 - cliprange, 1 + clip_high) A) for each token."""
    ratio = inputs.ratio
    unclipped = ratio * inputs.advantages
    clipped = torch.clamp(ratio, 1.0 - inputs.cliprange, 1.0 + clip_high) * inputs.advantages
    bound = clipped < unclipped
    return -torch.minimum(unclipped, clipped), {"clipped": bound, "clipped_above": bound & (ratio > 1.0)}
