"""Checksums of vLLM's weights and of a policy's, which show whether vLLM has the policy's weights."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor

from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of

Sums = dict[str, tuple[float, float]]  # by name: sum and sum of squares of all entries, in float64
# Where vLLM stacks a checkpoint's matrices: a pattern of their names, and what replaces it.
STACKED = {r"\.[qkv]_proj\.": ".qkv_proj.", r"\.(gate|up)_proj\.": ".gate_up_proj."}


def checksum(tensor: Tensor) -> tuple[float, float]:
    entries = tensor.detach().double()
    return entries.sum().item(), entries.pow(2).sum().item()


def checksums_of_vllm(llm: Any) -> Sums:
    """The checksums of vLLM's parameters by name, without matrices that its CPU build has packed into its own format."""

    def of_worker(worker: Any) -> Sums:
        parameters = worker.model_runner.model.named_parameters()
        return {name: checksum(parameter) for name, parameter in parameters if parameter.numel()}

    sums: Sums = llm.collective_rpc(of_worker)[0]
    return sums


def checksums_of_policy(model: Any, names: Sums) -> Sums:
    """The checksums of a policy's weights by vLLM's ``names``; those of matrices that vLLM stacks are summed."""
    sums: Sums = {}
    with without_adapters(model, merge=True):
        for name, tensor in weights_of(model):
            stacks = (re.sub(pattern, there, name) for pattern, there in STACKED.items())
            if at := next((where for where in (name, *stacks) if where in names), None):
                first, second = sums.get(at, (0.0, 0.0))
                more = checksum(tensor)
                sums[at] = first + more[0], second + more[1]
    return sums


def are_equal(theirs: Sums, ours: Sums) -> bool:
    """Whether all of ``theirs`` are those of ``ours``, but for the last digits, which the order of summation changes."""
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for n in theirs for a, b in zip(theirs[n], ours[n], strict=True))
