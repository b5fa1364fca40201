"""Weights from the learner's GPU to the generator's by vLLM's weight transfer: over NCCL between two GPUs, by CUDA IPC on one.

They go in packed buckets from the one GPU to the other, through no other process and not through the CPU's memory; Ray carries
what is said about them only. With :mod:`grpo.rollout.vllm_engine` this module knows vLLM's interfaces. Tested with vllm 0.32,
its CPU build: the order of calls and what arrives, over gloo in the place of NCCL. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError
from torch import Tensor

from grpo.models.lora import without_adapters
from grpo.models.sharding import weights_of
from grpo.rollout.vllm_weights import HEAD, _has_head, require_equal_weights

BUCKET = 2**28  # bytes; each side holds two of them for a moment


class Weights:
    """A policy's weights without the policy, which is all that vLLM wants of it."""

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        self._state = state or {}

    @property
    def dtype(self) -> torch.dtype:
        """What the policy computes in."""
        return next(iter(self._state.values())).dtype

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over."""
        self._state = state

    def state_dict(self) -> dict[str, Tensor]:
        """Give."""
        return self._state


@dataclass(frozen=True)
class Receiver:
    """What the sending side has to know of the generator.

    Attributes:
        gpu: see :func:`gpu`.
        version: of the weights that its engine has.
        checks: whether checksums are to be compared.
    """

    gpu: str | None
    version: int
    checks: bool


def gpu() -> str | None:
    """The UUID of the GPU that this process sees, or None without one."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None


def is_alive(generator: Any) -> bool:
    """Whether the generator's process has not died."""
    try:
        ray.get(generator.receiver.remote(), timeout=30)
    except RayActorError:
        return False
    except GetTimeoutError:
        pass  # it is busy
    return True


def weights_to_send(model: Any) -> dict[str, Tensor]:
    """A copy of a model's weights where it is: adapters merged, shares gathered, under the names of its checkpoint.

    A head that is the embedding has two names and one copy. It is sent under both: vLLM's CPU build, which packs the head into
    a form of its own, else went on with the old one, and checksums do not see what is packed.
    """
    copies: dict[int, Tensor] = {}
    with without_adapters(model, merge=True) as plain:
        owners = {name: id(parameter) for name, parameter in plain.state_dict(keep_vars=True).items()}
        for name, tensor in weights_of(plain):
            if owners[name] not in copies:
                copies[owners[name]] = tensor.clone()
    return {name: copies[owner] for name, owner in owners.items()}


def bucket_bytes(weights: dict[str, Tensor]) -> int:
    """The size of a bucket, into which the largest weight must fit."""
    return max(BUCKET, *(tensor.nbytes for tensor in weights.values()))


class Sender:
    """The learner's side. It is what vLLM calls a ``WeightSource``: asked for names, types and shapes, and for the weights.

    Args:
        kept: how many versions may be waited for at a time. The learner trains on while the generator is still about to take
            over an older version, so each is copied.
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
        """Copy the weights that ``model`` has now."""
        for old in sorted(self.versions)[: -self.kept + 1 or None]:
            del self.versions[old]
        self.versions[version] = weights_to_send(model)
        if torch.cuda.is_available():
            # Sending does not wait for training on a stream of its own, and must find the copy done.
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def send(self, version: int, generator: Any) -> None:
        """Bring a kept version to the generator, if it has another.

        Args:
            generator: Ray's handle of a :class:`grpo.training.asynchronous.actors.Generator`, which does nothing meanwhile.

        Raises:
            Exception: among others, the generator has died (over NCCL this call may also never end then), or other weights
                arrived.
        """
        receiver: Receiver = ray.get(generator.receiver.remote())
        if receiver.version == version:
            return
        llm = RemoteLlm(generator)
        if generator != self._generator:
            self._connect(llm, receiver.gpu, bucket_bytes(self.versions[version]))
            self._generator = generator
        self._sending = {name: tensor for name, tensor in self.versions[version].items() if name not in self._without}
        with torch.cuda.stream(self._stream):
            self._transfer.send_weights()
        llm.reset_prefix_cache()
        if receiver.checks:
            require_equal_weights(llm, Weights(self._sending))
        self._sending = {}  # or an old version would stay in memory
        ray.get(generator.has_taken_over.remote(version))

    def metadata(self) -> list[Any]:
        """Names, types and shapes, in the order in which the weights come."""
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
            self._transfer.shutdown()  # its other end has died
        self._without = () if _has_head(llm) else (HEAD,)  # as where vLLM is in the learner's process
        info: Any
        if theirs is not None and theirs == gpu():
            info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
        else:
            at = {"master_address": ray.util.get_node_ip_address(), "master_port": get_open_port()}
            info = NCCLTrainerInitInfo(rank=0, world_size=2, packed=True, packed_buffer_size_bytes=size, **at)
        llm.collective_rpc(_receive_by, args=(info.backend,))
        self._transfer = WeightTransferTrainerFactory.trainer_init(info, client=llm, source=self)  # type: ignore[arg-type]


class RemoteLlm:
    """The generator's ``vllm.LLM``, as far as the learner's process calls it. vLLM calls this a ``VLLMWeightSyncClient``."""

    def __init__(self, generator: Any):
        self._generator = generator

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet the sender."""
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Make ready for the weights of a checkpoint."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive a bucket (CUDA IPC), or all of them (NCCL)."""
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All is there."""
        self._call("finish_weight_update", weight_version)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, which hold old keys."""
        self._call("reset_prefix_cache")

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> Any:
        """Call a function with vLLM's worker."""
        return self._call("collective_rpc", method, None, args)

    def _call(self, method: str, *arguments: Any) -> Any:
        return ray.get(self._generator.call_llm.remote(method, *arguments))


def _receive_by(worker: Any, backend: str) -> None:
    """What ``LLM(weight_transfer_config=...)`` does when it has loaded its model, when it is known where both sides sit."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    inner = worker.worker  # vLLM hands over a wrapper
    if inner.weight_transfer_engine is not None:
        inner.weight_transfer_engine.shutdown()  # its sender has died
    inner.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), inner.vllm_config, inner.device, inner.model_runner.get_model()
    )
