"""Pretraining of small models on generated documents."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from grpo.learner.chunked import chunked_log_probs
from grpo.learner.microbatches import pad_and_shift
from grpo.learner.optimizer import Optimizer
from grpo.models.qwen2_format import TransformerConfig
from grpo.models.tokenizer import Tokenizer, train_tokenizer
from grpo.models.transformer import TransformerLM
from grpo.study.settings import PretrainedHere

TOKENIZER_DOCUMENTS = 8000
WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.05
MAX_GRADIENT_NORM = 1.0
WEIGHT_DECAY = 0.01
BATCHES_SORTED_TOGETHER = 16
INITIALIZER_RANGE = 0.08  # a model of this width learns the task in half the steps that the usual 0.02 needs


def pretrain(
    settings: PretrainedHere,
    documents: Iterator[tuple[str, str]],
    pieces: Callable[[str], list[str]],
    on_step: Callable[[int, float, float], None],
) -> tuple[TransformerLM, Tokenizer]:
    """Train a tokenizer and a model from scratch.

    The loss counts response tokens only, because the questions are random and there is nothing to learn from them.

    Args:
        documents: an endless stream of (prompt, response).
        pieces: splits a text into the pieces that the tokenizer is trained on.
        on_step: called after each step with its number (from 1), loss (nats per token) and learning rate.

    Returns:
        model (float32) and tokenizer.
    """
    corpus = list(itertools.islice(documents, settings.steps * settings.batch_size))
    texts = (piece for p, r in corpus[:TOKENIZER_DOCUMENTS] for piece in pieces(p + r))
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    torch.manual_seed(settings.seed)
    model = build_transformer(settings, len(tokenizer))
    optimizer = Optimizer(model, settings.learning_rate, weight_decay=WEIGHT_DECAY)
    for step, batch in enumerate(_batches(settings, corpus, tokenizer), start=1):
        optimizer.learning_rate = _learning_rate(step, settings)
        mask = batch["response_mask"]
        predicting = model.base_model(batch["input_ids"]).last_hidden_state[mask]
        log_probs, _ = chunked_log_probs(predicting, model.get_output_embeddings().weight, batch["labels"][mask])
        loss = -log_probs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(MAX_GRADIENT_NORM)
        on_step(step, loss.item(), optimizer.learning_rate)
    return model, tokenizer


def build_transformer(settings: PretrainedHere, vocab_size: int) -> TransformerLM:
    """Build a randomly initialized model; end of text is token 0, as in :func:`train_tokenizer`."""
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


def _learning_rate(step: int, settings: PretrainedHere) -> float:
    """Learning rate: linear warm-up, then a cosine to ``FINAL_RATE_SHARE`` of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * min(1.0, step / WARMUP_STEPS) * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


def _batches(settings: PretrainedHere, corpus: list[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[dict[str, Tensor]]:
    """Yield batches of documents of similar length, which need little padding, in seeded random order."""
    prompts, responses = (tokenizer([text[part] for text in corpus], add_special_tokens=False)["input_ids"] for part in (0, 1))
    responses = [[*ids, tokenizer.eos_token_id] for ids in responses]
    rng = random.Random(f"batches {settings.seed}")
    size = settings.batch_size
    for start in range(0, len(corpus), size * BATCHES_SORTED_TOGETHER):
        block = range(start, min(len(corpus), start + size * BATCHES_SORTED_TOGETHER))
        ordered = sorted(block, key=lambda i: len(prompts[i]) + len(responses[i]))
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        rng.shuffle(batches)
        for batch in batches:
            yield pad_and_shift([prompts[i] for i in batch], [responses[i] for i in batch], tokenizer.pad_token_id)
