"""Fully sharded data parallelism: of each weight a process holds only its share (Rajbhandari et al. 2020, "ZeRO",
arXiv 1910.02054, stage 3), by torch's ``fully_shard``.

The weights of one layer are gathered before it computes, and let go after it. Here it is said once what that means for a model;
of any other model each function gives what it would give without it.
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
    """What a sharded model knows of itself.

    Attributes:
        dtype: the precision that it computes in; the shares of weights that are trained are float32.
        empty: the model as it was, without its weights (on the device ``meta``).
    """

    dtype: torch.dtype
    empty: Any


def shard(model: Any, world: World, device: str) -> None:
    """Distribute a model's weights over the processes, in place: a layer at a time, and then what is not in any.

    Args:
        model: whole, the same in all processes; it may lie in the CPU's memory.
        world: of more than one process.
        device: ``cpu`` or ``cuda``, where the shares are to be.

    Raises:
        UserError: the model's layers are not found.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise UserError(
            "params.yaml: learner.fully_shard: this model keeps its layers in another way than most. Set it to false."
        )
    dtype, trained = model.dtype, any(p.requires_grad for p in model.parameters())
    sharding = Sharding(dtype, _without_weights(model))
    # Gradients are summed in float32, and microbatches' too; nothing is cast that the whole model would not cast.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    settings: dict[str, Any] = {"mesh": init_device_mesh(device, (world.size,)), "reshard_after_forward": True}
    for module in (*layers, model):
        if trained:
            module.float()  # of which the processes hold shares, as the optimizer's steps are too small for bfloat16
        fully_shard(module, mp_policy=policy, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum: each token's weight is worked out over the whole batch
            module.set_force_sum_reduction_for_comms(True)  # else gloo is asked for an operation that it has not
    model.sharding = sharding
    model.call = _call.__get__(model)
    register_fsdp_forward_method(model, "call")


def _call(model: Any, function: Callable[..., Result], *args: Any) -> Result:
    return function(model, *args)


def forward(model: Any, function: Callable[..., Result], *args: Any) -> Result:
    """``function(model, *args)`` as a forward pass of the model, for which it has its embeddings and its head."""
    result: Result = model.call(function, *args) if is_sharded(model) else function(model, *args)
    return result


def is_sharded(model: Any) -> bool:
    """Whether :func:`shard` has been called on it."""
    return hasattr(model, "sharding")


def computing_dtype(model: Any) -> torch.dtype:
    """The precision that the model computes in."""
    dtype: torch.dtype = model.sharding.dtype if is_sharded(model) else model.dtype
    return dtype


def shares(model: Any, rows: Sequence[Row], world: World) -> Iterator[tuple[Row, bool]]:
    """This process's part of the rows of a batch, each with whether it counts.

    All processes must take a sharded model through as many rows. Who has one less goes through one that does not count, and
    gradients, which are whole until then, are reduced in the backward pass of the last.
    """
    if not is_sharded(model):
        yield from ((row, True) for row in rows[world.share])
        return
    each = -(-len(rows) // world.size)
    for n in range(each):
        model.set_requires_gradient_sync(n == each - 1)
        mine = n * world.size + world.rank
        yield (rows[mine], True) if mine < len(rows) else (rows[-1], False)


# --------------------------------------------------------------------------------------------------- shares and wholes


def gather(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of a tensor of which each process has a share; all must call this. Any other tensor as it is.

    Args:
        dtype: what is gathered is rounded to this precision before, which halves what is sent.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        whole: Tensor = (tensor if dtype is None else tensor.to(dtype)).full_tensor()  # type: ignore[attr-defined]
    return whole


@torch.no_grad()
def share_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """``whole``, or where ``tensor`` is sharded this process's share of it, laid out as ``tensor`` is."""
    if not hasattr(tensor, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    there = whole.to(tensor.device, tensor.dtype)
    return distribute_tensor(there, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy ``whole``, or this process's share of it, into a tensor."""
    tensor.copy_(share_of(tensor, whole))


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The names and weights in a model's ``state_dict``, in the precision that it computes in, whole, one at a time."""
    for name, tensor in model.state_dict().items():
        yield name, gather(tensor.detach(), computing_dtype(model)) if is_sharded(model) else tensor.detach()


def load_weights(model: Any, weights: Mapping[str, Tensor], strict: bool = True) -> None:
    """``model.load_state_dict`` of whole weights."""
    if not is_sharded(model):
        model.load_state_dict(weights, strict=strict)
        return
    for name, tensor in model.state_dict().items():
        fill(tensor, weights[name])


def whole_model(model: Any, keep: bool) -> Any:
    """A model that is not sharded, with the weights of ``model`` as they are now; all processes must call this.

    Args:
        keep: whether this process gets one, in the CPU's memory; else it only hands over its shares, and gets None.
    """
    if not is_sharded(model):
        return model
    parameters: dict[int, nn.Parameter] = {}  # by the share: a head that is the embedding has two names
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


def _without_weights(model: Any) -> Any:
    """A copy whose parameters take no memory."""
    meta = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, meta)
