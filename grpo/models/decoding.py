"""Token-by-token decoding of a batch of prompts with several responses each, which share the keys and values of their prompt.

One product multiplies the queries of all rows of a group with their prompt's keys, so the prompt is read from memory once per
group. A second product multiplies each row's query with its own keys. One softmax goes over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.models.packing import NO_MASK


class KeyValueCache:
    """Cache of keys and values in preallocated buffers, so that a step neither copies nor grows them.

    It has the cache methods that the project's own model and models of transformers call. ``room``: largest number of tokens in
    a row.
    """

    def __init__(self, room: int):
        self.room = room
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._lengths: list[int] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values (rows, key heads, new tokens, size), and return views of all so far."""
        if layer == len(self._lengths):
            room = (*keys.shape[:2], self.room, keys.shape[3])
            self.keys.append(keys.new_empty(room))
            self.values.append(values.new_empty(room))
            self._lengths.append(0)
        old, new = self._lengths[layer], self._lengths[layer] + keys.shape[2]
        self.keys[layer][:, :, old:new] = keys
        self.values[layer][:, :, old:new] = values
        self._lengths[layer] = new
        return self.keys[layer][:, :, :new], self.values[layer][:, :, :new]

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = [k[rows] for k in self.keys], [v[rows] for v in self.values]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens in the cache."""
        return self._lengths[layer_idx] if self._lengths else 0

    get_query_offset = get_seq_length  # the position in the cache of the next token

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that ``query_length`` new tokens may attend to, and the position of the first key."""
        return self.get_seq_length(layer_idx) + query_length, 0


class SharedPrefix:
    """Keys and values of prompts, each shared by several rows of a batch.

    ``prompt_of``: (rows,), index of each row's prompt.

    Args:
        keys, values: for each layer (prompts, key heads, width, size).
        mask: (prompts, 1, 1, width), added to the scores to hide the padding.
        rows: number of rows of each prompt at the start.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], mask: Tensor, rows: int):
        self.keys, self.values, self.mask = keys, values, mask
        self.prompt_of = torch.arange(len(mask), device=mask.device).repeat_interleave(rows)
        self._place_rows()

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the rows, and the prompts of these. ``rows``: indices, in increasing order."""
        used, self.prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        if len(used) < len(self.mask):
            self.keys, self.values = [k[used] for k in self.keys], [v[used] for v in self.values]
            self.mask = self.mask[used]
        self._place_rows()

    def _place_rows(self) -> None:
        """Assign each row its place in a table (prompts, most rows of any prompt)."""
        counts = torch.bincount(self.prompt_of, minlength=len(self.mask))
        first = counts.cumsum(0) - counts
        self._most = int(counts.max())
        within = torch.arange(len(self.prompt_of), device=counts.device) - first[self.prompt_of]
        self._place = self.prompt_of * self._most + within

    def _by_prompt(self, x: Tensor) -> Tensor:
        """(rows, key heads, shared, n) -> (prompts, key heads, most * shared, n)."""
        prompts, (_, heads, shared, n) = len(self.mask), x.shape
        if len(x) < prompts * self._most:
            x = x.new_zeros(prompts * self._most, heads, shared, n).index_copy_(0, self._place, x)
        return x.view(prompts, self._most, heads, shared, n).transpose(1, 2).reshape(prompts, heads, -1, n)

    def _by_row(self, x: Tensor) -> Tensor:
        """Reverse :meth:`_by_prompt`."""
        prompts, heads, _, n = x.shape
        x = x.view(prompts, heads, self._most, -1, n).transpose(1, 2).reshape(prompts * self._most, heads, -1, n)
        return x if len(x) == len(self._place) else x[self._place]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of one new token in each row.

        Returns (rows, heads, 1, size). ``query``: (rows, heads, 1, size). ``key``, ``value``: (rows, key heads, tokens after
        the prompt, size).
        """
        rows, heads, _, size = query.shape
        # Grouped-query attention: the query heads that share a key head stand side by side.
        asking = query.reshape(rows, key.shape[1], heads // key.shape[1], size) * scale
        to_prompt = self._by_prompt(asking) @ self.keys[layer].transpose(-1, -2) + self.mask
        scores = torch.cat([self._by_row(to_prompt), asking @ key.transpose(-1, -2)], dim=-1)
        share = torch.softmax(scores.float(), dim=-1).to(value.dtype)
        width = self.mask.shape[-1]
        out = self._by_row(self._by_prompt(share[..., :width]) @ self.values[layer]) + share[..., width:] @ value
        return out.reshape(rows, heads, 1, size)


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
