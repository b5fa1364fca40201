"""Masked sums, and the weight of each response token in a loss."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_EXPONENT = 85.0  # float32 ends at exp(88.7); this leaves room for advantages and sums


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
    lengths: Tensor,
    length_normalization: str,
    n_sequences: int,
    microbatch_size: int,
    constant_normalizer: float | None = None,
) -> Tensor:
    """Weight of each token of a response, one number for each response.

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

    Returns:
        (responses,), float32.

    Raises:
        ValueError: an unknown normalization, a missing constant, or lengths of only a part of the batch.
    """
    lengths = lengths.float()
    if length_normalization == "masked_mean":
        divisor = lengths.clamp(min=1.0)
    elif length_normalization == "masked_normalize":
        if constant_normalizer is None:
            raise ValueError("masked_normalize needs constant_normalizer")
        divisor = torch.full_like(lengths, constant_normalizer)
    elif length_normalization == "microbatch_longest":
        longest = lengths.view(-1, microbatch_size).max(dim=1).values.clamp(min=1.0)
        divisor = longest.repeat_interleave(microbatch_size)
    elif length_normalization == "token_mean":
        if len(lengths) != n_sequences:
            raise ValueError(f"token_mean needs all {n_sequences} lengths of the optimizer batch, not {len(lengths)}")
        return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1.0)
    else:
        raise ValueError(f"unknown length normalization {length_normalization!r}")
    return 1.0 / divisor / n_sequences
