"""Weight transfer from the learner's GPU to the generator's with vLLM: NCCL between two GPUs, CUDA IPC on one.

Weights move in packed buckets from GPU to GPU, not through other processes or CPU memory; Ray carries only the calls about
them. Besides :mod:`grpo.rollout.vllm_engine`, only this module uses vLLM's interfaces. Tested with the CPU build of vllm 0.32:
the order of the calls and the weights received, over gloo instead of NCCL. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor

from grpo.models.checkpoint import named_as_saved
from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of
from grpo.rollout.vllm_weights import HEAD, has_head, require_equal_weights

BUCKET = 2**28  # bytes; each side holds up to two buckets


class Weights:
    """A policy's weights without the policy, in place of the model where only weights are needed.

    They have the names and shapes of the policy's checkpoint (:func:`grpo.models.checkpoint.named_as_saved`).
    """

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        self._state = state or {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Tensor]:
        return self._state


def gpu() -> str | None:
    """UUID of the GPU that this process sees; None without a GPU."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None


def weights_to_send(model: Any) -> dict[str, Tensor]:
    """Copy a model's weights on its device: adapters merged, shards gathered, under the names of its checkpoint.

    A tied head has two names and one copy, and is sent under both. vLLM's CPU build packs the head into its own format: without
    the second name it kept the old head, which the checksums do not cover.
    """
    with without_adapters(model, merge=True) as plain:
        return dict(named_as_saved(plain, _copies(plain)))


def _copies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and copies of a model's weights."""
    copies: dict[int, Tensor] = {}
    owners = {name: id(parameter) for name, parameter in model.state_dict(keep_vars=True).items()}
    for name, tensor in weights_of(model):
        if owners[name] not in copies:
            copies[owners[name]] = tensor.clone()
        yield name, copies[owners[name]]


def bucket_bytes(weights: dict[str, Tensor]) -> int:
    """Bucket size (bytes) that holds the largest weight."""
    return max(BUCKET, *(tensor.nbytes for tensor in weights.values()))


class Sender:
    """The learner's side of the transfer, a ``WeightSource`` in vLLM's terms: gives names, types, shapes, and the weights.

    Args:
        kept: number of versions to keep copies of. The learner trains on while the generator still waits for older versions.
    """

    def __init__(self, kept: int):
        self.kept = kept
        self.versions: dict[int, dict[str, Tensor]] = {}
        self._sending: dict[str, Tensor] = {}
        self._without: tuple[str, ...] = ()
        self._transfer: Any = None
        self._generator: Any = None
        self._stream: Any = None

    def keep(self, model: Any, version: int) -> None:
        """Copy the current weights of ``model``."""
        for old in sorted(self.versions)[: -self.kept + 1 or None]:
            del self.versions[old]
        self.versions[version] = weights_to_send(model)
        if torch.cuda.is_available():
            # A stream of its own lets sending overlap with training; the copy must be complete before.
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def send(self, version: int, generator: Any) -> None:
        """Send a kept version to the generator, if that has another one.

        Args:
            generator: Ray handle of an idle :class:`grpo.training.asynchronous.actors.Generator`.

        Raises:
            Exception: among others, the generator has died (over NCCL the call may then never return), or its checksums differ.
        """
        theirs, received, checks = ray.get(generator.receiver.remote())
        if received == version:
            return
        llm = RemoteLlm(generator)
        if generator != self._generator:
            self._connect(llm, theirs, bucket_bytes(self.versions[version]))
            self._generator = generator
        self._sending = {name: tensor for name, tensor in self.versions[version].items() if name not in self._without}
        with torch.cuda.stream(self._stream):
            self._transfer.send_weights()
        llm.reset_prefix_cache()
        if checks:
            require_equal_weights(llm, Weights(self._sending))
        self._sending = {}  # frees the memory of an old version
        ray.get(generator.has_taken_over.remote(version))

    def metadata(self) -> list[Any]:
        """Names, types and shapes, in the order of the weights."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._sending.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._sending.items())

    def _connect(self, llm: RemoteLlm, theirs: str | None, size: int) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        if self._transfer is not None:
            self._transfer.shutdown()  # the old generator has died
        self._without = () if has_head(llm) else (HEAD,)  # as in grpo.rollout.vllm_weights.put_weights
        info: Any
        if theirs is not None and theirs == gpu():
            info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
        else:
            at = {"master_address": ray.util.get_node_ip_address(), "master_port": get_open_port()}
            info = NCCLTrainerInitInfo(rank=0, world_size=2, packed=True, packed_buffer_size_bytes=size, **at)
        llm.collective_rpc(_receive_by, args=(info.backend,))
        self._transfer = WeightTransferTrainerFactory.trainer_init(info, client=llm, source=self)  # type: ignore[arg-type]


class RemoteLlm:
    """The generator's ``vllm.LLM``, called from the learner's process; a ``VLLMWeightSyncClient`` in vLLM's terms."""

    def __init__(self, generator: Any):
        self._generator = generator

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the sender."""
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def update_weights(self, update_info: Any) -> None:
        """Receive a bucket (CUDA IPC), or all of them (NCCL)."""
        self._call("update_weights", {"update_info": update_info})

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(self._generator.call_llm.remote(method, *arguments, **named))


def _receive_by(worker: Any, backend: str) -> None:
    """Do what ``LLM(weight_transfer_config=...)`` does after loading its model, now that both sides are known."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    inner = worker.worker  # vLLM hands over a wrapper
    if inner.weight_transfer_engine is not None:
        inner.weight_transfer_engine.shutdown()  # the old sender has died
    inner.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), inner.vllm_config, inner.device, inner.model_runner.get_model()
    )
