"""Packed attention as on a GPU, with the flash kernel, which needs one, written in plain PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from test_attention import LAYOUT, SCALE, dense, inputs, with_gradients
from torch import Tensor

from grpo.models import varlen_attention
from grpo.models.packed_attention import Layout, Stretch, packed_attention


def pieces(args: tuple[Any, ...]) -> list[tuple[slice, slice]]:
    """Of a call's arguments after query, key and value (and what else a backward pass has), the tokens of each piece."""
    queries, keys, longest_query, longest_keys, dropout, _ = args
    assert queries.dtype == keys.dtype == torch.int32 and dropout == 0.0
    found = [(slice(*q), slice(*k)) for q, k in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True)]
    assert longest_query == max(q.stop - q.start for q, _ in found)
    assert longest_keys == max(k.stop - k.start for _, k in found)
    return found


def scores(query: Tensor, key: Tensor, q: slice, k: slice, causal: bool, scale: float) -> Tensor:
    """(heads, queries, keys) of a piece."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    found = torch.einsum("qhd,khd->hqk", query[q], key[k]) * scale
    return found.masked_fill(~torch.ones_like(found[0], dtype=torch.bool).tril(), float("-inf")) if causal else found


def flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward."""
    out, normalizer = torch.full_like(query, torch.nan), torch.full(query.shape[1::-1], torch.nan, dtype=query.dtype)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    *args, return_debug_mask = args
    assert not return_debug_mask
    for q, k in pieces(tuple(args)):
        found = scores(query, key, q, k, args[5], scale)
        normalizer[:, q] = found.logsumexp(-1)
        out[q] = torch.einsum("hqk,khd->qhd", found.softmax(-1), value[k])
    return out, normalizer, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward(incoming: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward: the probabilities come from the log-sum-exp that it is given (arXiv 2205.14135,
    Algorithm 4)."""
    out, normalizer, *args = args
    shared = query.shape[1] // key.shape[1]
    at_query = torch.zeros_like(query)
    at_key, at_value = (torch.zeros(len(key), *query.shape[1:], dtype=key.dtype) for _ in range(2))
    keys, values = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    for q, k in pieces(tuple(args[:6])):
        share = torch.exp(scores(query, key, q, k, args[5], scale) - normalizer[:, q, None])
        at_value[k] += torch.einsum("hqk,qhd->khd", share, incoming[q])
        at_share = torch.einsum("qhd,khd->hqk", incoming[q], values[k])
        at_scores = share * (at_share - (incoming[q] * out[q]).sum(-1).T[..., None]) * scale
        at_query[q] += torch.einsum("hqk,khd->qhd", at_scores, keys[k])
        at_key[k] += torch.einsum("hqk,qhd->khd", at_scores, query[q])
    return at_query, *(x.unflatten(1, (-1, shared)).sum(2) for x in (at_key, at_value))


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_flash", flash)
    monkeypatch.setattr(varlen_attention, "_flash_backward", flash_backward)


@pytest.mark.parametrize(
    "layout", [LAYOUT, Layout((Stretch(0, 30, ()), Stretch(30, 11, ())))], ids=["responses", "prompts only"]
)
def test_attention_and_gradients_are_those_of_the_cpus_packed_rows(layout: Layout) -> None:
    tensors, incoming = inputs()
    found = with_gradients(lambda q, k, v: packed_attention(q, k, v, layout.varlen(), SCALE), tensors, incoming)
    expected = with_gradients(lambda q, k, v: packed_attention(q, k, v, layout, SCALE), tensors, incoming)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-5


def test_attention_and_gradients_are_those_of_dense_attention_in_float64() -> None:
    tensors, incoming = inputs(torch.float64)
    found = with_gradients(lambda q, k, v: packed_attention(q, k, v, LAYOUT.varlen(), SCALE), tensors, incoming)
    for one, other in zip(found, with_gradients(dense, tensors, incoming), strict=True):
        assert (one - other).abs().max() < 1e-12


def test_pieces_by_hand() -> None:
    """Prompts of 4, 1, 6 and 2 tokens; the second has no responses."""
    layout = LAYOUT.varlen()
    assert layout.own.queries.tolist() == [0, 4, 7, 10, 12, 13, 19, 20, 25, 27, 34, 41] == layout.own.keys.tolist()
    assert (layout.own.longest_query, layout.own.longest_keys, layout.own.causal) == (7, 7, True)
    assert layout.cross.queries.tolist() == [0, 8, 14, 28] and layout.cross.keys.tolist() == [0, 4, 10, 12]
    assert (layout.cross.longest_query, layout.cross.longest_keys, layout.cross.causal) == (14, 6, False)
    assert layout.responses.tolist() == [*range(4, 12), *range(19, 25), *range(27, 41)]
    assert layout.prompts.tolist() == [*range(4), *range(13, 19), *range(25, 27)]
