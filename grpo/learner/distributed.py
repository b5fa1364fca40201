"""The processes that compute one gradient together, as ``torchrun`` starts them; alone, a process is a world of one.

Rank 0 samples, scores and writes, and broadcasts what is to be computed; the other ranks are its workers. Each rank computes a
shard of a batch's rows, and the gradients are all-reduced. (Not DistributedDataParallel, which wants as many backward passes on
each rank.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo.common.errors import ToBeResumed
from grpo.common.interruption import stop_after_the_step

PASS_ON_AFTER_S = 40  # torchrun kills its processes 30 s after it was told to stop


class World:
    """The process group: this process is ``rank`` of ``world_size``."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.rank, self.world_size = rank, world_size

    @property
    def shard(self) -> slice:
        """This rank's part of a list: every ``world_size``-th, from its own rank on."""
        return slice(self.rank, None, self.world_size)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, in all processes."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in all processes; tensors must be on the CPU."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def destroy(self) -> None:
        """End the process group."""
        if self.world_size > 1:
            dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of a world."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_worker() -> bool:
    """Whether this process computes what rank 0 asks for."""
    return started_by_torchrun() and os.environ["RANK"] != "0"


def start_processes(n: int) -> None:
    """Run this very command in ``n`` processes on this machine, and wait for them.

    Raises:
        ToBeResumed: they were told to stop; rank 0 has saved the run's state.
        SystemExit: one of them failed; it has said why.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    with stop_after_the_step() as told_to_stop, subprocess.Popen([*torchrun, "-m", "grpo", *sys.argv[1:]]) as process:
        # A wish to stop comes to all of them at once, by Ctrl-C as from Slurm; where it came to this process alone, it is
        # passed on. Not at once, since torchrun lets go of its processes at a second one.
        waited_s = 0
        while process.poll() is None:
            time.sleep(1)
            waited_s += told_to_stop()
            if waited_s == PASS_ON_AFTER_S:
                process.terminate()
    if process.returncode and told_to_stop():
        raise ToBeResumed("stopped. Run the same command again to go on from the last saved state.")
    if process.returncode:
        raise SystemExit(process.returncode)


def init_world(device: str) -> World:
    """Connect with the other processes of ``torchrun``, through gloo on CPU and NCCL on GPUs.

    Args:
        device: ``cpu``, or ``cuda`` for one GPU each.
    """
    if not started_by_torchrun():
        return World()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The workers wait while rank 0 samples and evaluates, which may well take longer than the usual limit of minutes.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(days=2))
    return World(dist.get_rank(), dist.get_world_size())
