"""Rows in which the responses to a prompt share one copy of it, so that nothing is computed twice and no padding at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.models.packed_attention import Layout, Stretch


@dataclass(frozen=True)
class Segment:
    """A prompt with some of the responses to it.

    Attributes:
        members: positions in the batch; all have the same prompt.
        tokens: what the segment takes up in a row: the prompt, and each response but for its last token, from which
            nothing is predicted.
    """

    members: list[int]
    tokens: int


@dataclass(frozen=True)
class Predictions:
    """Which tokens of a batch a row, or several, predict, one response after the other.

    Attributes:
        source: (response tokens,) index, in all rows one after the other, of the token whose hidden state predicts it.
        labels: (response tokens,).
        members: positions in the batch, in the order in which their tokens stand in ``labels``.
        lengths: response lengths of the members.
    """

    source: Tensor
    labels: Tensor
    members: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class PackedRow:
    """Segments side by side, as one row of tokens.

    Attributes:
        input_ids, position_ids: (1, tokens); positions begin anew with each prompt, and go on from it with each response.
        layout: what attends to what.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictions: Predictions
    layout: Layout


def fill_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], max_tokens: int) -> list[list[Segment]]:
    """Distribute a batch over as few rows as first-fit needs, longest segments first.

    Prompts with the same token ids are shared. A response without tokens is left out; one that is longer than
    ``max_tokens`` with its prompt gets a row of its own.

    Args:
        max_tokens: budget of a row.

    Returns:
        for each row its segments.
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
    """A group as one segment, or as several that each keep to the budget, with a copy of the prompt each."""
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


def pack(segments: Sequence[Segment], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> PackedRow:
    """The tensors of one row.

    Args:
        prompts, responses: the batch that the segments' members are positions in.
    """
    ids: list[int] = []
    positions: list[int] = []
    source: list[int] = []
    stretches: list[Stretch] = []
    for segment in segments:
        prompt = prompts[segment.members[0]]
        taken = [len(responses[i]) - 1 for i in segment.members]
        stretches.append(Stretch(len(ids), len(prompt), tuple(n for n in taken if n)))
        ids += prompt
        positions += range(len(prompt))
        last_of_prompt = len(ids) - 1
        for i, n in zip(segment.members, taken, strict=True):
            source += [last_of_prompt, *range(len(ids), len(ids) + n)]
            ids += responses[i][:-1]
            positions += range(len(prompt), len(prompt) + n)
    members = [i for segment in segments for i in segment.members]
    labels = torch.tensor([token for i in members for token in responses[i]])
    lengths = [len(responses[i]) for i in members]
    predictions = Predictions(torch.tensor(source), labels, members, lengths)
    return PackedRow(torch.tensor([ids]), torch.tensor([positions]), predictions, Layout(tuple(stretches)))
