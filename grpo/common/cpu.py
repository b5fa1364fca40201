"""How the CPU's libraries are set up: the same bits every time, threads that let others work while they wait, and memory that
is not asked for twice.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def fix_cpu_kernels() -> None:
    """Ask MKL for sums whose order depends on the numbers' shapes alone; call it before torch multiplies any matrices.

    By default MKL chooses a kernel by how it happens to share out the rows of a product, and kernels for one or two rows
    round differently from those for many: a logit then moves by 1e-7, and now and then a sampled token with it. Its strict
    mode (Intel oneMKL Developer Guide, "Conditional Numerical Reproducibility") makes a row of a product the same whatever
    the batch, memory layout and number of threads.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def share_cpu_fairly() -> None:
    """Let OpenMP's threads go to sleep soon when they wait for one another; call it before torch is imported.

    By default they spin for long. On a machine that does something else as well, the spinning thread then holds the core that
    the awaited one needs, and each of some thousand barriers lasts a time slice: with both cores of a machine busy, an
    evaluation of 0.7 s took 46 s. With this it takes some 2 s, and on a quiet machine as long as before.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def start_threads(n: int) -> None:
    """Let torch compute in ``n`` threads; call it before anything is computed.

    MKL's vector functions choose their kernels at their first call, and threads that make it at the same time may get others:
    of 1,000 processes whose first was a cosine in two threads, 19 had another result in the second thread's part. Rotary
    embeddings begin with one, so such a process's first prompts got other keys. One call in one thread settles it.
    """
    import torch

    torch.set_num_threads(1)
    torch.cos(torch.zeros(1))
    torch.set_num_threads(n)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Have the C library keep up to a GiB that is freed, instead of handing it back to the system.

    Each operation makes a tensor anew, and frees it soon. Memory that went back in between comes again page by page, cleared by
    the system: a twentieth of the time of the default study's evaluations. Does nothing where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # what is larger goes back all the same
        mallopt(M_TRIM_THRESHOLD, 2**30)
