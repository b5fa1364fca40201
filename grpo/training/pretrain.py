"""Pretraining of small models on generated documents."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo.models.checkpoint import Qwen2Config, Qwen2ForCausalLM
from grpo.models.qwen2_format import TransformerConfig
from grpo.models.tokenizer import train_tokenizer
from grpo.models.transformer import TransformerLM
from grpo.objective.log_probs import get_response_log_probs, pad_and_shift
from grpo.objective.masking import masked_mean
from grpo.sections import KeywordModel, PretrainedHere, Pretraining

TOKENIZER_DOCUMENTS = 8000
WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.05
BATCHES_SORTED_TOGETHER = 16
INITIALIZER_RANGE = 0.08  # at this width it learns the task in half the steps that the large models' 0.02 needs


def pretrain(
    settings: Pretraining,
    documents: Iterator[tuple[str, str]],
    build: Callable[[Any, int], Any],
    on_step: Callable[[int, float, float], None],
    pieces: Callable[[str], list[str]] = lambda text: [text],
) -> tuple[Any, Any]:
    """Train tokenizer and model from nothing.

    The loss counts the response's tokens only: the questions are random numbers, of which nothing can be learnt.

    Args:
        documents: an endless stream of (prompt, response).
        build: makes a model from the settings and the size of the vocabulary.
        on_step: called with step (from 1), loss (nats per token) and learning rate.
        pieces: cuts a text into those that the tokenizer is trained on.

    Returns:
        model (float32) and tokenizer.
    """
    corpus = list(itertools.islice(documents, settings.steps * settings.batch_size))
    texts = (piece for p, r in corpus[:TOKENIZER_DOCUMENTS] for piece in pieces(p + r))
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    torch.manual_seed(settings.seed)
    model = build(settings, len(tokenizer))
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


def build_qwen2(settings: PretrainedHere, vocab_size: int) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 model of transformers; end of text is token 0, as in :func:`train_tokenizer`."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_attention_heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=settings.max_position_embeddings,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def build_transformer(settings: KeywordModel, vocab_size: int) -> TransformerLM:
    """A randomly initialised model of the project's own; end of text is token 0."""
    return TransformerLM(
        TransformerConfig(
            vocab_size=vocab_size,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.num_hidden_layers,
            num_attention_heads=settings.num_attention_heads,
            num_key_value_heads=settings.num_attention_heads,
            intermediate_size=settings.intermediate_size,
            max_position_embeddings=settings.max_position_embeddings,
            tie_word_embeddings=settings.tie_word_embeddings,
            initializer_range=INITIALIZER_RANGE,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def _learning_rate(step: int, settings: Pretraining) -> float:
    """Linear warm-up, then a cosine to ``FINAL_RATE_SHARE`` of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * min(1.0, step / WARMUP_STEPS) * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


def _batches(settings: Pretraining, corpus: list[tuple[str, str]], tokenizer: Any) -> Any:
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
