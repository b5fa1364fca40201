"""Starting the engine that a study names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

from grpo.common.errors import UserError
from grpo.common.world import ALONE, World
from grpo.rollout.engine import Engine
from grpo.study.methods import GrpoConfig, RunConfig
from grpo.study.schema import Study


class Checkpoint(NamedTuple):
    """A checkpoint's folder, and what was loaded of it; vLLM without a model samples with the folder's weights."""

    folder: Path
    model: Any
    tokenizer: Any


def make_engine(
    study: Study,
    checkpoint: Checkpoint,
    check_weights: bool = False,
    config: RunConfig | None = None,
    world: World = ALONE,
) -> Engine:
    """An engine that samples with the model's weights.

    Args:
        check_weights: with vLLM, compare checksums after each update.
        config: of the run that samples; None in the stages that only evaluate.
        world: the processes that train it together.

    Raises:
        UserError: an engine that cannot be started.
    """
    engine, learner = study.engine, study.learner
    folder, model, tokenizer = checkpoint
    if engine.name == "vllm":
        from grpo.rollout.vllm_engine import VllmEngine, VllmSettings

        settings = VllmSettings(
            engine.dtype,
            engine.device,
            memory_share(study, config),
            engine.max_batch_size,
            sleeps(study, follows_policy=model is not None),
            check_weights,
        )
        return VllmEngine(folder, model, settings, world)
    if engine.device != learner.device:
        raise UserError(
            f"params.yaml: engine.device ({engine.device}) and learner.device ({learner.device}) must be the same "
            "with engine.name transformers, because engine and learner share the model."
        )
    from grpo.rollout.transformers_engine import TransformersEngine

    # A learner that shards the model has no use for it whole; stages that only evaluate have none.
    own = copy.deepcopy(model).to(engine.device) if learner.fully_shard and world.size > 1 else model
    return TransformersEngine(own, tokenizer, engine.max_batch_size, world)


def memory_share(study: Study, config: RunConfig | None) -> float:
    """Share of the GPU's memory that vLLM takes: the GRPO run's own, and the study's for all others, which have none."""
    return (config if isinstance(config, GrpoConfig) else study.grpo).gpu_memory_utilization


def sleeps(study: Study, follows_policy: bool) -> bool:
    """Whether vLLM gives its memory back between two calls, so that the learner has it meanwhile.

    That takes a learner on the same GPU, whose weights are put in on waking. A stage that only evaluates has none, nor has an
    asynchronous run's generator, which works while the learner does.

    Args:
        follows_policy: the engine samples with the weights of a model in this process.
    """
    engine, learner = ("cuda:0" if device == "cuda" else device for device in (study.engine.device, study.learner.device))
    return study.engine.sleep_level > 0 and follows_policy and engine == learner
