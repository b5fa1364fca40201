"""Starting the engine that a study names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo.errors import UserError
from grpo.rollout.engine import Engine
from grpo.study import Study


def make_engine(study: Study, folder: Path, model: Any, tokenizer: Any, check_weights: bool = False) -> Engine:
    """An engine that samples with ``model``'s weights.

    Args:
        folder: the checkpoint that ``model`` was loaded from.
        model: None with vLLM samples with the folder's weights.
        check_weights: with vLLM, compare checksums after each update.

    Raises:
        UserError: an engine that cannot be started.
    """
    engine, learner = study.engine, study.learner
    if engine.name == "vllm":
        if engine.device not in {"cpu", "cuda", "cuda:0"}:
            raise UserError(
                f"params.yaml: engine.device ({engine.device}): vLLM takes the first GPU it sees. Set it to cuda:0, and "
                "learner.device to cuda:1 for a GPU each."
            )
        from grpo.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            folder,
            model,
            engine.dtype,
            engine.device,
            study.grpo.gpu_memory_utilization,
            engine.max_batch_size,
            engine.sleep_level,
            check_weights,
        )
    if engine.device != learner.device:
        raise UserError(
            f"params.yaml: engine.device ({engine.device}) and learner.device ({learner.device}) must be the same "
            "with engine.name transformers, because engine and learner share the model."
        )
    from grpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, tokenizer, engine.max_batch_size)
