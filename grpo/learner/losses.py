"""The training objective: token losses and their weights, the KL term, and the mismatch of engine and learner.

A study adds its own loss by an import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError, own_errors
from grpo.common.imports import import_object, is_import_path, require_arguments

LARGEST_EXPONENT = 85.0  # float32 ends at exp(88.7); this leaves room for advantages and sums
MISMATCH_THRESHOLD = 0.1  # difference of log-probs (nats) between engine and learner above which a token is counted

# ------------------------------------------------------------------------------------------------- masked sums and weights


def within_float32(exponent: Tensor) -> Tensor:
    """Limit an exponent to LARGEST_EXPONENT, and keep its gradient.

    An infinite ratio would have the gradient inf x 0 = NaN where it is clipped or the advantage is 0.
    """
    return exponent - (exponent.detach() - LARGEST_EXPONENT).clamp(min=0.0)


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, constant_normalizer: float = 1.0) -> Tensor:
    """Sum the elements with mask 1 along ``dim`` (over all dimensions if None), and divide by a constant.

    With the longest possible response as the constant, this is the length normalization of Dr. GRPO (Liu et al. 2025,
    arXiv 2503.20783, Section 3).
    """
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return (kept.sum() if dim is None else kept.sum(dim=dim)) / constant_normalizer


def response_weights(
    lengths: Tensor, length_normalization: str, n_sequences: int, microbatch_size: int, constant_normalizer: float | None = None
) -> Tensor:
    """Weight of each token of a response: (responses,), float32.

    The weight depends on the response's length and on the whole optimizer batch, so the gradient does not depend on how the
    batch is cut into microbatches. ``microbatch_longest`` is by definition the exception: it depends on the microbatches, which
    are fixed here, before packing. A response without tokens still counts as a sequence.

    Args:
        lengths: (responses,) in tokens; ``token_mean`` needs those of the whole optimizer batch.
        length_normalization: ``masked_mean`` (divides by the response's length; GRPO, arXiv 2402.03300, Eq. 3),
            ``masked_normalize`` (divides by ``constant_normalizer``; Dr. GRPO, arXiv 2503.20783), ``microbatch_longest``
            (divides by the longest response of the microbatch), or ``token_mean`` (equal weight for all tokens of the optimizer
            batch; DAPO, arXiv 2503.14476, Section 3.3, which averages over a group's tokens).
        n_sequences: number of responses in the whole optimizer batch.
        microbatch_size: number of consecutive responses in a microbatch.
    """
    lengths = lengths.float()
    match length_normalization:
        case "masked_mean":
            divisor = lengths.clamp(min=1.0)
        case "masked_normalize" if constant_normalizer is not None:
            divisor = torch.full_like(lengths, constant_normalizer)
        case "microbatch_longest":
            divisor = lengths.view(-1, microbatch_size).amax(dim=1).clamp(min=1.0).repeat_interleave(microbatch_size)
        case "token_mean" if len(lengths) == n_sequences:
            return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1.0)
        case "masked_normalize":
            raise ValueError("masked_normalize needs constant_normalizer")
        case "token_mean":
            raise ValueError(f"token_mean needs all {n_sequences} lengths of the optimizer batch, not {len(lengths)}")
        case _:
            raise ValueError(f"unknown length normalization {length_normalization!r}")
    return 1.0 / divisor / n_sequences


# ---------------------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: the responses of one microbatch, which is a part of the optimizer batch.

    The last five are None in the handouts' functions, which see a single microbatch.
    """

    log_probs: Tensor  # (batch, length) log-probs of the response tokens under the trained policy, with gradient
    old_log_probs: Tensor  # (batch, length) under the policy that sampled the tokens
    advantages: Tensor  # (batch, 1)
    raw_rewards: Tensor  # (batch, 1)
    mask: Tensor  # (batch, length), true for response tokens. Elsewhere a loss is ignored, but must be finite
    cliprange: float  # how far the ratio may fall below 1
    cliprange_high: float | None = None  # how far it may rise above 1; None: cliprange
    engine_log_probs: Tensor | None = None  # (batch, length) as the engine reported them when it drew the tokens
    groups: Tensor | None = None  # (batch, 1), number of each response's group in the rollout batch
    batch_tokens: int | None = None  # number of response tokens in the whole optimizer batch
    batch_responses: int | None = None  # number of responses in the whole optimizer batch
    entropies: Tensor | None = None  # (batch, length), entropy of the policy (nats) at each token, without gradient

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


LOSSES: dict[str, Loss] = {  # as LOSS_TYPES in grpo/study/config.py, which must not import torch
    "no_baseline": no_baseline,
    "reinforce_with_baseline": reinforce_with_baseline,
    "grpo_clip": grpo_clip,
    "grpo_no_clip": grpo_no_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def find_loss(loss_type: str) -> Loss:
    """Find a loss by its name or import path; UserError if there is none."""
    if is_import_path(loss_type):
        loss: Loss = import_object(loss_type)
        return loss
    if loss_type not in LOSSES:
        raise UserError(f"loss_type: no loss is named {loss_type!r} (known: {', '.join(LOSSES)}).")
    return LOSSES[loss_type]


def bind_loss(loss_type: str, options: Mapping[str, Any]) -> tuple[Loss, tuple[str, ...]]:
    """Bind a loss to its options, and try it on two short responses.

    Returns the loss, and the names of its metrics other than ``clipped``. Raises UserError if there is no such loss, it has no
    such options, or it does not return what :data:`Loss` requires.
    """
    loss = find_loss(loss_type)
    takes = ", ".join([*inspect.signature(loss).parameters][1:]) or "no options"
    remedy = f"It takes {takes}."
    require_arguments(loss, f"loss_options: {loss_type}", remedy, None, **options)
    bound = own_errors(f"loss_type: {loss_type}")(partial(loss, **options))
    log_probs, of_response = torch.full((2, 3), -1.0, requires_grad=True), torch.tensor([[1.0], [-1.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = log_probs.detach()
    groups = torch.tensor([[0], [0]])
    match bound(LossInputs(log_probs, old, of_response, of_response, mask, 0.2, 0.2, old, groups, 4, 2, torch.ones(2, 3))):
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


# -------------------------------------------------------------------------------------------------------- KL term and mismatch


def estimate_kl(policy_log_probs: Sequence[Tensor], reference_log_probs: Sequence[Tensor]) -> dict[str, float]:
    """Estimate the KL divergence (nats) per token and per sequence, each with two estimators.

    With r = log pi_ref(o_t) - log pi(o_t) for sampled tokens o_t, the sampled estimator is the mean of -r: unbiased, but
    possibly negative if the two policies are close. The low-variance estimator is the mean of exp(r) - r - 1: unbiased and
    never negative (Schulman 2020, "Approximating KL divergence", k1 and k3; the second also in DeepSeekMath, arXiv 2402.03300,
    Eq. 4). Per sequence is the sum over a response's tokens, averaged over responses. ``policy_log_probs,
    reference_log_probs``: for each response (response length,), of the same tokens. Returns ``per_token`` and ``per_sequence``,
    and both with the ending ``_low_variance``; 0 without any tokens.
    """
    difference = torch.cat(list(policy_log_probs)).double() - torch.cat(list(reference_log_probs)).double()
    sums = {"": difference.sum().item(), "_low_variance": (torch.expm1(-difference) + difference).sum().item()}
    counts = {"per_token": max(1, len(difference)), "per_sequence": len(policy_log_probs)}
    return {unit + name: total / count for unit, count in counts.items() for name, total in sums.items()}


def kl_term(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL term of each sampled token: exp(r) - r - 1 with r = log pi_ref - log pi (k3); only ``log_probs`` has a gradient.

    Its expectation is KL(policy || reference) (GRPO's, DeepSeekMath, arXiv 2402.03300, Eq. 4). The expectation of its gradient
    is the gradient of KL(reference || policy) (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for
    RL", arXiv 2506.09477).
    """
    difference = within_float32(reference - log_probs)
    return torch.expm1(difference) - difference


def mismatch(learner_log_probs: Tensor, engine_log_probs: Tensor) -> dict[str, Tensor]:
    """Measure how far engine and learner differ in the log-probs of each token.

    Returns float64, or bool: ``mismatch_mean``, the absolute difference; ``mismatch_above``, whether it is above
    ``MISMATCH_THRESHOLD``; ``mismatch_kl``, log p_engine - log p_learner, whose mean is the sampled estimate of
    KL(engine || learner).

    Args:
        learner_log_probs: under the weights that sampled the tokens.
        engine_log_probs: under the distribution that the engine drew from. ``top_p`` and ``min_tokens`` restrict that
            distribution, which adds to the mismatch.
    """
    difference = engine_log_probs.double() - learner_log_probs.double()
    absolute = difference.abs()
    return {"mismatch_mean": absolute, "mismatch_above": absolute > MISMATCH_THRESHOLD, "mismatch_kl": difference}


def importance_weights(
    learner_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, cap: float, mode: str
) -> tuple[Tensor, Tensor]:
    """Importance weights p_learner / p_engine of each token, or of whole responses, truncated at ``cap``.

    They correct the gradient for the distribution that the tokens were drawn from (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"; Ionides 2008). Returns weights, and whether each is at the cap, both
    (batch, length).

    Args:
        learner_log_probs, engine_log_probs, mask: (batch, length), without gradient.
        mode: ``token_truncate``: a token's ratio; ``sequence_truncate``: the product of a response's ratios.
    """
    difference = learner_log_probs - engine_log_probs
    if mode == "sequence_truncate":
        difference = masked_normalize(difference, mask, dim=1)[:, None].expand_as(difference)
    ratio = torch.exp(difference)
    return ratio.clamp(max=cap), ratio >= cap
