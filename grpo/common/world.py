"""The processes that train one run together, started by ``torchrun``; a single process is a world of size 1.

Each process runs the same loop. It samples and scores its share of the questions, and then all rollouts are gathered. So every
process has the whole batch and computes the same advantages, metrics and train batches as a single process would. Of a train
batch each computes the gradient of its share, and the gradients are all-reduced. (DistributedDataParallel does not fit, as it
needs the same number of backward passes in each process.) Only rank 0 writes files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.common.errors import AlreadyReported, ToBeResumed

if TYPE_CHECKING:  # torch is not needed to evaluate, psutil only to start processes
    import psutil
    from torch import Tensor

Item = TypeVar("Item")
# Timeout of communication, and of torchrun's wait for processes that finish their step and save the state (default: 30 s).
PATIENCE_S = timedelta(days=2).total_seconds()


@dataclass(frozen=True)
class World:
    """The process group; this process is ``rank`` of ``size``. Collective methods must be called by all processes."""

    rank: int = 0
    size: int = 1

    @property
    def share(self) -> slice:
        """This process's part of a list: every ``size``-th item, starting at ``rank``."""
        return slice(self.rank, None, self.size)

    def all_gather(self, value: Item) -> list[Item]:
        """Gather the values of all ranks in every process; tensors must be on the CPU."""
        if self.size == 1:
            return [value]
        from torch import distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def of_rank_0(self, value: Item) -> Item:
        """Broadcast rank 0's value to all processes."""
        return self.all_gather(value)[0]

    def join(self, share: Sequence[Item], each: int = 1) -> list[Item]:
        """Gather the :attr:`share` of every process into one list in the original order; pieces have ``each`` items."""
        parts = self.all_gather([share[start : start + each] for start in range(0, len(share), each)])
        pieces = range(sum(map(len, parts)))
        return [item for i in pieces for item in parts[i % self.size][i // self.size]]

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.size > 1:
            from torch import distributed as dist

            for tensor in tensors:
                dist.all_reduce(tensor)

    def destroy(self) -> None:
        """End the process group."""
        if self.size > 1:
            from torch import distributed as dist

            dist.destroy_process_group()


ALONE = World()


def started_by_torchrun() -> bool:
    """Whether ``torchrun`` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_rank_0() -> bool:
    """Whether this process writes files."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


@contextmanager
def stop_after_the_step() -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and the first Ctrl-C within the block; the yielded function returns whether a signal arrived.

    A second Ctrl-C ends the process at once. A scheduler may send SIGTERM several times and to many processes; only the first
    process of a run prints a message.
    """
    came: list[int] = []
    first = os.environ.get("RANK", "0") == "0"

    def note(signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and signum in came:
            raise KeyboardInterrupt
        if not came and first:  # os.write, as the signal may interrupt a print
            os.write(2, b"\nasked to stop: finishing the step and saving the state (press Ctrl-C twice to end at once)\n")
        came.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        # Under torchrun a process may get a second SIGTERM, from torchrun or its parent, after its state is saved.
        ignored = {signal.SIGTERM: signal.SIG_IGN} if came and "RANK" in os.environ else {}
        for number, handler in (before | ignored).items():
            signal.signal(number, handler)


def start_processes(n: int, device: str) -> None:
    """Run this same command in ``n`` processes on this machine and wait; with ``cuda`` each sees one GPU, so that vLLM uses it.

    Raises ToBeResumed: they were told to stop; rank 0 has saved the run's state. Raises AlreadyReported: one of them failed and
    has printed why.
    """
    import psutil  # a bare GPU machine lacks it, as it lacks pydantic, which the next import needs

    from grpo.common.imports import safe_environment

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    command = [*torchrun, *(["--virtual-local-rank"] if device == "cuda" else []), "-m", "grpo", *sys.argv[1:]]
    environment = safe_environment() | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{PATIENCE_S:.0f}"}
    started: list[psutil.Process] = []
    with stop_after_the_step() as told_to_stop, subprocess.Popen(command, env=environment) as process:
        try:
            while process.poll() is None and not told_to_stop():
                time.sleep(0.2)
            # Ctrl-C and Slurm signal torchrun too, others only this process. Send SIGTERM to torchrun's children, which accept
            # it any number of times; torchrun itself would abandon them at a second signal.
            started = [] if process.poll() is not None else psutil.Process(process.pid).children()
            for child in started:
                with suppress(psutil.NoSuchProcess):
                    child.terminate()
            process.wait()
        except KeyboardInterrupt:  # a second Ctrl-C
            for child in started:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            raise
    if process.returncode and told_to_stop():
        raise ToBeResumed("stopped. Run the same command again to go on from the last saved state.")
    if process.returncode:
        raise AlreadyReported(process.returncode)


def init_world(device: str) -> World:
    """Connect to the other processes of ``torchrun``: with gloo on ``cpu``, with NCCL on ``cuda``, one GPU each."""
    if not started_by_torchrun():
        return ALONE
    from torch import distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=PATIENCE_S))
    return World(dist.get_rank(), dist.get_world_size())
