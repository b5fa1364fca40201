"""Set up and measure this process: deterministic kernels, threads that sleep while they wait, memory."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def fix_cpu_kernels() -> None:
    """Make MKL's results reproducible; call it before torch multiplies any matrices.

    By default MKL chooses a kernel by how it splits the rows of a product among threads, and kernels for one or two rows round
    differently from those for many. A logit then changes by 1e-7, and sometimes a sampled token with it. In strict mode (Intel
    oneMKL Developer Guide, "Conditional Numerical Reproducibility") a row of a product does not depend on the batch, the memory
    layout or the number of threads.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def share_cpu_fairly() -> None:
    """Let OpenMP's threads sleep soon when they wait for one another; call it before torch is imported.

    By default they spin for long. On a busy machine the spinning thread holds the core that the other thread needs, and each of
    some thousand barriers takes a time slice: with both cores busy, an evaluation of 0.7 s took 46 s. With this it takes
    about 2 s, and on a quiet machine as long as before.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def start_threads(n: int) -> None:
    """Set torch to ``n`` threads, and keep freed memory; call it before anything is computed.

    MKL's vector functions choose their kernels at their first call, and threads that make this call at the same time may get
    different ones: of 1,000 processes that began with a cosine in two threads, 19 had another result in the second thread's
    part. Rotary embeddings begin with a cosine. One call in a single thread avoids this.
    """
    import torch

    torch.set_num_threads(1)
    torch.cos(torch.zeros(1))
    torch.set_num_threads(n)
    # Each operation allocates tensors and soon frees them. What goes back to the system comes back page by page, cleared, which
    # took a twentieth of the default study's evaluations: let glibc keep up to 1 GiB.
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # larger blocks are returned in any case
        mallopt(M_TRIM_THRESHOLD, 2**30)


def reset_peak(device: str) -> None:
    """Start a new measurement of ``cpu`` or of a GPU, such as ``cuda:1`` (with two GPUs, ``cuda`` would be the engine's)."""
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    # Linux only (proc_pid_clear_refs(5)); elsewhere the peak covers the whole life of the process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb(device: str) -> float:
    """Peak memory of a device in MiB since :func:`reset_peak`."""
    if device != "cpu":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
