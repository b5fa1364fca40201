"""Token-by-token decoding of a batch of prompts with several responses each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.models.packed_attention import NO_MASK
from grpo.models.prefix_attention import KeyValueCache, SharedPrefix

Prompts = Sequence[Sequence[int]]
PADDING = 0  # a token id that any model has


class SharedPrompts:
    """Decoding in which all responses share one copy of their prompt's keys and values.

    ``logits``: (rows, vocabulary) of the next token of each response; the responses to a prompt are side by side.

    Args:
        model: a model whose traits allow shared prompts.
        prompts: token ids.
        n: responses to each prompt.
        room: largest number of tokens of a response.
    """

    def __init__(self, model: Any, prompts: Prompts, n: int, room: int):
        self.model = model
        ids, real = pad_left(prompts, model.device)
        width, dtype = ids.shape[1], model.dtype
        cache = KeyValueCache(width)
        output = model(
            ids,
            attention_mask=real,
            position_ids=(real.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        mask = torch.zeros(len(prompts), 1, 1, width, device=ids.device, dtype=dtype)
        mask.masked_fill_(real[:, None, None, :] == 0, torch.finfo(dtype).min)
        self.prefix = SharedPrefix(cache.keys, cache.values, mask, n)
        self.cache = KeyValueCache(room)
        self.logits: Tensor = output.logits[:, -1].repeat_interleave(n, dim=0)
        self.positions = real.sum(-1).repeat_interleave(n, dim=0)  # of the next token

    def keep(self, rows: Tensor) -> None:
        self.positions = self.positions[rows]
        self.prefix.keep(rows)
        self.cache.keep(rows)

    def step(self, tokens: Tensor) -> None:
        """Append a token to each row (rows,)."""
        output = self.model(
            tokens[:, None],
            attention_mask=NO_MASK,
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            shared=self.prefix,
        )
        self.logits, self.positions = output.logits[:, -1], self.positions + 1


def pad_left(prompts: Prompts, device: Any) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left: token ids (prompts, longest prompt), and a mask of that shape, 0 at padding and 1 elsewhere.

    Padding is masked, so its token may be any; a tokenizer's padding token may be none of the model's.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PADDING] * (width - len(p)) + list(p) for p in prompts], device=device)
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
