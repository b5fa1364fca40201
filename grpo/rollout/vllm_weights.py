"""Loading of a policy's weights into vLLM, and their verification by checksums."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from grpo.common.errors import UserError, reason
from grpo.models.checkpoint import named_as_saved
from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of


def put_weights(llm: Any, model: Any, device: str) -> None:
    """Load ``model``'s weights into a ``vllm.LLM`` in this process, and drop cached prefixes, computed with the old weights.

    vLLM's checkpoint loader reads them, and stacks some matrices (query, key and value; gate and up). Raises UserError: vLLM
    cannot take them.
    """
    ours: list[Exception] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in named_as_saved(model, weights_of(model)):
                if device == "cpu" and ".experts." in name:  # it would go on with the weights that it started with
                    raise UserError(f"vLLM's CPU build takes no new weights of a mixture of experts. {INSTEAD}")
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
# Where vLLM stacks a checkpoint's matrices: a pattern of their names, and what replaces it.
STACKED = {r"\.[qkv]_proj\.": ".qkv_proj.", r"\.(gate|up)_proj\.": ".gate_up_proj."}


def checksum(tensor: Tensor) -> tuple[float, float]:
    """Sum and sum of squares of all entries, in float64."""
    entries = tensor.detach().double()
    return entries.sum().item(), entries.pow(2).sum().item()


def checksums_of_vllm(llm: Any) -> dict[str, tuple[float, float]]:
    """The checksums of vLLM's parameters by name, without matrices that its CPU build has packed into its own format."""

    def of_worker(worker: Any) -> dict[str, tuple[float, float]]:
        parameters = worker.model_runner.model.named_parameters()
        return {name: checksum(parameter) for name, parameter in parameters if parameter.numel()}

    sums: dict[str, tuple[float, float]] = llm.collective_rpc(of_worker)[0]
    return sums


def checksums_of_policy(model: Any, names: Collection[str]) -> dict[str, tuple[float, float]]:
    """The checksums of a policy's weights by vLLM's names (``names``), where those of stacked matrices are summed."""
    sums: dict[str, tuple[float, float]] = {}
    with without_adapters(model, merge=True):
        for name, tensor in named_as_saved(model, weights_of(model)):
            stacks = (re.sub(pattern, there, name) for pattern, there in STACKED.items())
            if at := next((where for where in (name, *stacks) if where in names), None):
                first, second = sums.get(at, (0.0, 0.0))
                more = checksum(tensor)
                sums[at] = first + more[0], second + more[1]
    return sums


def require_equal_weights(llm: Any, model: Any) -> None:
    """Compare the checksums of vLLM's weights and ``model``'s.

    Raises:
        RuntimeError: the weights differ.
        UserError: vLLM holds this model's weights under names that are not known here.
    """
    theirs = checksums_of_vllm(llm)
    ours = checksums_of_policy(model, theirs)
    if unknown := sorted(theirs.keys() - ours.keys()):
        raise UserError(
            f"--check-weights: cannot compare {', '.join(unknown)} of vLLM with this model's weights. Leave it out."
        )
    for name, sums in theirs.items():
        # The order of summation differs, which changes the last digits.
        if any(abs(a - b) > 1e-9 * max(1.0, abs(b)) for a, b in zip(sums, ours[name], strict=True)):
            raise RuntimeError(f"engine and policy hold different weights: {name} has checksums {sums} and {ours[name]}")
