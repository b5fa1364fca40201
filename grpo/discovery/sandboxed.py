"""The inside of the sandbox: a script that gives up its rights, runs one untrusted program, and writes its points as JSON.

``grpo/discovery/sandbox.py`` starts it. Two mechanisms of the kernel confine the program. A filter of system calls (seccomp)
refuses the network, other processes, signals to them, and any way to write a file; Landlock refuses reading except in given
folders. Both are permanent.

The script imports nothing of the package, so that the program has access to as little as possible. It calls the C library by
``ctypes``, because Python has no functions for these calls; numbers and layouts are those of Linux's headers. libseccomp, which
systemd and apt require, makes the filter. ``benchmarks/NOTES.md`` says why no other sandbox is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

MB = 1_000_000
MAX_OPEN_FILES = MAX_PENDING_SIGNALS = 64
SPARE_BYTES = 32 * MB  # above the memory limit, for the report that it was reached
STACK_BYTES = 8 * MB
POINTS_FROM = ("run_code", "get_centers", "points")

LIBC: Any = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, which the C library does not name
READ_FILE, READ_DIR = 0b100, 0b1000

# ------------------------------------------------------------------------------------------------------------ the filter

# System calls that a program needs to compute and to read. For any other call, also of future kernels, the filter answers like
# a kernel that lacks it; the C library then falls back to older calls.
ALLOWED = """
close read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek fadvise64 readahead dup dup2 dup3
pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd
chdir fchdir
brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock mlockall munlockall membarrier pkey_alloc pkey_free
pkey_mprotect get_mempolicy set_mempolicy mbind
futex futex_waitv futex_wait futex_wake futex_requeue set_robust_list get_robust_list rseq set_tid_address arch_prctl exit
exit_group gettid getcpu sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max
sched_get_priority_min sched_rr_get_interval getpriority wait4 waitid
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause restart_syscall
signalfd4 alarm getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create
timerfd_settime timerfd_gettime time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep times
getpid getppid getpgid getpgrp getsid getuid geteuid getgid getegid getresuid getresgid getgroups capget getrlimit getrusage
sysinfo uname getrandom
"""
ALLOW, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.ENOSYS
BAD_MACHINE, MASKED_EQUAL = 2, 7
WORD = 0xFFFFFFFF
TO_WRITE = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x10000
PARTLY_ALLOWED = {  # index of an argument, mask, allowed values
    "open": (1, TO_WRITE, [0]),
    "openat": (2, TO_WRITE, [0]),
    "prlimit64": (2, 2**64 - 1, [0]),  # a null pointer: no new limits
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (1, WORD, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]),
    # Copies, locks, the size of a pipe; not F_SETOWN, nor F_SETFL, whose flags the parent's descriptors would share.
    "fcntl": (1, WORD, [0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032]),
    "prctl": (0, WORD, [3, 16, 0x53564D41]),  # PR_GET_DUMPABLE, PR_GET_NAME, names of memory
    "clone": (0, CLONE_THREAD, [CLONE_THREAD]),
}


class ArgumentComparison(ctypes.Structure):
    """``struct scmp_arg_cmp`` of libseccomp: an argument of a system call, a comparison, a bit mask and a value."""

    _fields_ = [("argument", ctypes.c_uint), ("how", ctypes.c_int), ("bits", ctypes.c_uint64), ("value", ctypes.c_uint64)]


def call(function: Any, *arguments: int | bytes | ctypes.Array[Any] | None) -> int:
    """Call a function of a C library, with whole numbers as C's long. Raises OSError if it returned a negative number."""
    result: int = function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def refuse_system_calls() -> None:
    """Block all system calls but the allowed ones, permanently.

    Raises OSError: libseccomp is missing, or the kernel has no filters.
    """
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context, pid = seccomp.seccomp_init(ctypes.c_uint(UNKNOWN)), os.getpid()
    call(seccomp.seccomp_attr_set, context, BAD_MACHINE, UNKNOWN)
    to_itself = {"kill": (0, WORD, [pid, 0]), "tkill": (0, WORD, [pid]), "tgkill": (0, WORD, [pid])}
    rules: list[tuple[str, list[ArgumentComparison]]] = [(name, []) for name in ALLOWED.split()]
    for name, (argument, bits, values) in (PARTLY_ALLOWED | to_itself).items():
        rules += [(name, [ArgumentComparison(argument, MASKED_EQUAL, bits, value)]) for value in values]
    for name, compared in rules:
        number, count = seccomp.seccomp_syscall_resolve_name(name.encode()), len(compared)
        if number >= 0:  # this machine has such a call
            call(seccomp.seccomp_rule_add_array, context, ALLOW, number, count, (ArgumentComparison * count)(*compared))
    call(seccomp.seccomp_load, context)


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 without Landlock."""
    try:
        return call(LIBC.syscall, CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict_reading(readable: Iterable[str]) -> None:
    """Restrict this process to reading the files and folders ``readable``, permanently."""
    rules = call(LIBC.syscall, CREATE_RULESET, struct.pack("=Q", READ_FILE | READ_DIR), 8, 0)
    for path in readable:
        with contextlib.suppress(OSError):  # most machines lack some of them
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = READ_FILE | READ_DIR if Path(path).is_dir() else READ_FILE
            call(LIBC.syscall, ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0)
            os.close(place)
    call(LIBC.syscall, RESTRICT_SELF, rules, 0)
    os.close(rules)


def protect(given: dict[str, Any]) -> None:
    """Set limits and apply all restrictions, permanently.

    Raises OSError: a restriction is not available; without Landlock, reading stays unrestricted. Raises SystemExit: a folder
    that must be closed can be read all the same.
    """
    limits = {
        resource.RLIMIT_AS: int(given["memory_mb"] * MB) + SPARE_BYTES,
        resource.RLIMIT_FSIZE: int(given["output_mb"] * MB) + 1,  # one more than is accepted
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_SIGPENDING: MAX_PENDING_SIGNALS,  # timers too; the kernel counts those of all processes of the user
    }
    for which, bound in limits.items():
        with contextlib.suppress(ValueError):  # a lower one is set already
            resource.setrlimit(which, (bound, bound))
    call(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != given["parent"]:  # it ended before the line above took effect
        os._exit(1)
    call(LIBC.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock_version():
        own = [f"/proc/{os.getpid()}/{name}" for name in ("fd", "maps", "status", "statm")]  # but not network and mounts
        restrict_reading([*given["readable"], *own])
        for folder in given["closed"]:
            with contextlib.suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
                sys.exit(f"{folder} can be read: libraries of Python or the system are there or above: work elsewhere.")
    refuse_system_calls()


def answer(source: bytes, name: str, memory_mb: float) -> str:
    """Run a program and return JSON: {"points": its points} or {"error": a message for its author}.

    Numbers are not converted; the verifier refuses all but integers.
    """
    module = types.ModuleType("program")  # not __main__, so that its script part does not run
    module.__file__ = name
    sys.modules["program"] = module
    spare = bytearray(SPARE_BYTES)
    try:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        holder = next((one for one in POINTS_FROM if one in module.__dict__), None)
        if holder is None:
            return json.dumps({"error": "The program defines neither run_code() nor get_centers() nor points"})
        value = module.__dict__[holder]
        return json.dumps({"points": value() if callable(value) else value}, default=listed)
    except BaseException as error:  # also SystemExit
        del spare
        return json.dumps({"error": explained(error, source, name, memory_mb)})


def listed(value: Any) -> Any:
    """Convert an array or a scalar of numpy for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the points are or hold a {type(value).__name__}, expected a list of lists of integers")


def explained(error: BaseException, source: bytes, name: str, memory_mb: float) -> str:
    """Describe an exception and the program's line that raised it, in one line."""
    own = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == name]
    number, what = own[-1] if own else 0, str(error)
    if isinstance(error, SyntaxError):
        what, number = error.msg, error.lineno or 0 if error.filename == name else number
    message = f"{type(error).__name__}: {what[:1000]}" if what else type(error).__name__
    if isinstance(error, SystemExit):
        message = f"The program ended itself ({message}) before it gave its points"
    elif isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        message += " (a program has no network here, starts no other processes, and writes no files)"
    elif isinstance(error, MemoryError):
        message += f" (it may use {memory_mb:g} MB)"
    lines = source.splitlines()
    text = lines[number - 1].decode("utf-8", "replace").strip()[:200] if 0 < number <= len(lines) else ""
    return message + (f" (line {number}: {text})" if number else "")


def main() -> NoReturn:
    """Run the program that standard input describes; the result file gets a line when the protections are active, then JSON.

    The program may write anything there, so its reader checks everything.
    """
    given = json.load(sys.stdin)
    source, name, result = given["source"].encode("latin-1"), given["name"], given["result"]
    sys.argv = [name]
    sys.path.append(given["packages"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # its output is reported even if it is killed
    protect(given)
    os.write(result, b"\n")
    left = memoryview(answer(source, name, given["memory_mb"]).encode())
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    with contextlib.suppress(OSError):  # the result is too large
        while left:
            left = left[os.write(result, left) :]
    os._exit(0)  # without the program's exit handlers


if __name__ == "__main__":
    main()
