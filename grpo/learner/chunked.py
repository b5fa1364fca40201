"""Log-probs of given tokens from hidden states, with the logits of one chunk of tokens in memory at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS_AT_ONCE = 1024


class _LogProbs(torch.autograd.Function):
    """log softmax(h W^T / T) at the labels, and the entropy; the backward pass recomputes the logits chunk by chunk.

    With p the softmax and g the gradient of the log-prob, the gradient of the logits is g (onehot - p) / T. A gradient e of the
    entropy H adds -e p (log p + H) / T.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        chosen, entropies, normalizers = [], [], []
        for part, wanted in zip(torch.split(hidden, TOKENS_AT_ONCE), torch.split(labels, TOKENS_AT_ONCE), strict=True):
            logits = (part @ weight.T).float().div_(temperature)
            largest = logits.amax(dim=-1, keepdim=True)
            logits -= largest
            exponentials = torch.exp(logits)
            sums = exponentials.sum(dim=-1)
            normalizer = sums.log()
            chosen.append(logits.gather(-1, wanted[:, None])[:, 0] - normalizer)
            # H = log Z - E[z], with z relative to the largest logit.
            entropies.append(normalizer - torch.linalg.vecdot(exponentials, logits) / sums)
            normalizers.append(normalizer + largest[:, 0])
        ctx.save_for_backward(hidden, weight, labels, torch.cat(normalizers))
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # most losses have no entropy term
        return torch.cat(chosen), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, labels, normalizers = ctx.saved_tensors
        of_entropy = gradients[1]
        of_log_probs = torch.zeros_like(normalizers) if gradients[0] is None else gradients[0]
        at_hidden, at_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            incoming = of_log_probs[part, None] / ctx.temperature
            logits = (hidden[part] @ weight.T).float().div_(ctx.temperature)
            distribution = logits.sub_(normalizers[part, None])
            more: Tensor | float = 0.0
            if of_entropy is not None:
                p = distribution.exp()
                entropy = -torch.linalg.vecdot(p, distribution)[:, None]
                more = p.mul_(distribution + entropy).neg_() * (of_entropy[part, None] / ctx.temperature)
            at_logits = distribution.exp_().mul_(-incoming)
            at_logits = at_logits.scatter_add_(1, labels[part, None], incoming)
            at_logits = (at_logits if of_entropy is None else at_logits + more).to(weight.dtype)
            at_hidden[part] = at_logits @ weight
            at_weight += at_logits.T @ hidden[part]
        return at_hidden, at_weight.to(weight.dtype), None, None


def chunked_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each label, and entropy (nats) of its distribution.

    Args:
        hidden: (tokens, width), hidden states that predict the labels.
        weight: (vocabulary, width), of the output layer.
        labels: (tokens,).
        temperature: divides the logits.

    Returns:
        two float32 tensors (tokens,), with gradient.
    """
    log_probs, entropy = _LogProbs.apply(hidden, weight, labels, temperature)  # type: ignore[no-untyped-call]
    return log_probs, entropy


def log_probs_of(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute :func:`chunked_log_probs` from logits (tokens, vocabulary)."""
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    return distribution.gather(-1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(dim=-1)
