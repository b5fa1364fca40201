"""Loading of a policy's weights into vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from grpo.common.errors import UserError, reason
from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of


def put_weights(llm: Any, model: Any) -> None:
    """Load ``model``'s weights into a ``vllm.LLM`` in this process, and drop cached prefixes, computed with the old weights.

    vLLM's checkpoint loader reads them, and stacks some matrices (query, key and value; gate and up). Raises UserError: vLLM
    cannot take them; it takes none of a mixture of experts, which transformers stacks in another way than checkpoints do.
    """
    if any(".experts." in name for name in model.state_dict()):
        raise UserError(f"vLLM takes no new weights of a mixture of experts. {INSTEAD}")
    ours: list[Exception] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in weights_of(model):
                if name not in without:
                    yield name, tensor
        except Exception as error:  # vLLM asks for the weights while it loads, so this passes through its loader
            ours.append(error)
            raise

    with without_adapters(model, merge=True):
        # With a tied head some models of vLLM (Gemma) have no head, and refuse its weight.
        without = () if llm.collective_rpc(lambda worker: hasattr(worker.model_runner.model, "lm_head"))[0] else (HEAD,)
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        except REFUSALS as error:
            if ours:
                raise
            raise UserError(f"vLLM cannot take the weights of this model ({reason(error)}). {INSTEAD}") from error
    llm.reset_prefix_cache()


# What vLLM's loaders raise for a weight of a name or shape that they do not know.
REFUSALS = (AssertionError, KeyError, ValueError)
INSTEAD = "Set engine.name to transformers in params.yaml."
HEAD = "lm_head.weight"
