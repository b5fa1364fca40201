"""Packed rows, in which several responses share one copy of their prompt and there is no padding, and their attention.

Each response attends to its prompt and to itself. On a CPU these are two flash-attention calls, merged by their log-sum-exp:
softmax over the union of two sets of keys is the mean of the softmaxes over each set, weighted by their sums of exponentials.
Given the merged output and log-sum-exp, the flash backward pass yields the exact gradient of each part (the same identity as in
ring attention, arXiv 2310.01889). No scores between two responses are computed, no scores are stored, and there is no padding.
On a GPU it is one call of torch's FlexAttention (Dong et al. 2024, arXiv 2412.05496), compiled once. It computes only those
blocks of 128 x 128 scores in which a token attends to another, and grouped queries share their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:  # in a run it would import the compiler, slowly, where there is no GPU
    from torch.nn.attention.flex_attention import BlockMask

OnDevice: TypeAlias = "Layout | BlockMask"
"""A row's layout in the form for the attention of its device."""

# A placeholder for a model's attention_mask, when ``shared`` alone decides what attends to what. Models of transformers build
# no mask if they get one of this shape; its content is not used.
NO_MASK = torch.empty(1, 1, 1, 1)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class PromptGroup:
    """Position in a row of a prompt and its responses, one after the other."""

    start: int  # index of the prompt's first token
    prompt: int  # length of the prompt
    responses: tuple[int, ...]  # length of each response in the row, in order; each at least 1

    @property
    def of_prompt(self) -> slice:
        """Slice of the prompt's tokens."""
        return slice(self.start, self.start + self.prompt)

    @property
    def of_responses(self) -> slice:
        """Slice of all responses' tokens."""
        return slice(self.of_prompt.stop, self.of_prompt.stop + sum(self.responses))

    def equal_pieces(self) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Yield the prompt and runs of responses of equal length: slice of the tokens, and (number, length)."""
        yield self.of_prompt, (1, self.prompt)
        start = self.of_prompt.stop
        for length, run in groupby(self.responses):
            count = len(list(run))
            yield slice(start, start + count * length), (count, length)
            start += count * length


@dataclass(frozen=True)
class Layout:
    """Layout of a row: which tokens attend to which."""

    prompt_groups: tuple[PromptGroup, ...]

    def on(self, device: torch.device) -> OnDevice:
        """Convert the layout for attention on this device: on a CPU unchanged, else :meth:`block_mask`."""
        return self if device.type == "cpu" else self.block_mask(device)

    def block_mask(self, device: torch.device) -> BlockMask:
        """FlexAttention's mask: the blocks of scores to compute, and a function for blocks that are masked in part."""
        from torch.nn.attention.flex_attention import create_block_mask

        pieces: list[int] = []  # for each token the start of its prompt or response,
        prompts: list[int] = []  # and the start of its prompt
        for group in self.prompt_groups:
            for length in (group.prompt, *group.responses):
                pieces += [len(pieces)] * length
                prompts += [group.start] * length
        piece, prompt = (torch.tensor(starts).to(device, non_blocking=True) for starts in (pieces, prompts))

        def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & ((piece[query] == piece[key]) | (prompt[query] == piece[key]))

        return create_block_mask(attends, None, None, len(pieces), len(pieces), device=device)


class _SharedPromptAttention(torch.autograd.Function):
    """Attention of query, key, value (heads, tokens, size) with a layout and a scale of the scores: (heads, tokens, size)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        out = _like(query)
        normalizer = _like(query[..., 0]).float()  # (heads, tokens) log of the sum of exponentials
        for group in layout.prompt_groups:
            for tokens, shape in group.equal_pieces():
                q, k, v = (_pieces(x, tokens, shape) for x in (query, key, value))
                results = _flash(q, k, v, 0.0, True, scale=scale)
                for target, part in zip((out, normalizer), results, strict=True):
                    _pieces(target, tokens, shape).copy_(part)
            if group.responses:
                mine, prompt = group.of_responses, group.of_prompt
                (cross,), (sums,) = _flash(query[None, :, mine], key[None, :, prompt], value[None, :, prompt], scale=scale)
                own_sums = normalizer[:, mine]
                share = torch.sigmoid(sums - own_sums).to(out.dtype)
                out[:, mine].lerp_(cross, share[..., None])
                torch.logaddexp(own_sums, sums, out=own_sums)
        ctx.save_for_backward(query, key, value, out, normalizer)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normalizer = ctx.saved_tensors
        at = [_like(query), _like(query), _like(query)]
        given = (gradients[0], query, key, value, out, normalizer)
        for group in ctx.layout.prompt_groups:
            for tokens, shape in group.equal_pieces():
                results = _flash_backward(*(_pieces(x, tokens, shape) for x in given), 0.0, True, scale=ctx.scale)
                for target, part in zip(at, results, strict=True):
                    _pieces(target, tokens, shape).copy_(part)
            if group.responses:
                mine, prompt = group.of_responses, group.of_prompt
                where = (mine, mine, prompt, prompt, mine, mine)
                results = _flash_backward(
                    *(x[None, :, w] for x, w in zip(given, where, strict=True)), 0.0, False, scale=ctx.scale
                )
                for target, part, w in zip(at, results, (mine, prompt, prompt), strict=True):
                    target[:, w] += part[0]
        return *at, None, None


def _like(x: Tensor) -> Tensor:
    """Make an empty tensor like x (heads, tokens, ...), with the heads of a token side by side in memory."""
    return torch.empty_like(x.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)


def _pieces(x: Tensor, tokens: slice, shape: tuple[int, int]) -> Tensor:
    """View consecutive pieces of equal length as (pieces, heads, length, ...)."""
    return x[:, tokens].view(len(x), *shape, *x.shape[2:]).transpose(0, 1)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: OnDevice, scale: float) -> Tensor:
    """Attention in a packed row.

    Returns (1, heads, tokens, size)

    Args:
        query: (1, heads, tokens, size).
        key, value: (1, key heads, tokens, size).
        layout: from :meth:`Layout.on`.
    """
    return _attend(query, key, value, layout, scale)


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: OnDevice, scale: float) -> Tensor:
    shared = query.shape[1] // key.shape[1]  # grouped-query attention: query heads for each key head
    if not isinstance(layout, Layout):
        # Without the option, rows of fewer than 128 tokens get a kernel that wants a power of 2 for ``shared``.
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        flex = _compiled_flex_attention()
        return flex(query, key, value, block_mask=layout, scale=scale, enable_gqa=shared > 1, kernel_options=options)
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    out: Tensor = _SharedPromptAttention.apply(query[0], key[0], value[0], layout, scale)  # type: ignore[no-untyped-call]
    return out[None]


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


_attend = _packed_attention


def keep_out_of_graphs() -> None:
    """Exclude :func:`packed_attention` from torch.compile; a decorator would import the compiler, slowly, in every run."""
    global _attend
    _attend = torch.compiler.disable(_packed_attention)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Segment:
    """A prompt with some of its responses."""

    members: list[int]  # positions of the responses in the batch; all have the same prompt
    tokens: int  # length in a row: the prompt, and each response without its last token, which predicts nothing


@dataclass(frozen=True)
class Predictions:
    """The sampled tokens that one or more rows predict, one response after the other."""

    source: Tensor  # (sampled tokens,) index, in the concatenated rows, of the token whose hidden state predicts each one
    labels: Tensor  # (sampled tokens,), their ids
    members: list[int]  # positions in the batch, in the order of ``labels``
    lengths: list[int]  # number of sampled tokens of the members


@dataclass(frozen=True)
class PackedRow:
    """One row of tokens: segments side by side.

    ``input_ids, position_ids``: (1, tokens); positions restart at each prompt, and each response continues from its prompt.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictions: Predictions
    layout: Layout

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments of a model that computes this row."""
        return {
            "input_ids": self.input_ids.to(device, non_blocking=True),
            "position_ids": self.position_ids.to(device, non_blocking=True),
            "attention_mask": NO_MASK,
            "shared": self.layout.on(device),
        }


def fill_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], max_tokens: int) -> list[list[Segment]]:
    """Distribute a batch over rows by first fit, longest segments first.

    Prompts with equal token ids are shared. A response without tokens is left out; a response that exceeds ``max_tokens`` with
    its prompt gets its own row. ``max_tokens``: largest number of tokens in a row. Returns the segments of each row.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        if len(responses[i]):
            groups.setdefault(tuple(prompt), []).append(i)
    segments = [s for prompt, members in groups.items() for s in _split(len(prompt), members, responses, max_tokens)]
    rows: list[list[Segment]] = []
    room: list[int] = []
    for segment in sorted(segments, key=lambda s: -s.tokens):
        fits = next((n for n, left in enumerate(room) if segment.tokens <= left), None)
        if fits is None:
            rows.append([segment])
            room.append(max_tokens - segment.tokens)
        else:
            rows[fits].append(segment)
            room[fits] -= segment.tokens
    return rows


def _split(prompt_length: int, members: list[int], responses: Sequence[Sequence[int]], max_tokens: int) -> list[Segment]:
    """Split the responses to a prompt into segments within the budget, each with a copy of the prompt."""
    segments = []
    current: list[int] = []
    tokens = prompt_length
    for i in sorted(members, key=lambda i: -len(responses[i])):
        more = len(responses[i]) - 1
        if current and tokens + more > max_tokens:
            segments.append(Segment(current, tokens))
            current, tokens = [], prompt_length
        current.append(i)
        tokens += more
    return [*segments, Segment(current, tokens)]


def pack(
    segments: Sequence[Segment],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int]],
) -> PackedRow:
    """Build the tensors of one row.

    ``prompts``, ``responses``: the whole batch, indexed by the segments' members. ``sampled``: positions in each response of
    the tokens to predict.
    """
    ids: list[int] = []
    positions: list[int] = []
    source: list[int] = []
    prompt_groups: list[PromptGroup] = []
    for segment in segments:
        prompt = prompts[segment.members[0]]
        taken = [len(responses[i]) - 1 for i in segment.members]
        prompt_groups.append(PromptGroup(len(ids), len(prompt), tuple(n for n in taken if n)))
        ids += prompt
        positions += range(len(prompt))
        last_of_prompt = len(ids) - 1
        for i, n in zip(segment.members, taken, strict=True):
            first = len(ids)
            source += [first + place - 1 if place else last_of_prompt for place in sampled[i]]
            ids += responses[i][:-1]
            positions += range(len(prompt), len(prompt) + n)
    members = [i for segment in segments for i in segment.members]
    labels = torch.tensor([responses[i][place] for i in members for place in sampled[i]])
    lengths = [len(sampled[i]) for i in members]
    predictions = Predictions(torch.tensor(source), labels, members, lengths)
    return PackedRow(torch.tensor([ids]), torch.tensor([positions]), predictions, Layout(tuple(prompt_groups)))
