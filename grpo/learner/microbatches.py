"""Forward passes of a batch in microbatches, packed or padded.

Logits are computed for response tokens only, a chunk at a time (:func:`chunked_log_probs`), because the logits of all tokens
would be by far the largest tensors. A model whose head is more than a matrix computes them all. The host derives the positions
of response tokens from the lengths: indexing with a mask (``x[mask]``) would make it wait for the GPU to learn the size of the
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.common.records import Rollout
from grpo.common.world import ALONE, World
from grpo.models.examine import traits_of
from grpo.models.packing import Predictions, fill_rows, pack
from grpo.models.sharding import forward, shares

Ids = Sequence[Sequence[int]]
TOKENS_AT_ONCE = 1024  # whose logits are in memory at a time


class Texts(NamedTuple):
    """Token ids of a batch's prompts and responses; microbatches leave out responses without tokens.

    ``sampled``: for each response the positions of the tokens to predict: all, or those that no environment wrote.
    """

    prompts: Ids
    responses: Ids
    sampled: Ids

    @property
    def lengths(self) -> list[int]:
        """Number of sampled tokens of each response."""
        return [len(places) for places in self.sampled]


def whole_texts(prompts: Ids, responses: Ids) -> Texts:
    """Texts whose responses are learnt whole."""
    return Texts(prompts, responses, [range(len(ids)) for ids in responses])


def texts_of(rollouts: Sequence[Rollout]) -> Texts:
    """The texts of rollouts; no gradient goes through what an environment wrote."""
    completions = [rollout.completion for rollout in rollouts]
    return Texts([r.prompt_ids for r in rollouts], [c.token_ids for c in completions], [c.sampled for c in completions])


@dataclass(frozen=True)
class Microbatch:
    """Log-probs and entropies of some responses of a batch."""

    members: list[int]  # positions of the responses in the batch
    log_probs: Tensor  # (members, most sampled tokens), those of the sampled tokens side by side, then 0
    mask: Tensor  # (members, most sampled tokens), true for sampled tokens
    entropy: Tensor  # (members, most sampled tokens), those of the sampled tokens side by side, then 0
    tokens: Tensor  # (sampled tokens,) index of each sampled token in the flattened ``mask``

    def flat(self, x: Tensor) -> Tensor:
        """Select ``x[mask]``, (sampled tokens,), from x (members, most sampled tokens)."""
        return x.flatten().index_select(0, self.tokens)


def batch_tensors(rollouts: Sequence[Rollout], weights: Tensor, device: Any) -> dict[str, Tensor]:
    """Build the tensors of a whole train batch that the loss needs besides the tokens.

    ``weights``: (responses,), weight of each token of a response.

    Returns:
        ``advantages``, ``raw_rewards`` (0 for NaN), ``groups`` and ``weights``, each (responses, 1); ``engine_log_probs``, as
        the engine reported them when it drew the tokens, and, if the rollouts have them, ``old_log_probs`` in the ratio's
        denominator (:func:`grpo.training.step.update_policy`) and ``reference_log_probs`` under the starting weights, each
        (responses, longest), padded with 0.
    """
    columns = {
        "advantages": torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32),
        "raw_rewards": torch.tensor([rollout.rewards["reward"] for rollout in rollouts], dtype=torch.float32).nan_to_num(0.0),
        "groups": torch.tensor([rollout.group for rollout in rollouts]),
        "weights": weights,
    }
    tensors = {name: column[:, None] for name, column in columns.items()}
    log_probs = {"engine_log_probs": [torch.tensor(rollout.completion.log_probs) for rollout in rollouts]}
    for name in ("old_log_probs", "reference_log_probs"):  # all rollouts have them or none
        log_probs[name] = [of_one for rollout in rollouts if (of_one := getattr(rollout, name)) is not None]
    tensors |= {name: pad_sequence(rows, batch_first=True) for name, rows in log_probs.items() if rows}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def select_members(tensors: Mapping[str, Tensor], micro: Microbatch) -> dict[str, Tensor]:
    """Select a microbatch's members from :func:`batch_tensors`, cut to the longest of them."""
    members = torch.tensor(micro.members).to(micro.mask.device, non_blocking=True)
    longest = micro.mask.shape[1]
    return {name: tensor.index_select(0, members)[:, :longest].contiguous() for name, tensor in tensors.items()}


def packed_microbatches(
    model: Any, texts: Texts, max_tokens: int, temperature: float = 1.0, world: World = ALONE
) -> Iterator[Microbatch]:
    """Compute the process's packed rows of at most ``max_tokens`` one by one, so that activations are freed before the next."""
    for segments, counts in shares(model, fill_rows(texts.prompts, texts.responses, max_tokens), world):
        row = pack(segments, *texts)
        yield from _if_it_counts(_predicted(model, row.inputs(model.device), row.predictions, temperature), counts)


def padded_microbatches(
    model: Any, texts: Texts, parts: Sequence[list[int]], pad_token_id: int, temperature: float = 1.0, world: World = ALONE
) -> Iterator[Microbatch]:
    """Compute padded microbatches, the reference path: each response has its own copy of the prompt.

    ``parts``: positions in the batch of each microbatch, from :func:`split_in_order` or :func:`split_by_length`; the processes
    of ``world`` share them.
    """
    prompts, responses, sampled = texts
    for members, counts in shares(model, parts, world):
        tensors = pad_and_shift([prompts[i] for i in members], [responses[i] for i in members], pad_token_id)
        width = tensors["labels"].shape[1]
        starts = [row * width + len(prompts[i]) - 1 for row, i in enumerate(members)]
        places = [start + place for start, i in zip(starts, members, strict=True) for place in sampled[i]]
        source = torch.tensor(places, dtype=torch.int64)
        predictions = Predictions(source, tensors["labels"].take(source), members, [len(sampled[i]) for i in members])
        # With padding on the right, causal attention needs no mask: no real token attends to it.
        inputs = {"input_ids": tensors["input_ids"].to(model.device, non_blocking=True)}
        yield from _if_it_counts(_predicted(model, inputs, predictions, temperature), counts)


def _if_it_counts(microbatch: Microbatch, counts: bool) -> Iterator[Microbatch]:
    """Yield a microbatch that counts; for any other, run the backward pass that other processes wait for, with zeros."""
    if counts:
        yield microbatch
    elif torch.is_grad_enabled():
        microbatch.log_probs[:0].sum().backward()  # type: ignore[no-untyped-call]


def pad_and_shift(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, Tensor]:
    """Concatenate each prompt and response, pad on the right, and shift into next-token inputs and labels.

    Returns ``input_ids``, ``labels`` (both int64) and ``response_mask`` (bool, true where the label is a response token), each
    of shape (batch, longest prompt + response - 1).
    """
    rows = [list(p) + list(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows], dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (prompt, row) in enumerate(zip(prompt_ids, rows, strict=True)):
        mask[i, len(prompt) : len(row)] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def split_in_order(count: int, size: int) -> list[list[int]]:
    """Split the positions of ``count`` responses into consecutive parts of ``size``."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def split_by_length(prompts: Ids, responses: Ids, max_tokens: int) -> list[list[int]]:
    """Split the positions of a batch, longest texts first, into parts with at most ``max_tokens`` tokens after padding.

    Texts of similar length need little padding. A response without tokens is left out; a longer text is a part of its own.
    """
    lengths = {i: len(prompts[i]) + len(response) - 1 for i, response in enumerate(responses) if len(response)}
    waiting, parts = sorted(lengths, key=lambda i: -lengths[i]), []
    while waiting:
        count = max(1, max_tokens // lengths[waiting[0]])
        parts.append(waiting[:count])
        waiting = waiting[count:]
    return parts


def _predicted(model: Any, inputs: dict[str, Any], predictions: Predictions, temperature: float) -> Microbatch:
    """Run the model on ``inputs``, and build the microbatch of the predicted responses."""
    device, lengths = model.device, predictions.lengths
    placed, labels = (x.to(device, non_blocking=True) for x in (predictions.source, predictions.labels))
    if traits_of(model).linear_head:
        computed = forward(model, _by_linear_head, inputs, placed, labels, temperature)
    else:
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, placed)
        computed = log_probs_of(logits, labels, temperature)
    longest = max(lengths)
    mask = torch.arange(longest, device=device) < torch.tensor(lengths).to(device, non_blocking=True)[:, None]
    rows = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
    tokens = torch.cat(rows).to(device, non_blocking=True)
    log_probs, entropy = (x.new_zeros(mask.numel()).index_copy(0, tokens, x).view(mask.shape) for x in computed)
    return Microbatch(predictions.members, log_probs, mask, entropy, tokens)


def _by_linear_head(
    model: Any, inputs: dict[str, Any], placed: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (response tokens,) without stored logits; arguments as in :func:`_predicted`."""
    states = model.base_model(**inputs, use_cache=False).last_hidden_state
    hidden = states.flatten(0, 1).index_select(0, placed)
    return chunked_log_probs(hidden, model.get_output_embeddings().weight, labels, temperature)


# ---------------------------------------------------------------------------------------------------------- log-probs in chunks


def _chunk(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the labels, entropies, and logarithms of the sums of exponentials, each (tokens,) in float32."""
    logits = (hidden @ weight.T).float().div_(temperature)
    largest = logits.amax(dim=-1, keepdim=True)
    logits -= largest
    exponentials = torch.exp(logits)
    sums = exponentials.sum(dim=-1)
    normalizer = sums.log()
    chosen = logits.gather(-1, labels[:, None])[:, 0] - normalizer
    # H = log Z - E[z], with z relative to the largest logit.
    entropy = normalizer - torch.linalg.vecdot(exponentials, logits) / sums
    return chosen, entropy, normalizer + largest[:, 0]


def _chunk_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    normalizers: Tensor,
    of_log_probs: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient (tokens, vocabulary) of a chunk's logits before their division by the temperature, in the weight's precision.

    ``of_log_probs``, ``of_entropy``: gradients of the loss by both, each (tokens,); None: the loss has no entropy term.
    """
    incoming = of_log_probs[:, None] / temperature
    logits = (hidden @ weight.T).float().div_(temperature)
    distribution = logits.sub_(normalizers[:, None])
    more = None
    if of_entropy is not None:
        p = distribution.exp()
        entropy = -torch.linalg.vecdot(p, distribution)[:, None]
        more = p.mul_(distribution + entropy).neg_() * (of_entropy[:, None] / temperature)
    at_logits = distribution.exp_().mul_(-incoming)
    at_logits = at_logits.scatter_add_(1, labels[:, None], incoming)
    return (at_logits if more is None else at_logits + more).to(weight.dtype)


_forward, _backward = _chunk, _chunk_gradient


def compile_head() -> None:
    """Compile what is computed of a chunk's logits with torch.compile: a pass or two over them in place of a dozen."""
    global _forward, _backward
    _forward, _backward = torch.compile(_chunk), torch.compile(_chunk_gradient)


class _LogProbs(torch.autograd.Function):
    """log softmax(h W^T / T) at the labels, and the entropy; the backward pass recomputes the logits chunk by chunk.

    With p the softmax and g the gradient of the log-prob, the gradient of the logits is g (onehot - p) / T. A gradient e of the
    entropy H adds -e p (log p + H) / T.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        chunks = zip(torch.split(hidden, TOKENS_AT_ONCE), torch.split(labels, TOKENS_AT_ONCE), strict=True)
        computed = [_forward(part, weight, wanted, temperature) for part, wanted in chunks]
        chosen, entropies, normalizers = (torch.cat(column) for column in zip(*computed, strict=True))
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # most losses have no entropy term
        return chosen, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, labels, normalizers = ctx.saved_tensors
        of_log_probs, of_entropy = gradients
        of_log_probs = torch.zeros_like(normalizers) if of_log_probs is None else of_log_probs
        at_hidden, at_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            incoming = of_log_probs[part], None if of_entropy is None else of_entropy[part]
            at_logits = _backward(hidden[part], weight, labels[part], normalizers[part], *incoming, ctx.temperature)
            at_hidden[part] = at_logits @ weight
            at_weight += at_logits.T @ hidden[part]
        return at_hidden, at_weight.to(weight.dtype), None, None


def chunked_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each label, and entropy (nats) of its distribution: two float32 tensors (tokens,), with gradient.

    Args:
        hidden: (tokens, width), hidden states that predict the labels.
        weight: (vocabulary, width), of the output layer.
        labels: (tokens,).
        temperature: divides the logits.
    """
    log_probs, entropy = _LogProbs.apply(hidden, weight, labels, temperature)  # type: ignore[no-untyped-call]
    return log_probs, entropy


def log_probs_of(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute :func:`chunked_log_probs` from logits (tokens, vocabulary)."""
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    return distribution.gather(-1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(dim=-1)
