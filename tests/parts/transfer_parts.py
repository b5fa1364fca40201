"""What the tests of sent weights give to the Ray actors: vLLM's transfer over gloo, and engine and sender without vLLM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
import torch
from asynchronous_parts import NappingEngine, kill, make_learner
from torch import Tensor

from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_tokenizer
from grpo.study.methods import GrpoConfig
from grpo.training.asynchronous import actors, transfer
from grpo.training.asynchronous.transfer import RemoteLlm, Sender, Weights

# -------------------------------------------------------------------------- vLLM's own NCCL transfer, with gloo in NCCL's place


class Gloo:
    """Two processes on one machine; all of vLLM's ``PyNcclCommunicator`` that a transfer calls."""

    def __init__(self, address: str, port: int, rank: int):
        store = torch.distributed.TCPStore(address, port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
        self.group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        self.sent: list[int] = []  # bytes of each bucket

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()
        self.sent.append(tensor.nbytes)

    def destroy(self) -> None:
        self.group.shutdown()


def without_cuda() -> None:
    """In a process: NCCL's communicators are gloo's, and streams nothing. Buckets, lifecycle and loader stay vLLM's."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    still = SimpleNamespace(synchronize=lambda: None)
    for target, name, value in (
        (nccl_engine, "worker_init_process_group", lambda info, _: Gloo(info.master_address, info.master_port, 1)),
        (nccl_engine, "open_trainer_endpoint", lambda info: Gloo(info.master_address, info.master_port, 0)),
        (packed_tensor, "_get_streams", lambda _, buffers: (still,) * buffers),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda: None),
    ):
        patch.object(target, name, value).start()
    patch.object(transfer, "BUCKET", 20_000).start()  # bytes, so that there are several


def make_vllm_generator(folder: Path) -> tuple[Any, Any, Any]:
    from grpo.rollout.vllm_engine import VllmEngine, VllmSettings

    without_cuda()
    engine = VllmEngine(folder, None, VllmSettings("float32", "cpu", 0.5, 64, check_weights=True))
    return engine, Weights(), load_tokenizer(folder)


def make_vllm_learner(folder: Path, config: GrpoConfig) -> tuple[Learner, Callable[[Path], None]]:
    without_cuda()
    return make_learner(folder, config)


# ---------------------------------------------------------------------------------------------------- senders without vLLM


class LoadingEngine(NappingEngine):
    """Has of a ``vllm.LLM`` a way to be given weights."""

    _check = False

    @property
    def _llm(self) -> Any:
        return SimpleNamespace(load=self.model.load_state_dict)


class PlainSender(Sender):
    """Keeps and counts as the real one, and lets Ray carry the weights.

    Args:
        sent: file with the versions sent.
        dies: the actor that dies when version 4 is sent.
    """

    def __init__(self, kept: int, sent: Path, dies: str):
        super().__init__(kept)
        self.sent, self.dies = sent, dies

    def send(self, version: int, generator: Any) -> None:
        gpu, received, _ = ray.get(generator.receiver.remote())
        assert gpu is None and len(self.versions) <= self.kept
        if received == version:
            return
        if version == 4 and self.dies == "learner":
            os.kill(os.getpid(), signal.SIGKILL)
        if version == 4 and self.dies == "generator":
            kill(generator)
            raise RuntimeError("NCCL error: unhandled system error")
        RemoteLlm(generator).load(self.versions[version])
        with self.sent.open("a") as file:
            file.write(f"{version}\n")
        ray.get(generator.has_taken_over.remote(version))


def make_plainly_sending_learner(
    folder: Path, config: GrpoConfig, naps: float, sent: Path, dies: str
) -> tuple[Learner, Callable[[Path], None]]:
    patch.object(actors, "Sender", partial(PlainSender, sent=sent, dies=dies)).start()
    return make_learner(folder, config, naps)
