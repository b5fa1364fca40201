"""Construction of the engine from the study's settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from grpo.common.world import ALONE, World
from grpo.rollout.engine import Engine
from grpo.study.config import GrpoConfig, RunConfig
from grpo.study.schema import Study


def make_engine(
    study: Study, folder: Path, model: Any, tokenizer: Any, config: RunConfig | None = None, world: World = ALONE
) -> Engine:
    """Start an engine that samples with the model's weights; vLLM needs no model to sample with those of the folder.

    Raises UserError if the engine cannot be started. ``config``: of the run; None in stages that only evaluate. ``world``: the
    processes that train the run together.
    """
    engine, learner = study.engine, study.learner
    if engine.name == "vllm":
        from grpo.rollout.vllm_engine import VllmEngine, VllmSettings

        settings = VllmSettings(
            engine.dtype,
            engine.device,
            memory_share(study, config),
            engine.max_batch_size,
            sleeps(study, follows_policy=model is not None),
        )
        return VllmEngine(folder, model, settings, world)
    from grpo.rollout.transformers_engine import TransformersEngine

    # A sharded learner cannot share its model, so the engine gets a copy. Stages that only evaluate have no learner.
    own = copy.deepcopy(model).to(engine.device) if learner.fully_shard and world.size > 1 else model
    return TransformersEngine(own, tokenizer, engine.max_batch_size, world)


def memory_share(study: Study, config: RunConfig | None) -> float:
    """Share of GPU memory for vLLM: the run's own in GRPO, else the study's, because other methods have no such setting."""
    return (config if isinstance(config, GrpoConfig) else study.grpo).gpu_memory_utilization


def sleeps(study: Study, follows_policy: bool) -> bool:
    """Whether vLLM releases its memory to the learner between two calls.

    That requires a learner on the same GPU, whose weights vLLM loads when it wakes. Stages that only evaluate have no learner,
    and the generator of an asynchronous run works concurrently with it. ``follows_policy``: whether the engine samples with the
    weights of a model in this process.
    """
    engine, learner = ("cuda:0" if device == "cuda" else device for device in (study.engine.device, study.learner.device))
    return study.engine.sleep_level > 0 and follows_policy and engine == learner
