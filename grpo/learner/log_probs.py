"""Log-probabilities and entropy of response tokens, and the tensors they are computed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pad_and_shift(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, Tensor]:
    """Prompt and response side by side, padded on the right, as next-token inputs and labels.

    Returns:
        ``input_ids``, ``labels`` (both int64) and ``response_mask`` (bool, true where the label is a response token),
        each of shape (batch, longest prompt + response - 1).
    """
    rows = [list(p) + list(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows], dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (prompt, row) in enumerate(zip(prompt_ids, rows, strict=True)):
        mask[i, len(prompt) : len(row)] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def tokenize_prompt_and_output(prompt_strs: list[str], output_strs: list[str], tokenizer: Any) -> dict[str, Tensor]:
    """Tokenise prompts and outputs apart, join them, and mark the output's tokens.

    Returns:
        As :func:`pad_and_shift`.
    """
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompt_strs]
    outputs = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in output_strs]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return pad_and_shift(prompts, outputs, pad)


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the distribution over the last dimension: H = logsumexp(z) - sum softmax(z) z, in float32.

    Args:
        logits: (..., vocabulary).

    Returns:
        (...)
    """
    logits = logits.float()
    normalizer = torch.logsumexp(logits, dim=-1)
    return normalizer - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def get_response_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Log-probability of each label, and optionally the entropy of the distribution it is drawn from.

    Padding stands on the right, where causal attention hides it from every real token, so no attention mask is needed.

    Args:
        model: a causal language model whose output has ``logits``.
        input_ids, labels: (batch, length).
        temperature: the logits are divided by it; must be the sampling temperature for ratios to start at 1.

    Returns:
        ``log_probs`` (batch, length) in float32, prompt and padding not masked out; ``token_entropy`` of the same shape,
        without gradient, if asked for.
    """
    logits = model(input_ids).logits.float() / temperature
    log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    if not return_token_entropy:
        return {"log_probs": log_probs}
    with torch.no_grad():
        return {"log_probs": log_probs, "token_entropy": compute_entropy(logits)}
