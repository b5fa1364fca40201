"""Log-probs of given tokens from hidden states, with the logits of one chunk of tokens in memory at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKENS_AT_ONCE = 1024


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


class Incoming(NamedTuple):
    """Gradients of the loss with respect to log-probs and entropies, each (tokens,); None: the loss has no entropy term."""

    log_probs: Tensor
    entropy: Tensor | None


def _chunk_gradient(
    hidden: Tensor, weight: Tensor, labels: Tensor, normalizers: Tensor, gradients: Incoming, temperature: float
) -> Tensor:
    """Gradient (tokens, vocabulary) of a chunk's logits before their division by the temperature, in the weight's precision."""
    incoming = gradients.log_probs[:, None] / temperature
    logits = (hidden @ weight.T).float().div_(temperature)
    distribution = logits.sub_(normalizers[:, None])
    more = None
    if gradients.entropy is not None:
        p = distribution.exp()
        entropy = -torch.linalg.vecdot(p, distribution)[:, None]
        more = p.mul_(distribution + entropy).neg_() * (gradients.entropy[:, None] / temperature)
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
            incoming = Incoming(of_log_probs[part], None if of_entropy is None else of_entropy[part])
            at_logits = _backward(hidden[part], weight, labels[part], normalizers[part], incoming, ctx.temperature)
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
