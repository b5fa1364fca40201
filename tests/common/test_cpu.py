"""What the same bits every time rest on, each tried in processes of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def _has_strict_mode() -> bool:
    cpu = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpu.exists() and "GenuineIntel" in cpu.read_text()


@pytest.mark.skipif(not _has_strict_mode(), reason="MKL promises its strict mode on Intel's processors only")
def test_a_product_does_not_depend_on_how_its_rows_are_shared_out() -> None:
    """What `grpo` runs under: row by row, in two threads or in one, the same bits (without it they differ)."""
    script = (
        "from grpo.common.process import fix_cpu_kernels; fix_cpu_kernels()\n"
        "import torch; torch.manual_seed(0); x, w = torch.randn(512, 64), torch.randn(768, 64)\n"
        "def product(rows, threads): torch.set_num_threads(threads); return torch.nn.functional.linear(x[:rows], w)\n"
        "full = product(512, 2)\n"
        "assert all(torch.equal(product(n, t), full[:n]) for n in (1, 2, 3, 100, 512) for t in (1, 2, 3))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc")
def test_freed_memory_is_used_again() -> None:
    """One, three and ten tensors at a time, of 1, 4 and 8 MB: the second time the system hands out no more pages."""
    script = (
        "import resource, torch\n"
        "from grpo.common.process import start_threads; start_threads(1)\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for size in (2**18, 2**20, 2**21):\n"
        "        for n in (1, 3, 10, 10, 3, 1) * 3: [torch.ones(size) for _ in range(n)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "first, second = faults(), faults()\n"
        "assert second < 1000, (first, second)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.nightly
def test_the_first_computation_of_a_process_is_like_any_other() -> None:
    """300 processes that begin with a cosine in two threads; without `start_threads` about 2% of them differ."""
    script = """
import hashlib, os, torch
from grpo.common.process import start_threads

torch.set_num_threads(1)  # the parent must start no threads: they do not survive a fork
x = torch.linspace(0, 150, 512 * 150 * 16)
results = set()
for _ in range(300):
    reading, writing = os.pipe()
    if os.fork() == 0:
        start_threads(2)
        os.write(writing, hashlib.sha1(torch.cos(x).numpy().tobytes()).digest())
        os._exit(0)
    os.close(writing)
    results.add(os.read(reading, 100))
    os.close(reading)
    os.wait()
assert len(results) == 1 and b"" not in results, results
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
