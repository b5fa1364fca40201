"""Restrictions on a process before it runs an untrusted program: system calls, files, capabilities and resources.

``grpo/discovery/sandboxed.py`` loads this file by path, so it imports nothing of the package. It calls the C library by
``ctypes``, because Python has no functions for these calls; numbers and layouts are those of Linux's headers. libseccomp, which
systemd and apt require, makes the filter of system calls. ``benchmarks/NOTES.md`` says why no other sandbox is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import resource
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MB = 1_000_000
MAX_OPEN_FILES = 64
SPARE_BYTES = 32 * MB  # above the memory limit, for the report that it was reached
STACK_BYTES = 8 * MB

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAP_DAC_READ_SEARCH = 2
CLONE_NEWNS, CLONE_NEWUSER, CLONE_THREAD, CLONE_FILES = 0x20000, 0x10000000, 0x10000, 0x400

# ------------------------------------------------------------------------------------------------------------ the filter

# System calls that a program needs to compute and to use its folder. For any other call, also of future kernels, the filter
# answers like a kernel that lacks it; the C library then falls back to older calls. Without fallocate, filling a disk takes
# time. Without close_range and without clones that have their own file tables, all threads share the files that are watched.
ALLOWED = """
open openat creat close read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek
sendfile splice tee copy_file_range ftruncate fadvise64 readahead fsync fdatasync flock dup dup2 dup3 pipe pipe2
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr getdents getdents64 getcwd chdir fchdir umask mkdir mkdirat rmdir unlink unlinkat rename
renameat renameat2 link linkat symlink symlinkat mknod mknodat
brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock mlockall munlockall membarrier pkey_alloc pkey_free
pkey_mprotect get_mempolicy set_mempolicy mbind
futex futex_waitv futex_wait futex_wake futex_requeue set_robust_list get_robust_list rseq set_tid_address arch_prctl exit
exit_group gettid getcpu sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max
sched_get_priority_min sched_rr_get_interval getpriority wait4 waitid
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause restart_syscall
signalfd4 alarm getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create
timerfd_settime timerfd_gettime time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep times
getpid getppid getpgid getpgrp getsid setsid setpgid getuid geteuid getgid getegid getresuid getresgid getgroups capget
getrlimit setrlimit getrusage sysinfo uname getrandom
"""
ALLOW, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.ENOSYS
BAD_MACHINE, MASKED_EQUAL = 2, 7


class Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp`` of libseccomp: an argument of a system call, a comparison, a bit mask and a value."""

    _fields_ = [("argument", ctypes.c_uint), ("how", ctypes.c_int), ("bits", ctypes.c_uint64), ("value", ctypes.c_uint64)]


def allow(seccomp: Any, context: ctypes.c_void_p, pid: int) -> None:
    """Add the allowed system calls of process ``pid`` to a filter of libseccomp, except those unknown on this machine."""
    word = 0xFFFFFFFF
    partly = {  # calls allowed with some arguments only: index of the argument, mask, allowed values
        "kill": (0, word, [pid, 0]),
        "tkill": (0, word, [pid]),
        "tgkill": (0, word, [pid]),
        "prlimit64": (0, word, [pid, 0]),
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
        "ioctl": (1, word, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]),
        "fcntl": (1, word, [*range(8), 36, 37, 38, 1030, 1031, 1032]),  # copies, flags, locks, sizes; not F_SETOWN
        "prctl": (0, word, [3, 15, 16, 0x53564D41]),  # PR_GET_DUMPABLE, names of threads and of memory
        "clone": (0, CLONE_THREAD | CLONE_FILES, [CLONE_THREAD | CLONE_FILES]),
    }
    rules: list[tuple[str, list[Comparison]]] = [(name, []) for name in ALLOWED.split()]
    for name, (argument, bits, values) in partly.items():
        rules += [(name, [Comparison(argument, MASKED_EQUAL, bits, value)]) for value in values]
    for name, compared in rules:
        number, count = seccomp.seccomp_syscall_resolve_name(name.encode()), len(compared)
        if number >= 0:
            array = (Comparison * count)(*compared)
            checked(seccomp.seccomp_rule_add_array(context, ctypes.c_uint(ALLOW), number, ctypes.c_uint(count), array))


def refuse_system_calls() -> None:
    """Block all system calls but the allowed ones, permanently: no network, other processes, signals, mounts or file modes.

    Raises:
        OSError: libseccomp is missing, or the kernel has no filters.
    """
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint(UNKNOWN)))
    checked(seccomp.seccomp_attr_set(context, BAD_MACHINE, ctypes.c_uint(UNKNOWN)))
    allow(seccomp, context, os.getpid())
    checked(seccomp.seccomp_load(context))


# -------------------------------------------------------------------------------------------------- other protections


def checked(result: int) -> int:
    """Return the result of a function of the C library.

    Raises:
        OSError: the function failed.
    """
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def library() -> Any:
    """The C library."""
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call; OSError if it fails."""
    return checked(library().syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, first: int, second: int = 0) -> None:
    """Change a property of this process; OSError if the kernel does not have it."""
    rest = (ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0))
    checked(library().prctl(ctypes.c_int(option), *rest))


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 without Landlock."""
    try:
        return syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock(version: int, folder: str, readable: Iterable[str]) -> None:
    """Restrict this process to writing in ``folder`` and reading there and in ``readable``; no TCP, no signals to others."""
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    read, write, special = 0b1100, 0b10, 1 | 1 << 6 | 1 << 9 | 1 << 11  # special: execute files, make devices and sockets
    attributes = struct.pack("=QQQ", files, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    for path, rights in [(folder, files & ~special), ("/dev/null", 0b100 | write), *((path, read) for path in readable)]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= ~0 if Path(path).is_dir() else 0b110  # rights of folders do not apply to a file
            syscall(445, ctypes.c_int(rules), ctypes.c_int(1), struct.pack("=Qi", rights, place), ctypes.c_uint(0))
            os.close(place)
    syscall(446, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def mount_read_only(folder: str) -> None:
    """Make all mounts but ``folder`` read-only and devices unusable, for kernels without Landlock."""
    user, group = os.geteuid(), os.getegid()
    try:
        checked(library().unshare(ctypes.c_int(CLONE_NEWNS)))
    except PermissionError:  # a process may do it in its own user namespace
        checked(library().unshare(ctypes.c_int(CLONE_NEWNS | CLONE_NEWUSER)))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    here, read_only, recursive = ctypes.c_int(-100), 0b101, 0x8000
    null, flags = ctypes.c_void_p(0), ctypes.c_ulong
    checked(library().mount(null, b"/", null, flags(0x44000), null))  # private: other processes do not see these mounts
    syscall(442, here, b"/", ctypes.c_uint(recursive), struct.pack("=QQQQ", read_only, 0, 0, 0), ctypes.c_size_t(32))
    place = os.fsencode(folder)
    checked(library().mount(place, place, null, flags(0x1000), null))
    syscall(442, here, place, ctypes.c_uint(0), struct.pack("=QQQQ", 0, 1, 0, 0), ctypes.c_size_t(32))
    os.chdir(folder)


def drop_capabilities() -> None:
    """Drop all capabilities but reading any file, as Python may be installed in another user's folder."""
    for kept in (1 << CAP_DAC_READ_SEARCH, 0):
        with contextlib.suppress(OSError):
            data = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
            checked(library().capset(struct.pack("=Ii", 0x20080522, 0), data))
            return


def set_limits(limits: dict[str, Any]) -> None:
    """Limit CPU time, memory, files and, for users other than root, the number of processes."""
    size, memory, seconds = int(limits["file_mb"] * MB), int(limits["memory_mb"] * MB), math.ceil(limits["cpu_seconds"])
    bounds = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (size, size),
        resource.RLIMIT_NOFILE: (MAX_OPEN_FILES, MAX_OPEN_FILES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_STACK: (STACK_BYTES, STACK_BYTES),
        resource.RLIMIT_AS: (memory, memory + SPARE_BYTES),
    }
    with contextlib.suppress(OSError, ValueError, IndexError):  # the limit counts all processes of this user
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
        bounds[resource.RLIMIT_NPROC] = (running + limits["processes"], running + limits["processes"])
    for which, wanted in bounds.items():
        allowed = resource.getrlimit(which)[1]
        soft, hard = (bound if allowed == resource.RLIM_INFINITY else min(bound, allowed) for bound in wanted)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (soft, hard))


def protect(settings: dict[str, Any]) -> bool:
    """Apply all restrictions that the kernel supports, permanently.

    Returns:
        whether starting processes is refused.
    """
    without, folder = settings["without"], settings["folder"]
    version = 0 if "landlock" in without else landlock_version()
    filtered = "filter" not in without
    set_limits(settings["limits"])
    if version < 3 and "mounts" not in without:  # earlier versions do not restrict truncation
        with contextlib.suppress(OSError, AttributeError):
            mount_read_only(folder)
    with contextlib.suppress(OSError, AttributeError):
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    if version:
        with contextlib.suppress(OSError, AttributeError):
            own = [f"/proc/{os.getpid()}/{name}" for name in ("fd", "maps", "status", "statm")]  # but not network and mounts
            landlock(version, folder, [*settings["readable"], *own])
    with contextlib.suppress(AttributeError):
        drop_capabilities()
    if filtered:
        try:
            refuse_system_calls()
        except (OSError, AttributeError):
            filtered = False
    return filtered
