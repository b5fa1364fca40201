"""The lock of a run: what is said where the file system has none."""

from __future__ import annotations

import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

# fcntl(…, F_SETLK, …) answers ENOLCK, as on NFS without a lock service.
WITHOUT_LOCKS = """
import ctypes
from pathlib import Path
from grpo.common.errors import UserError
from grpo.common.lock import only_one
class Compare(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_uint), ("how", ctypes.c_int), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]
seccomp = ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint(0x7FFF0000)))
number = seccomp.seccomp_syscall_resolve_name(b"fcntl")
rule = (Compare * 1)(Compare(1, 4, 6, 0))
assert seccomp.seccomp_rule_add_array(context, ctypes.c_uint(0x50000 | 37), number, ctypes.c_uint(1), rule) == 0
assert seccomp.seccomp_load(context) == 0
try:
    with only_one(Path("here/a.lock"), "the run"):
        print("held")
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(not find_library("seccomp"), reason="takes a system call away with libseccomp")
def test_a_file_system_without_locks_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LOCKS], cwd=tmp_path, text=True, capture_output=True, check=True)
    assert done.stdout.startswith("here/a.lock: the file system has no locks (No locks available). Put the project on")
