"""Starting the engine that a study names."""

from __future__ import annotations

from typing import Any

from grpo.errors import UserError
from grpo.rollout.engine import Engine
from grpo.study import Study


def make_engine(study: Study, model: Any, tokenizer: Any) -> Engine:
    """An engine that samples with ``model``'s weights.

    Raises:
        UserError: an engine that this version cannot start.
    """
    if study.engine.name == "vllm":
        raise UserError(
            "params.yaml: engine.name: this version samples with `transformers` only (slower, the same distribution). "
            "Set engine.name to transformers."
        )
    if study.engine.device != study.learner.device:
        raise UserError(
            f"params.yaml: engine.device ({study.engine.device}) and learner.device ({study.learner.device}) must be the same "
            "with engine.name transformers, because engine and learner share the model."
        )
    from grpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, tokenizer, study.engine.max_batch_size)
