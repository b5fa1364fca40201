"""A batch of prompts and responses through the model, piece by piece, packed or padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.models.shared_prompt import NO_MASK
from grpo.objective.chunked import chunked_log_probs
from grpo.objective.log_probs import get_response_log_probs, pad_and_shift
from grpo.training.packing import PackedRow, fill_rows, pack

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Microbatch:
    """Some responses of a batch, computed.

    Attributes:
        members: their positions in the batch.
        log_probs, entropy: (members, length), of the response tokens where ``mask`` is true.
    """

    members: list[int]
    log_probs: Tensor
    mask: Tensor
    entropy: Tensor


def packed_microbatches(
    model: Any, prompts: Ids, responses: Ids, max_tokens: int, temperature: float = 1.0, share: slice = slice(None)
) -> Iterator[Microbatch]:
    """Packed rows, one after the other, so that one's activations are freed before the next.

    Args:
        model: as :func:`grpo.models.checkpoint.load_model` gives it.
        prompts, responses: token ids; a response without tokens is left out.
        max_tokens: budget of a row.
        temperature: the logits are divided by it.
        share: which of the rows.
    """
    for segments in fill_rows(prompts, responses, max_tokens)[share]:
        yield _packed(model, pack(segments, prompts, responses), temperature)


def padded_microbatches(
    model: Any, prompts: Ids, responses: Ids, size: int, pad_token_id: int, temperature: float = 1.0, share: slice = slice(None)
) -> Iterator[Microbatch]:
    """The reference: ``size`` neighbouring responses at a time, with a copy of the prompt each, padded to the longest."""
    for start in range(0, len(prompts), size)[share]:
        members = list(range(start, min(start + size, len(prompts))))
        tensors = pad_and_shift([prompts[i] for i in members], [responses[i] for i in members], pad_token_id)
        tensors = {key: value.to(model.device) for key, value in tensors.items()}
        output = get_response_log_probs(model, tensors["input_ids"], tensors["labels"], True, temperature)
        yield Microbatch(members, output["log_probs"], tensors["response_mask"], output["token_entropy"])


def _packed(model: Any, row: PackedRow, temperature: float) -> Microbatch:
    """One packed row through the model; logits are computed for response tokens only, a few at a time."""
    device = model.device
    hidden = model.base_model(
        input_ids=row.input_ids.to(device),
        position_ids=row.position_ids.to(device),
        attention_mask=NO_MASK,
        use_cache=False,
        shared=row.layout.block_mask(device) if device.type == "cuda" else row.layout,
    ).last_hidden_state[0]
    weight = model.get_output_embeddings().weight
    computed = chunked_log_probs(hidden.index_select(0, row.source.to(device)), weight, row.labels.to(device), temperature)
    log_probs, entropy = (pad_sequence(list(torch.split(flat, row.lengths)), batch_first=True) for flat in computed)
    mask = torch.arange(log_probs.shape[1], device=device) < torch.tensor(row.lengths, device=device)[:, None]
    return Microbatch(row.members, log_probs, mask, entropy)
