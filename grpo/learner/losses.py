"""Losses of a policy gradient, token by token; a study adds its own by an import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError
from grpo.common.imports import import_object, is_import_path
from grpo.learner.masking import masked_normalize


@dataclass(frozen=True)
class LossInputs:
    """What the loss of some responses is computed from: those of a microbatch, which are a part of the optimizer batch.

    Attributes:
        log_probs: (batch, length) of the response tokens under the policy that is trained, with gradient.
        old_log_probs: (batch, length) under the policy that sampled them.
        advantages, raw_rewards: (batch, 1), one for each response.
        mask: (batch, length), true for response tokens. What a loss is elsewhere does not count, but must be finite.
        cliprange, cliprange_high: the configuration's: how far a ratio may fall below and rise above 1; without the second as
            far as it may fall.
        engine_log_probs: (batch, length) as the engine reported them when it drew the tokens.
        groups: (batch, 1), the number of each response's group in the rollout batch.
        batch_tokens, batch_responses: response tokens and responses of the whole optimizer batch.

    The handouts' functions know no more than one microbatch: there the last four are None.
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

    @property
    def lengths(self) -> Tensor:
        """Response tokens, (batch, 1)."""
        return self.mask.sum(dim=1, keepdim=True)

    @property
    def ratio(self) -> Tensor:
        """rho = pi / pi_old of each token, (batch, length)."""
        return torch.exp(self.log_probs - self.old_log_probs)

    @property
    def sequence_ratio(self) -> Tensor:
        """s = (pi / pi_old of the whole response)^(1 / its length), (batch, 1) (GSPO, arXiv 2507.18071, Eq. 7)."""
        log_ratio = masked_normalize(self.log_probs - self.old_log_probs, self.mask, dim=1)[:, None]
        return torch.exp(log_ratio / self.lengths.clamp(min=1))

    @property
    def lower(self) -> float:
        """1 - cliprange."""
        return 1.0 - self.cliprange

    @property
    def upper(self) -> float:
        """1 + cliprange_high."""
        return 1.0 + (self.cliprange if self.cliprange_high is None else self.cliprange_high)


Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(LossInputs, **loss_options) -> each token's loss, (batch, length), and what is measured beside it, each (batch, length) and
averaged over response tokens into a column of history.csv; that of ``clipped`` is called ``clip_fraction``."""


def no_baseline(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE on raw rewards: -r log pi(o_t) (Williams 1992)."""
    return -inputs.raw_rewards * inputs.log_probs, {}


def reinforce_with_baseline(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE on advantages: -A log pi(o_t)."""
    return -inputs.advantages * inputs.log_probs, {}


def grpo_no_clip(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-rho A."""
    return -inputs.ratio * inputs.advantages, {}


def grpo_clip(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(rho A, clip(rho, lower, upper) A) (PPO, arXiv 1707.06347, Eq. 7; with two ranges DAPO, arXiv 2503.14476, Eq. 10).

    ``clipped``: the clipped term was the smaller one.
    """
    return _clipped(inputs.ratio, inputs)


def gspo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, lower, upper) A) with a response's one ratio s for all its tokens (GSPO, arXiv 2507.18071, Eq. 5).

    With ``masked_mean`` it is the paper's objective. ``clipped``: as of ``grpo_clip``.
    """
    per_response, metrics = _clipped(inputs.sequence_ratio, inputs)
    shape = inputs.log_probs.shape
    return per_response.expand(shape), {name: value.expand(shape) for name, value in metrics.items()}


def cispo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(min(rho, upper)) A log pi(o_t), where sg passes no gradient: every token keeps one (CISPO, arXiv 2506.13585,
    Section 3.1).

    As there, weights have no lower bound. ``clipped``: the ratio was above.
    """
    ratio = inputs.ratio.detach()
    return -ratio.clamp(max=inputs.upper) * inputs.advantages * inputs.log_probs, {"clipped": ratio > inputs.upper}


def _clipped(ratio: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective of a ratio, (batch, length) or (batch, 1)."""
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
    """The loss of that name, or what an import path names.

    Raises:
        UserError: there is none.
    """
    if is_import_path(loss_type):
        loss: Loss = import_object(loss_type)
        return loss
    if loss_type not in LOSSES:
        raise UserError(f"loss_type: no loss is named {loss_type!r} (known: {', '.join(LOSSES)}).")
    return LOSSES[loss_type]


def bind_loss(loss_type: str, options: Mapping[str, Any]) -> tuple[Loss, tuple[str, ...]]:
    """A loss with its options, tried out on two short responses, and the names of what it measures beside ``clipped``.

    Raises:
        UserError: there is no such loss, it has no such options, or it does not give what :data:`Loss` says.
    """
    loss = find_loss(loss_type)
    try:
        inspect.signature(loss).bind(None, **options)
    except TypeError as error:
        raise UserError(f"loss_options: {loss_type}: {error}. Give it the options that it takes, and no others.") from None
    bound = partial(loss, **options)
    log_probs, of_response = torch.full((2, 3), -1.0, requires_grad=True), torch.tensor([[1.0], [-1.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = log_probs.detach()
    trial = LossInputs(log_probs, old, of_response, of_response, mask, 0.2, 0.2, old, torch.tensor([[0], [0]]), 4, 2)
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
    """The loss of supervised fine-tuning: the weighted sum over responses of the sum over their tokens.

    Args:
        log_probs, mask: (batch, length).
        weights: (batch,), of each response.
        normalize_constant: divides each response's sum.
    """
    per_response = masked_normalize(-log_probs, mask, dim=-1, constant_normalizer=normalize_constant)
    return (per_response * weights).sum()
