"""Pretraining of the mini model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from grpo.models.checkpoint import Qwen2Config, Qwen2ForCausalLM
from grpo.models.tokenizer import train_tokenizer
from grpo.objective.log_probs import get_response_log_probs, pad_and_shift
from grpo.objective.masking import masked_mean
from grpo.study import PretrainedHere
from grpo.training.documents import documents

TOKENIZER_DOCUMENTS = 8000
WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.05
BATCHES_SORTED_TOGETHER = 16


def pretrain(settings: PretrainedHere, levels: int, on_step: Callable[[int, float, float], None]) -> tuple[Any, Any]:
    """Train tokenizer and model from nothing.

    The loss counts the response's tokens only: the questions are random numbers, of which nothing can be learnt.

    Args:
        levels: difficulty levels of the problems in the documents.
        on_step: called with step (from 1), loss (nats per token) and learning rate.

    Returns:
        model (``Qwen2ForCausalLM``, float32) and tokenizer.
    """
    corpus = list(itertools.islice(documents(settings, levels), settings.steps * settings.batch_size))
    tokenizer = train_tokenizer((p + r for p, r in corpus[:TOKENIZER_DOCUMENTS]), settings.vocab_size)
    torch.manual_seed(settings.seed)
    model = build_model(settings, len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step, batch in enumerate(_batches(settings, corpus, tokenizer), start=1):
        rate = _learning_rate(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        log_probs = get_response_log_probs(model, batch["input_ids"], batch["labels"])["log_probs"]
        loss = -masked_mean(log_probs, batch["response_mask"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, loss.item(), rate)
    return model, tokenizer


def build_model(settings: PretrainedHere, vocab_size: int) -> Any:
    """A randomly initialised Qwen2 model; end of text is token 0, as in :func:`train_tokenizer`."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_attention_heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=settings.max_position_embeddings,
        # At this width 0.08 learns the task in half the steps that the large models' 0.02 needs.
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def _learning_rate(step: int, settings: PretrainedHere) -> float:
    """Linear warm-up, then a cosine to ``FINAL_RATE_SHARE`` of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * min(1.0, step / WARMUP_STEPS) * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


def _batches(settings: PretrainedHere, corpus: list[tuple[str, str]], tokenizer: Any) -> Any:
    """Batches of documents of similar length, in seeded random order, so that little padding is computed."""

    def encode(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    prompts = encode([prompt for prompt, _ in corpus])
    responses = [[*ids, tokenizer.eos_token_id] for ids in encode([response for _, response in corpus])]
    rng = random.Random(f"batches {settings.seed}")
    size = settings.batch_size
    for start in range(0, len(corpus), size * BATCHES_SORTED_TOGETHER):
        block = range(start, min(len(corpus), start + size * BATCHES_SORTED_TOGETHER))
        ordered = sorted(block, key=lambda i: len(prompts[i]) + len(responses[i]))
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        rng.shuffle(batches)
        for batch in batches:
            yield pad_and_shift([prompts[i] for i in batch], [responses[i] for i in batch], tokenizer.pad_token_id)
