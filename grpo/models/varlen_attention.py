"""Attention in packed rows on a GPU in half precision, by flash attention over pieces of different lengths.

Each layer makes two calls: causal attention of all prompts and responses to themselves, and attention of responses to their
prompts. They are merged by their log-sum-exp with exact gradients, as in :mod:`grpo.models.packed_attention`, which does the
same on a CPU piece by piece. Nothing is compiled, and grouped queries need no copies of their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo.models.to_device import send

# torch.nn.attention.varlen calls these too, but its backward pass accepts no merged log-sum-exp.
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Pieces:
    """Pieces of one flash-attention call: the queries of piece i attend to the keys of piece i.

    Attributes:
        queries, keys: (pieces + 1,) int32, start of each piece, and end of the last.
        longest_query, longest_keys: length of the longest piece, in tokens.
        causal: queries and keys are the same tokens, with causal attention.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_keys: int
    causal: bool

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], causal: bool) -> Pieces:
        """Build from the length of each piece."""
        ends = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
        return cls(ends[0], ends[1], max(queries, default=0), max(keys, default=0), causal)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of both flash calls, without dropout."""
        return self.queries, self.keys, self.longest_query, self.longest_keys, 0.0, self.causal


@dataclass(frozen=True)
class Varlen:
    """Layout of a row for flash attention.

    Attributes:
        own: each prompt and each response, attending to itself.
        cross: the responses to each prompt, attending to the prompt.
        responses, prompts: (tokens,) indices in the row of the queries and the keys of ``cross``.
    """

    own: Pieces
    cross: Pieces
    responses: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, pieces: Sequence[int], responses: Sequence[slice], prompts: Sequence[slice]) -> Varlen:
        """Build from the lengths of a row's pieces, and the slices of the responses to each prompt and of that prompt."""
        queries, keys = ([part.stop - part.start for part in parts] for parts in (responses, prompts))
        rows = (torch.tensor([i for p in parts for i in range(p.start, p.stop)]).long() for parts in (responses, prompts))
        return cls(Pieces.of(pieces, pieces, causal=True), Pieces.of(queries, keys, causal=False), *rows)

    def on(self, device: Any) -> Varlen:
        """Copy the layout to a device."""
        own, cross = (
            Pieces(send(p.queries, device), send(p.keys, device), p.longest_query, p.longest_keys, p.causal)
            for p in (self.own, self.cross)
        )
        return Varlen(own, cross, send(self.responses, device), send(self.prompts, device))


class _VarlenAttention(torch.autograd.Function):
    """Attention of query (tokens, heads, size), key and value (tokens, key heads, size): (tokens, heads, size)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Varlen, scale: float) -> Tensor:
        out, normalizer, *state = _flash(query, key, value, *layout.own.arguments, False, scale=scale)
        ctx.states = [state[:2]]
        if len(layout.responses):
            mine, prompt = layout.responses, layout.prompts
            given = query[mine], key[prompt], value[prompt]
            cross, sums, *state = _flash(*given, *layout.cross.arguments, False, scale=scale)
            ctx.states.append(state[:2])
            own_sums = normalizer[:, mine]  # (heads, tokens) log of the sum of exponentials
            share = torch.sigmoid(sums - own_sums).to(out.dtype)
            out.index_copy_(0, mine, torch.lerp(out[mine], cross, share.T[..., None]))
            normalizer.index_copy_(1, mine, torch.logaddexp(own_sums, sums))
        ctx.save_for_backward(query, key, value, out, normalizer)
        ctx.layout, ctx.scale = layout, scale
        merged: Tensor = out
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normalizer = ctx.saved_tensors
        layout, scale, incoming = ctx.layout, ctx.scale, gradients[0].contiguous()
        given = incoming, query, key, value, out, normalizer
        at = _flash_backward(*given, *layout.own.arguments, *ctx.states[0], scale=scale)
        if len(layout.responses):
            mine, prompt = layout.responses, layout.prompts
            given = incoming[mine], query[mine], key[prompt], value[prompt], out[mine], normalizer[:, mine]
            found = _flash_backward(*given, *layout.cross.arguments, *ctx.states[1], scale=scale)
            for target, part, where in zip(at, found, (mine, prompt, prompt), strict=True):
                target.index_add_(0, where, part)
        return *at, None, None


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: Varlen, scale: float) -> Tensor:
    """Attention in a packed row.

    Args:
        query: (1, heads, tokens, size).
        key, value: (1, key heads, tokens, size).

    Returns:
        (1, heads, tokens, size)
    """
    tokens_first = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out: Tensor = _VarlenAttention.apply(*tokens_first, layout, scale)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1)[None]
