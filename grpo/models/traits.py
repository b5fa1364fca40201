"""In what models differ for those who sample and train with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """What a model can be asked for.

    Attributes:
        context: the longest text, in tokens; None where there is no such limit.
        copied_because: why responses cannot share one copy of their prompt in this model; empty where they can.
        unsampled_because: why the transformers engine cannot sample it at all; empty where it can.
        linear_head: the logits are the last hidden states times the weight of ``get_output_embeddings()``, and nothing more.
        recomputes_exactly: gradient checkpointing, which needs layers in training mode, changes no result.
    """

    context: int | None = None
    copied_because: str = ""
    unsampled_because: str = ""
    linear_head: bool = True
    recomputes_exactly: bool = True


def traits_of(model: Any) -> Traits:
    """Those that :func:`grpo.models.checkpoint.load_model` found; of a model that was put together by hand, the usual ones."""
    found: Traits | None = getattr(model, "traits", None)
    return found or Traits(context=getattr(model.config, "max_position_embeddings", None))
