"""Token-by-token decoding of a batch of prompts with several responses each."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.models.packed_attention import NO_MASK
from grpo.models.prefix_attention import KeyValueCache, SharedPrefix

Prompts = Sequence[Sequence[int]]
PADDING = 0  # a token id that any model has


@dataclass(frozen=True)
class Texts:
    """Decoded texts with their keys and values, so that texts which go on from them need not be computed again.

    Attributes:
        ids: of each text the token ids, the prompt's included, whose keys and values are known.
        prefix: keys and values of the prompts; its row i belongs to text i.
        own: the keys, then the values, of each text's tokens after the prompt (2 * layers, key heads, tokens or more, size), if
            it has some.
    """

    ids: list[list[int]]
    prefix: SharedPrefix
    own: dict[int, Tensor]

    def followed_by(self, texts: Prompts) -> list[int]:
        """For each of ``texts``, in the order of these, the one that it goes on from; empty if one goes on from none."""
        places = iter(range(len(self.ids)))
        found = [next((i for i in places if list(text[: len(self.ids[i])]) == self.ids[i]), None) for text in texts]
        return [] if None in found else found  # type: ignore[return-value]


class SharedPrompts:
    """Decoding in which all responses share one copy of their prompt's keys and values.

    Args:
        model: a model whose traits allow shared prompts.
        prompts: token ids.
        n: responses to each prompt.
        room: largest number of tokens of a response.

    Attributes:
        logits: (rows, vocabulary) of the next token of each response; the responses to a prompt are side by side.
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
        self._begin([0] * len(self.positions))

    def _begin(self, padding: Sequence[int]) -> None:
        """Take note of what :meth:`texts` needs; ``padding`` is each row's in the cache, on the left."""
        self._whole, self._padding, self._rows = copy(self.prefix), padding, list(range(len(padding)))
        self._own: dict[int, Tensor] = {}

    def keep(self, rows: Tensor, ended: Sequence[int] = ()) -> None:
        """Keep only some of the rows, and a copy of the keys and values of others for :meth:`texts`."""
        if ended:
            self._copy(ended)
        self._rows = [self._rows[row] for row in rows.tolist()]
        self.positions = self.positions[rows]
        self.prefix.keep(rows)
        self.cache.keep(rows)

    def _copy(self, rows: Sequence[int]) -> None:
        if length := self.cache.get_seq_length():
            chosen = torch.tensor(rows, device=self.positions.device)
            copied = torch.stack([x[chosen, :, :length] for x in (*self.cache.keys, *self.cache.values)], dim=1)
            for row, own in zip((self._rows[row] for row in rows), copied, strict=True):
                self._own[row] = own[:, :, self._padding[row] :]

    def texts(self, ids: list[list[int]]) -> Texts:
        """The decoded texts; of rows that were not kept, those that were copied.

        Args:
            ids: of each row at the start the token ids, the prompt's included, whose keys and values were computed.
        """
        self._copy(range(len(self._rows)))
        return Texts(ids, self._whole, self._own)

    def step(self, tokens: Tensor) -> None:
        """Append a token to each row (rows,)."""
        self._forward(tokens[:, None], self.positions[:, None])

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        output = self.model(
            ids,
            attention_mask=NO_MASK,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            shared=self.prefix,
        )
        self.logits, self.positions = output.logits[:, -1], positions[:, -1] + 1


class LongerTexts(SharedPrompts):
    """Decoding of texts that go on from decoded ones; only the tokens that follow these are computed.

    Args:
        places: the decoded text of ``before`` that each text goes on from (:meth:`Texts.followed_by`).
        texts: token ids, the prompts' included; each has more than the text before.
        room: largest number of further tokens of a text.
    """

    def __init__(self, model: Any, before: Texts, places: Sequence[int], texts: Prompts, room: int):
        self.model, device = model, model.device
        self.prefix = copy(before.prefix)
        self.prefix.keep(torch.tensor(places, device=device))
        prompts = (self.prefix.mask[:, 0, 0] == 0).sum(-1)[self.prefix.prompt_of]
        starts = prompts.tolist()
        ids, real = pad_left([text[start:] for text, start in zip(texts, starts, strict=True)], device)
        rows, width = ids.shape
        padding = width - real.sum(-1)
        new = max(len(text) - len(before.ids[place]) for text, place in zip(texts, places, strict=True))
        layers, (_, heads, _, size) = len(self.prefix.keys), self.prefix.keys[0].shape
        past = self.prefix.keys[0].new_empty(2 * layers, rows, heads, width + room, size)
        for row, (place, empty) in enumerate(zip(places, padding.tolist(), strict=True)):
            past[:, row, :, :empty] = 0.0  # it is masked, but must be finite
            if known := len(before.ids[place]) - starts[row]:
                past[:, row, :, empty : empty + known] = before.own[place][:, :, :known]
        self.cache = KeyValueCache(width + room, past[:layers].unbind(), past[layers:].unbind(), width - new)
        index = torch.arange(width + room, device=device)
        padded, later = index < padding[:, None, None, None], index > index[width - new : width, None]
        mask = torch.zeros(rows, 1, new, width + room, device=device, dtype=model.dtype)
        self.prefix.own_mask = mask.masked_fill(padded | later, torch.finfo(model.dtype).min)
        positions = (real.cumsum(-1) - 1).clamp(min=0) + prompts[:, None]
        self._forward(ids[:, width - new :], positions[:, width - new :])
        mask = mask[:, :, :1].masked_fill(padded, torch.finfo(model.dtype).min)
        self.prefix.own_mask = mask if padding.any() else None
        self._begin(padding.tolist())


def pad_left(prompts: Prompts, device: Any) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left: token ids (prompts, longest prompt), and a mask of that shape, 0 at padding and 1 elsewhere.

    Padding is masked, so its token may be any; a tokenizer's padding token may be none of the model's.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PADDING] * (width - len(p)) + list(p) for p in prompts], device=device)
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
