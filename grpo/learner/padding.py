"""Padding of prompts and responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_and_shift(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, Tensor]:
    """Concatenate each prompt and response, pad on the right, and shift into next-token inputs and labels.

    Returns:
        ``input_ids``, ``labels`` (both int64) and ``response_mask`` (bool, true where the label is a response token),
        each of shape (batch, longest prompt + response - 1).
    """
    rows = [list(p) + list(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows], dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (prompt, row) in enumerate(zip(prompt_ids, rows, strict=True)):
        mask[i, len(prompt) : len(row)] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}
