"""Construction of the learner from the study's settings."""

from __future__ import annotations

from typing import Any

from grpo.common.errors import UserError
from grpo.common.world import ALONE, World
from grpo.learner.learner import Learner
from grpo.models.checkpoint import compile_layers
from grpo.models.traits import traits_of
from grpo.study.methods import RunConfig
from grpo.study.settings import LearnerSettings


def make_learner(settings: LearnerSettings, config: RunConfig, model: Any, tokenizer: Any, world: World = ALONE) -> Learner:
    """Build the learner of ``model``, with gradient checkpointing and compilation if the settings ask for them.

    Args:
        model: from :func:`grpo.models.checkpoint.load_model`.
        world: the processes that share the work.

    Raises:
        UserError: gradient checkpointing would change this model's results.
    """
    if settings.gradient_checkpointing:
        if not traits_of(model).recomputes_exactly:
            raise UserError(
                "params.yaml: learner.gradient_checkpointing: this model's layers give other results in training mode, which "
                "gradient checkpointing needs. Set it to false."
            )
        model.gradient_checkpointing_enable()
    why = traits_of(model).copied_because
    if why and settings.packing and settings.max_tokens_per_microbatch is not None and world.rank == 0:
        print(
            f"learner: padded microbatches of {settings.max_tokens_per_microbatch} tokens, not packed rows: {why}", flush=True
        )
    if settings.compile:
        compile_layers(model)
    return Learner(model, config, tokenizer.pad_token_id, settings, world)
