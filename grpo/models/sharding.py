"""Fully sharded data parallelism with torch's ``fully_shard``: each process holds a share of each weight.

Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, stage 3. The weights of a layer are gathered before it computes and freed
after. All code about sharding is here; every function also takes a model that is not sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from grpo.common.errors import UserError

if TYPE_CHECKING:
    from grpo.common.world import World

Result = TypeVar("Result")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Sharding:
    """Record of a sharded model."""

    dtype: torch.dtype  # precision of its computation; the shares of trained weights are float32
    empty: Any  # copy of the model before sharding, without weights (on the device ``meta``)


def shard(model: Any, world: World, device: str) -> None:
    """Distribute a model's weights over the processes, in place: layer by layer, then the weights outside of layers.

    Raises UserError if the model's layers are not found.

    Args:
        model: whole and equal in all processes; it may be in CPU memory.
        world: more than one process.
        device: ``cpu`` or ``cuda``, for the shares.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise UserError(
            "params.yaml: learner.fully_shard: this model keeps its layers in another way than most. Set it to false."
        )
    dtype, trained = model.dtype, any(p.requires_grad for p in model.parameters())
    sharding = Sharding(dtype, without_weights(model))
    # Gradients are reduced in float32, and inputs are not cast, as without sharding.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    settings: dict[str, Any] = {"mesh": init_device_mesh(device, (world.size,)), "reshard_after_forward": True}
    for module in (*layers, model):
        if trained:
            module.float()  # the shares, because the optimizer's steps are too small for bfloat16
        fully_shard(module, mp_policy=policy, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum: each token's weight is already relative to the whole batch
            module.set_force_sum_reduction_for_comms(True)  # else it uses an operation that gloo does not have
    model.sharding = sharding
    model.call = _call.__get__(model)
    register_fsdp_forward_method(model, "call")


def _call(model: Any, function: Callable[..., Result], *args: Any) -> Result:
    return function(model, *args)


def forward(model: Any, function: Callable[..., Result], *args: Any) -> Result:
    """Call ``function(model, *args)`` as a forward pass of the model, with its embeddings and head gathered."""
    result: Result = model.call(function, *args) if is_sharded(model) else function(model, *args)
    return result


def is_sharded(model: Any) -> bool:
    return hasattr(model, "sharding")


def computing_dtype(model: Any) -> torch.dtype:
    """Precision of the model's computation."""
    dtype: torch.dtype = model.sharding.dtype if is_sharded(model) else model.dtype
    return dtype


def shares(model: Any, rows: Sequence[Row], world: World) -> Iterator[tuple[Row, bool]]:
    """Yield this process's rows of a batch, each with a flag whether it counts.

    All processes must run a sharded model on equally many rows, so a process with one row less runs one that does not count.
    Gradients are reduced in the backward pass of the last row.
    """
    if not is_sharded(model):
        yield from ((row, True) for row in rows[world.share])
        return
    each = -(-len(rows) // world.size)
    for n in range(each):
        model.set_requires_gradient_sync(n == each - 1)
        mine = n * world.size + world.rank
        yield (rows[mine], True) if mine < len(rows) else (rows[-1], False)


def gather(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather a sharded tensor, in a call by all processes; return any other tensor unchanged.

    ``dtype``: round the shares to this precision first, which may halve the traffic.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        whole: Tensor = (tensor if dtype is None else tensor.to(dtype)).full_tensor()  # type: ignore[attr-defined]
    return whole


@torch.no_grad()
def share_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """Cut from ``whole`` this process's share, laid out as ``tensor``; all of it if ``tensor`` is not sharded."""
    if not hasattr(tensor, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    there = whole.to(tensor.device, tensor.dtype)
    return distribute_tensor(there, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole weights of a model's ``state_dict``, in its computing precision, one at a time."""
    for name, tensor in model.state_dict().items():
        yield name, gather(tensor.detach(), computing_dtype(model)) if is_sharded(model) else tensor.detach()


def load_weights(model: Any, weights: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load whole weights, as ``model.load_state_dict`` does."""
    if not is_sharded(model):
        model.load_state_dict(weights, strict=strict)
        return
    for name, tensor in model.state_dict().items():
        tensor.copy_(share_of(tensor, weights[name]))


def whole_model(model: Any, keep: bool) -> Any:
    """Gather a sharded model into a whole one, in a call by all processes.

    ``keep``: build the model in this process's CPU memory; else only contribute the shares, and return None.
    """
    if not is_sharded(model):
        return model
    parameters: dict[int, nn.Parameter] = {}  # by id: a tied head has two names
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in parameters:
            whole = gather(tensor.detach(), model.sharding.dtype)
            parameters[id(tensor)] = nn.Parameter(whole.cpu() if keep else torch.empty(0), tensor.requires_grad)
        weights[name] = parameters[id(tensor)]
    if not keep:
        return None
    made = copy.deepcopy(model.sharding.empty)
    made.load_state_dict(weights, assign=True)
    return made


def without_weights(model: Any) -> Any:
    """Copy a model with parameters that take no memory."""
    meta = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, meta)
