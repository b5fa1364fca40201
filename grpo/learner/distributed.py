"""The processes that compute one gradient together, as ``torchrun`` starts them; alone, a process is a world of one.

The first process leads: it samples, scores and writes, and tells the others what to compute. Each takes its share of a batch's
rows, and the gradients are summed. (Not DistributedDataParallel, which wants as many backward passes in each process.)
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
    """This process among ``size``, of which 0 leads."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @property
    def share(self) -> slice:
        """Every ``size``-th of a list, from this process's own on."""
        return slice(self.rank, None, self.size)

    def from_leader(self, value: Any = None) -> Any:
        """The leader's value, in all processes; those that follow wait for it."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def everyones(self, value: Any) -> list[Any]:
        """What each process has, in all of them; tensors must be on the CPU."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def leave(self) -> None:
        """End the connection."""
        if self.size > 1:
            dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of a world."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def follows() -> bool:
    """Whether this process is told what to do by another one."""
    return started_by_torchrun() and os.environ["RANK"] != "0"


def start_processes(n: int) -> None:
    """Run this very command in ``n`` processes on this machine, and wait for them.

    Raises:
        ToBeResumed: they were told to stop; the first one has saved the run's state.
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


def join_world(device: str) -> World:
    """Connect with the other processes of ``torchrun``, through gloo on CPU and NCCL on GPUs.

    Args:
        device: ``cpu``, or ``cuda`` for one GPU each.
    """
    if not started_by_torchrun():
        return World()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while the leader samples and evaluates, which may well take longer than the usual limit of minutes.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(days=2))
    return World(dist.get_rank(), dist.get_world_size())
