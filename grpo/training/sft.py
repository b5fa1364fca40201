"""Supervised fine-tuning on reasoning traces (CS336 assignment 5, Section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo.common.records import Example
from grpo.learner.learner import Learner
from grpo.study.methods import SftConfig
from grpo.tracking.run_log import RunLog
from grpo.training.order import items_of_step
from grpo.training.state import SavedState
from grpo.training.validation import Validation


def train_sft(
    config: SftConfig,
    seed: int,
    examples: Sequence[Example],
    tokenizer: Any,
    learner: Learner,
    validate: Validation,
    log: RunLog,
    saved: SavedState,
) -> None:
    """Train ``learner.model`` for ``config.n_sft_steps`` optimizer steps, or until ``validate`` says that the run is over.

    The loss counts response tokens only; prompts are masked.

    Args:
        examples: those to train on (:func:`grpo.training.order.choose_examples`).
        validate: called before the first step and after each with the step's update.
        saved: as of :func:`grpo.training.grpo.train_grpo`.
    """
    prompts = _encode(tokenizer, [example.prompt for example in examples])
    responses = _encode(tokenizer, [example.response for example in examples])
    encoded = list(zip(prompts, responses, strict=True))
    if saved.step == 0:
        with log.phase("evaluation"):
            validate(0, [])
    for step in range(saved.step + 1, config.n_sft_steps + 1):
        with log.phase("training"):
            batch = items_of_step(encoded, seed, step, config.train_batch_size)
            update = learner.sft_update([p for p, _ in batch], [r for _, r in batch], config.normalize_constant)

        with log.phase("evaluation"):
            over = validate(step, [update])

        log.step(step, [update], {}, tokens=sum(len(response) for _, response in batch))
        if over:
            break
        if saved.due(step):
            saved.save(step)


def _encode(tokenizer: Any, texts: list[str]) -> list[tuple[int, ...]]:
    """Token ids; prompt and response are tokenised apart, as :func:`tokenize_prompt_and_output` does."""
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
