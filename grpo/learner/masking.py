"""Sums over response tokens, and how much each token counts in a loss."""

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


def response_weights(
    lengths: Tensor,
    length_normalization: str,
    n_sequences: int,
    microbatch_size: int,
    constant_normalizer: float | None = None,
) -> Tensor:
    """Weight of each token of a response, for all responses.

    A response's weight depends on its own length and on the size of the whole optimizer batch, so a gradient summed over
    parts of the batch does not depend on how it was cut. ``microbatch_longest`` is by its definition the exception: it
    depends on which responses form a microbatch, which is settled here, before anything is packed.
    A response without tokens still counts as a sequence.

    Args:
        lengths: (responses,) in tokens; for ``token_mean`` those of the whole optimizer batch.
        length_normalization: ``masked_mean`` (each response's own length; GRPO, arXiv 2402.03300, Eq. 3),
            ``masked_normalize`` (``constant_normalizer``; Dr. GRPO, arXiv 2503.20783), ``microbatch_longest``, or
            ``token_mean`` (all tokens of the optimizer batch weigh alike; DAPO, arXiv 2503.14476, Section 3.3, whose mean is
            over a group's tokens).
        n_sequences: responses in the whole optimizer batch.
        microbatch_size: consecutive responses that form a microbatch.

    Returns:
        (responses,), float32.

    Raises:
        ValueError: an unknown normalisation, a missing constant, or lengths of a part of the batch only.
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
