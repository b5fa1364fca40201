"""Sums and means over response tokens, and how much each token counts in a loss."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, constant_normalizer: float = 1.0) -> Tensor:
    """Sum the elements with mask 1 along ``dim`` (all of them if None) and divide by a constant.

    With the constant set to the longest possible response this is the length normalisation of Dr. GRPO
    (Liu et al. 2025, arXiv 2503.20783, Section 3).
    """
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return (kept.sum() if dim is None else kept.sum(dim=dim)) / constant_normalizer


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements with mask 1 along ``dim`` (all of them if None); NaN where a slice has none, as ``tensor.mean``."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_normalize(tensor, mask, dim) / count.to(tensor.dtype)


def token_weights(
    response_mask: Tensor, length_normalization: str, n_sequences: int, constant_normalizer: float | None = None
) -> Tensor:
    """Weight of each token, such that a batch's loss is the weighted sum of its per-token losses.

    The weights of one row depend on its own length and on the size of the whole optimizer batch, so a gradient summed
    over microbatches does not depend on how they were cut. ``microbatch_longest`` is by its definition the exception.
    A response without tokens gets weight 0 and still counts as a sequence.

    Args:
        response_mask: (microbatch, length), 1 for response tokens.
        length_normalization: ``masked_mean`` (each response's own length; GRPO, arXiv 2402.03300, Eq. 3),
            ``masked_normalize`` (``constant_normalizer``; Dr. GRPO, arXiv 2503.20783) or ``microbatch_longest``.
        n_sequences: responses in the whole optimizer batch.

    Returns:
        (microbatch, length), float32.

    Raises:
        ValueError: an unknown normalisation, or a missing constant.
    """
    mask = response_mask.float()
    lengths = mask.sum(dim=1, keepdim=True)
    if length_normalization == "masked_mean":
        per_row = lengths.clamp(min=1.0)
    elif length_normalization == "masked_normalize":
        if constant_normalizer is None:
            raise ValueError("masked_normalize needs constant_normalizer")
        per_row = torch.full_like(lengths, constant_normalizer)
    elif length_normalization == "microbatch_longest":
        per_row = lengths.max().clamp(min=1.0).expand_as(lengths)
    else:
        raise ValueError(f"unknown length normalization {length_normalization!r}")
    return mask / per_row / n_sequences
