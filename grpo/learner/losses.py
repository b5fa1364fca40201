"""Per-token policy gradient losses; a study adds its own by an import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError, own_errors
from grpo.common.imports import import_object, is_import_path
from grpo.learner.masking import masked_normalize, within_float32


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: the responses of one microbatch, which is a part of the optimizer batch.

    Attributes:
        log_probs: (batch, length) log-probs of the response tokens under the trained policy, with gradient.
        old_log_probs: (batch, length) under the policy that sampled the tokens.
        advantages, raw_rewards: (batch, 1), one for each response.
        mask: (batch, length), true for response tokens. Elsewhere a loss is ignored, but must be finite.
        cliprange, cliprange_high: how far the ratio may fall below 1 and rise above 1; without the second, both are cliprange.
        engine_log_probs: (batch, length) as the engine reported them when it drew the tokens.
        groups: (batch, 1), number of each response's group in the rollout batch.
        batch_tokens, batch_responses: number of response tokens and of responses in the whole optimizer batch.
        entropies: (batch, length), entropy of the policy (nats) at each token, without gradient.

    The last five are None in the handouts' functions, which see a single microbatch.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    raw_rewards: Tensor
    mask: Tensor
    cliprange: float
    cliprange_high: float | None = None
    engine_log_probs: Tensor | None = None
    groups: Tensor | None = None
    batch_tokens: int | None = None
    batch_responses: int | None = None
    entropies: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Number of response tokens, (batch, 1)."""
        return self.mask.sum(dim=1, keepdim=True)

    @property
    def ratio(self) -> Tensor:
        """Ratio rho = pi / pi_old of each token, (batch, length)."""
        return torch.exp(within_float32(self.log_probs - self.old_log_probs))

    @property
    def sequence_ratio(self) -> Tensor:
        """Ratio s = (pi / pi_old of the whole response)^(1 / length), (batch, 1) (GSPO, arXiv 2507.18071, Eq. 7)."""
        log_ratio = masked_normalize(self.log_probs - self.old_log_probs, self.mask, dim=1)[:, None]
        return torch.exp(within_float32(log_ratio / self.lengths.clamp(min=1)))

    @property
    def lower(self) -> float:
        """Lower end of the clip range, 1 - cliprange."""
        return 1.0 - self.cliprange

    @property
    def upper(self) -> float:
        """Upper end of the clip range, 1 + cliprange_high."""
        return 1.0 + (self.cliprange if self.cliprange_high is None else self.cliprange_high)


Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(LossInputs, **loss_options) -> the loss of each token, (batch, length), and further metrics, each (batch, length).

The mean of a metric over response tokens becomes a column of history.csv under its name; ``clipped`` becomes
``clip_fraction``."""


def no_baseline(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE on raw rewards: -r log pi(o_t) (Williams 1992)."""
    return -inputs.raw_rewards * inputs.log_probs, {}


def reinforce_with_baseline(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE on advantages: -A log pi(o_t)."""
    return -inputs.advantages * inputs.log_probs, {}


def grpo_no_clip(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped objective: -rho A."""
    return -inputs.ratio * inputs.advantages, {}


def grpo_clip(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective: -min(rho A, clip(rho, lower, upper) A).

    PPO, arXiv 1707.06347, Eq. 7; with two ranges DAPO, arXiv 2503.14476, Eq. 10.

    ``clipped``: the clipped term is the smaller one.
    """
    return _clipped(inputs.ratio, inputs)


def gspo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective with one ratio s for all tokens of a response: -min(s A, clip(s, lower, upper) A).

    GSPO, arXiv 2507.18071, Eq. 5; with ``masked_mean`` it is the paper's objective. ``clipped``: as in ``grpo_clip``.
    """
    per_response, metrics = _clipped(inputs.sequence_ratio, inputs)
    shape = inputs.log_probs.shape
    return per_response.expand(shape), {name: value.expand(shape) for name, value in metrics.items()}


def cispo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with clipped weights: -sg(min(rho, upper)) A log pi(o_t), where sg stops the gradient.

    CISPO, arXiv 2506.13585, Section 3.1. Every token keeps a gradient, and weights have no lower bound. ``clipped``: the ratio
    is above ``upper``.
    """
    ratio = inputs.ratio.detach()
    return -ratio.clamp(max=inputs.upper) * inputs.advantages * inputs.log_probs, {"clipped": ratio > inputs.upper}


def _clipped(ratio: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective for a ratio (batch, length) or (batch, 1)."""
    unclipped = ratio * inputs.advantages
    clipped = torch.clamp(ratio, inputs.lower, inputs.upper) * inputs.advantages
    return -torch.minimum(unclipped, clipped), {"clipped": clipped < unclipped}


LOSSES: dict[str, Loss] = {  # as LOSS_TYPES in grpo/study/methods.py, which must not import torch
    "no_baseline": no_baseline,
    "reinforce_with_baseline": reinforce_with_baseline,
    "grpo_clip": grpo_clip,
    "grpo_no_clip": grpo_no_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def find_loss(loss_type: str) -> Loss:
    """Find a loss by its name or import path.

    Raises:
        UserError: there is no such loss.
    """
    if is_import_path(loss_type):
        loss: Loss = import_object(loss_type)
        return loss
    if loss_type not in LOSSES:
        raise UserError(f"loss_type: no loss is named {loss_type!r} (known: {', '.join(LOSSES)}).")
    return LOSSES[loss_type]


def bind_loss(loss_type: str, options: Mapping[str, Any]) -> tuple[Loss, tuple[str, ...]]:
    """Bind a loss to its options, and try it on two short responses.

    Returns:
        the loss, and the names of its metrics other than ``clipped``.

    Raises:
        UserError: there is no such loss, it has no such options, or it does not return what :data:`Loss` requires.
    """
    loss = find_loss(loss_type)
    try:
        inspect.signature(loss).bind(None, **options)
    except TypeError as error:
        raise UserError(f"loss_options: {loss_type}: {error}. Give it the options that it takes, and no others.") from None
    bound = own_errors(f"loss_type: {loss_type}")(partial(loss, **options))
    log_probs, of_response = torch.full((2, 3), -1.0, requires_grad=True), torch.tensor([[1.0], [-1.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = log_probs.detach()
    groups = torch.tensor([[0], [0]])
    trial = LossInputs(log_probs, old, of_response, of_response, mask, 0.2, 0.2, old, groups, 4, 2, torch.ones(2, 3))
    returned = bound(trial)
    match returned:
        case (Tensor(shape=(2, 3), requires_grad=True), dict() as metrics) if all(
            isinstance(value, Tensor) and value.shape == (2, 3) for value in metrics.values()
        ):
            return bound, tuple(name for name in metrics if name != "clipped")
    raise UserError(
        f"loss_type: {loss_type} must return each token's loss, a tensor of the shape of `log_probs` with a gradient, and a "
        "dictionary of further tensors of this shape, which may be empty."
    )


def negative_log_likelihood(log_probs: Tensor, mask: Tensor, weights: Tensor, normalize_constant: float = 1.0) -> Tensor:
    """Loss of supervised fine-tuning: sum over tokens, then weighted sum over responses.

    Args:
        log_probs, mask: (batch, length).
        weights: (batch,), one for each response.
        normalize_constant: divides each response's sum.
    """
    per_response = masked_normalize(-log_probs, mask, dim=-1, constant_normalizer=normalize_constant)
    return (per_response * weights).sum()
