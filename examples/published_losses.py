"""Two published losses as losses of your own: SAPO's soft gate, and two-sided clipping.

To use one, put this file beside the study's file, and add one of these lines to the study:

    grpo: {loss_type: "published_losses:sapo"}
    grpo: {loss_type: "published_losses:two_sided_clip", loss_options: {delta: 4.0}}

Both have an effect only off-policy, as on-policy every ratio is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.learner.losses import LossInputs


def sapo(
    inputs: LossInputs, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate in the place of the clip: -4 / tau sigmoid(tau (rho - 1)) A, whose gradient at rho = 1 is that of -rho A.

    SAPO, arXiv 2511.20347; tau depends on the sign of A, and the larger one of negative advantages closes the gate sooner.
    """
    temperature = torch.where(inputs.advantages > 0.0, temperature_positive, temperature_negative)
    return -4.0 / temperature * torch.sigmoid(temperature * (inputs.ratio - 1.0)) * inputs.advantages, {}


def two_sided_clip(inputs: LossInputs, delta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip with a bound at negative advantages too: -min(min(rho, delta) A, clip(rho, lower, upper) A).

    INTELLECT-2, arXiv 2505.07291; dual clip, arXiv 1912.09729. With GSPO's ratio: put `inputs.sequence_ratio` in the place of
    `inputs.ratio`, and expand both results to the shape of `inputs.log_probs`.
    """
    unclipped = inputs.ratio.clamp(max=delta) * inputs.advantages
    clipped = torch.clamp(inputs.ratio, inputs.lower, inputs.upper) * inputs.advantages
    return -torch.minimum(unclipped, clipped), {"clipped": clipped < unclipped}
