"""Traits of models that matter for sampling and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """Traits of a model.

    Attributes:
        context: longest text, in tokens; None without a limit.
        copied_because: why responses cannot share one copy of their prompt; empty if they can.
        unsampled_because: why the transformers engine cannot sample the model; empty if it can.
        linear_head: whether the logits are just the last hidden states times the weight of ``get_output_embeddings()``.
        recomputes_exactly: whether gradient checkpointing, which needs layers in training mode, changes no result.
    """

    context: int | None = None
    copied_because: str = ""
    unsampled_because: str = ""
    linear_head: bool = True
    recomputes_exactly: bool = True


def traits_of(model: Any) -> Traits:
    """Traits that :func:`grpo.models.checkpoint.load_model` found; the defaults for a model built otherwise."""
    found: Traits | None = getattr(model, "traits", None)
    return found or Traits(context=getattr(model.config, "max_position_embeddings", None))
