"""Packed rows: responses share one copy of their prompt, and there is no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.models.packed_attention import NO_MASK, Layout, PromptGroup


@dataclass(frozen=True)
class Segment:
    """A prompt with some of its responses.

    ``members``: positions of the responses in the batch; all have the same prompt. ``tokens``: length in a row: the prompt, and
    each response without its last token, which predicts nothing.
    """

    members: list[int]
    tokens: int


@dataclass(frozen=True)
class Predictions:
    """The sampled tokens that one or more rows predict, one response after the other.

    Attributes:
        source: (sampled tokens,) index, in the concatenated rows, of the token whose hidden state predicts each one.
        labels: (sampled tokens,), their ids.
        members: positions in the batch, in the order of ``labels``.
        lengths: number of sampled tokens of the members.
    """

    source: Tensor
    labels: Tensor
    members: list[int]
    lengths: list[int]


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
