"""Loading of a policy's weights into vLLM, and their verification by checksums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpo.models.lora import without_adapters
from grpo.models.sharding import computing_dtype, gather, weights_of


def put_weights(llm: Any, model: Any) -> None:
    """Load ``model``'s weights into a ``vllm.LLM`` in this process, and drop cached prefixes, computed with the old weights.

    vLLM's checkpoint loader reads them, and stacks some matrices (query, key and value; gate and up).
    """
    with without_adapters(model, merge=True):
        # With a tied head some models of vLLM (Gemma) have no head, and refuse its weight.
        without = () if has_head(llm) else (HEAD,)
        weights = ((name, tensor) for name, tensor in weights_of(model) if name not in without)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


HEAD = "lm_head.weight"
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def checksum(tensor: Tensor) -> tuple[float, float]:
    """Sum and sum of squares of all entries, in float64."""
    entries = tensor.detach().double()
    return entries.sum().item(), entries.pow(2).sum().item()


def has_head(llm: Any) -> bool:
    found: list[bool] = llm.collective_rpc(lambda worker: hasattr(worker.model_runner.model, "lm_head"))
    return found[0]


def checksums_of_vllm(llm: Any) -> dict[str, tuple[float, float]]:
    """:func:`checksum` of each of vLLM's parameters, except matrices that its CPU build has packed into its own format."""

    def of_worker(worker: Any) -> dict[str, tuple[float, float]]:
        parameters = worker.model_runner.model.named_parameters()
        return {name: checksum(parameter) for name, parameter in parameters if parameter.numel()}

    found: dict[str, tuple[float, float]] = llm.collective_rpc(of_worker)[0]
    return found


def checksums_of_policy(model: Any, names: Iterable[str]) -> dict[str, tuple[float, float]]:
    """:func:`checksum` of a policy's parameters, under vLLM's names."""
    with without_adapters(model, merge=True):
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    found = {}
    for name in names:
        stack = None if name in state else next((key for key in STACKED if f".{key}." in name), None)  # Phi-3 stacks them too
        parts = [name] if stack is None else [name.replace(stack, part) for part in STACKED[stack]]
        found[name] = checksum(torch.cat([gather(state[part], computing_dtype(model)) for part in parts]))
    return found


def require_equal_weights(llm: Any, model: Any) -> None:
    """Compare the checksums of vLLM's weights and ``model``'s.

    Raises:
        RuntimeError: the weights differ.
    """
    theirs = checksums_of_vllm(llm)
    ours = checksums_of_policy(model, theirs)
    for name, sums in theirs.items():
        # The order of summation differs, which changes the last digits.
        if any(abs(a - b) > 1e-9 * max(1.0, abs(b)) for a, b in zip(sums, ours[name], strict=True)):
            raise RuntimeError(f"engine and policy hold different weights: {name} has checksums {sums} and {ours[name]}")
