"""The loop of supervised fine-tuning on reasoning traces (CS336 assignment 5, Section 4.3)."""

from __future__ import annotations

from grpo.learner.learner import Learner, require_context
from grpo.learner.microbatches import whole_texts
from grpo.study.config import SftConfig
from grpo.training.data import items_of_step
from grpo.training.step import RunContext


def train_sft(ctx: RunContext[SftConfig, Learner]) -> None:
    """Train ``ctx.learner.model`` for ``n_sft_steps`` optimizer steps, or until ``ctx.validation`` ends the run.

    ``ctx.setup.data`` holds the examples (:func:`grpo.training.data.choose_examples`). Prompts are masked: the loss counts
    response tokens only.
    """
    setup, log, tokenizer = ctx.setup, ctx.log, ctx.sampler.tokenizer
    config, format = setup.config, setup.format
    prompts = format.encode_all(tokenizer, [example.prompt for example in setup.data])
    responses = [format.encode_response(tokenizer, example.response) for example in setup.data]
    require_context(ctx.learner.model, prompts, responses)
    encoded = list(zip(prompts, responses, strict=True))  # prompt and response apart, as tokenize_prompt_and_output does
    for step in ctx.steps():
        with log.phase("training"):
            batch = items_of_step(encoded, setup.seed, step, config.train_batch_size)
            update = ctx.learner.sft_update(
                whole_texts([p for p, _ in batch], [r for _, r in batch]), config.normalize_constant
            )

        with log.phase("evaluation"):
            over = ctx.validation(step, [update])

        log.step(step, [update], {}, tokens=sum(len(response) for _, response in batch))
        if over:
            break
