"""What a process gives up before it runs an untrusted program: system calls, files, capabilities, resources.

Loaded by path from ``grpo/discovery/sandboxed.py``, so it imports nothing of the package. All by ``ctypes``, as Python has no
functions for it; numbers and layouts are those of Linux's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import resource
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MB = 1_000_000
MAX_OPEN_FILES = 64  # with the limit of a file's size it bounds what files without a name can hold
SPARE_BYTES = 32 * MB  # beyond the limit of memory, to report that it was reached
STACK_BYTES = 8 * MB

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
CAP_DAC_READ_SEARCH = 2
CLONE_NEWNS, CLONE_NEWUSER, CLONE_THREAD = 0x20000, 0x10000000, 0x10000

# ------------------------------------------------------------------------------------------------------------ the filter

# What a program needs to compute has been left out: name:number on x86_64:number on aarch64 of each system call refused.
REFUSED = """
fork:57:- vfork:58:- execve:59:221 execveat:322:281
socket:41:198 socketpair:53:199 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 sendto:44:206
sendmsg:46:211 sendmmsg:307:269 recvfrom:45:207 recvmsg:47:212 recvmmsg:299:243
io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 process_mrelease:448:448 kcmp:312:272
pidfd_open:434:434 pidfd_getfd:438:438 pidfd_send_signal:424:424 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240
sched_setparam:142:118 sched_setscheduler:144:119 sched_setattr:314:274 sched_setaffinity:203:122 setpriority:141:140
ioprio_set:251:30 migrate_pages:256:238 move_pages:279:239
mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430
fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442 unshare:272:97 setns:308:268
open_by_handle_at:304:265 name_to_handle_at:303:264 fanotify_init:300:262 quotactl:179:60 quotactl_fd:443:443 acct:163:89
swapon:167:224 swapoff:168:225 keyctl:250:219 add_key:248:217 request_key:249:218 bpf:321:280 perf_event_open:298:241
userfaultfd:323:282 memfd_create:319:279 memfd_secret:447:447 shmget:29:194 shmat:30:196 semget:64:190 msgget:68:186
mq_open:240:180
chmod:90:- fchmod:91:52 fchmodat:268:53 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 utime:132:- utimes:235:-
futimesat:261:- utimensat:280:88 truncate:76:45 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14
lremovexattr:198:15 fremovexattr:199:16
init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 reboot:169:142
syslog:103:116 personality:135:92 sethostname:170:161 setdomainname:171:162 settimeofday:164:170 clock_settime:227:112
clock_adjtime:305:266 adjtimex:159:171 vhangup:153:58 modify_ldt:154:- iopl:172:- ioperm:173:-
"""
# System calls of which only some are refused.
PARTLY = "clone:56:220 kill:62:129 tkill:200:130 tgkill:234:131 prlimit64:302:261 prctl:157:167 fcntl:72:25 ioctl:16:29"
CLONE3, LAST_KNOWN = 435, 450  # later system calls have the same number everywhere
HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes waiting, blocking, exec
SIGNALS_TO_OTHERS = (8, 10, 15)  # fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # the kernel's name of it, and the column above

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, NOT_PERMITTED, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def system_calls(text: str, column: int) -> dict[str, int]:
    """The numbers of the system calls listed in ``text`` on one machine, by name."""
    rows = [entry.split(":") for entry in text.split()]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def instructions(machine: str, pid: int) -> list[Instruction]:
    """The filter in the kernel's own little language; signals may go to process ``pid`` alone."""
    architecture, column = MACHINES[machine]
    partly = system_calls(PARTLY, column)
    # Which argument decides, how it is compared, with what; then the answer where it fits, and where it does not.
    rules = {
        "clone": (0, ANY_BIT, [CLONE_THREAD], ALLOW, NOT_PERMITTED),
        "kill": (0, EQUAL, [pid, 0], ALLOW, NOT_PERMITTED),
        "tkill": (0, EQUAL, [pid], ALLOW, NOT_PERMITTED),
        "tgkill": (0, EQUAL, [pid], ALLOW, NOT_PERMITTED),
        "prlimit64": (0, EQUAL, [pid, 0], ALLOW, NOT_PERMITTED),
        "ioctl": (1, EQUAL, [*HARMLESS_IOCTLS], ALLOW, NOT_PERMITTED),
        "prctl": (0, EQUAL, [PR_SET_PDEATHSIG], NOT_PERMITTED, ALLOW),
        "fcntl": (1, EQUAL, [*SIGNALS_TO_OTHERS], NOT_PERMITTED, ALLOW),
    }
    program: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    program += [(GREATER, 0, 1, LAST_KNOWN), (RETURN, 0, 0, NO_SUCH_CALL)]  # with it the calls for 32-bit pointers of x86
    program += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, NO_SUCH_CALL)]  # its flags lie where a filter cannot see them
    for number in system_calls(REFUSED, column).values():
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, NOT_PERMITTED)]
    for name, (argument, comparison, values, fits, other) in rules.items():
        block: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * argument)]
        for value in values:
            block += [(comparison, 0, 1, value), (RETURN, 0, 0, fits)]
        block.append((RETURN, 0, 0, other))
        program += [(EQUAL, 0, len(block), partly[name]), *block]
    return [*program, (RETURN, 0, 0, ALLOW)]


def refuse_system_calls() -> None:
    """Refuse for good what leads out of this process: network, other processes, signals to them, mounts, rights of files."""
    packed = b"".join(struct.pack("=HBBI", *one) for one in instructions(platform.machine(), os.getpid()))
    code = ctypes.create_string_buffer(packed, len(packed))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(packed) // 8, ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


# -------------------------------------------------------------------------------------------------- other protections


def checked(result: int) -> int:
    """What a function of the C library returned.

    Raises:
        OSError: it failed.
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
    """Change a property of this process; OSError where the kernel does not know it."""
    rest = (ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0))
    checked(library().prctl(ctypes.c_int(option), *rest))


def landlock_version() -> int:
    """Which version of Landlock the kernel has; 0: none."""
    try:
        return syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock(version: int, folder: str, readable: Iterable[str]) -> None:
    """Let this process write in ``folder`` only and read there and in ``readable``; no TCP, no signals to others."""
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    read, write, special = 0b1100, 0b10, 1 | 1 << 6 | 1 << 9 | 1 << 11  # special: run a file, make devices and sockets
    attributes = struct.pack("=QQQ", files, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    for path, rights in [(folder, files & ~special), ("/dev/null", 0b100 | write), *((path, read) for path in readable)]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= ~0 if Path(path).is_dir() else 0b110  # a file has no rights of a folder
            syscall(445, ctypes.c_int(rules), ctypes.c_int(1), struct.pack("=Qi", rights, place), ctypes.c_uint(0))
            os.close(place)
    syscall(446, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def mount_read_only(folder: str) -> None:
    """Without Landlock: make all that is mounted read-only, devices useless, and leave ``folder`` as it is."""
    user, group = os.geteuid(), os.getegid()
    try:
        checked(library().unshare(ctypes.c_int(CLONE_NEWNS)))
    except PermissionError:  # in a namespace of users of its own a process has the right to
        checked(library().unshare(ctypes.c_int(CLONE_NEWNS | CLONE_NEWUSER)))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    here, read_only, recursive = ctypes.c_int(-100), 0b101, 0x8000
    null, flags = ctypes.c_void_p(0), ctypes.c_ulong
    checked(library().mount(null, b"/", null, flags(0x44000), null))  # of what happens here others see nothing
    syscall(442, here, b"/", ctypes.c_uint(recursive), struct.pack("=QQQQ", read_only, 0, 0, 0), ctypes.c_size_t(32))
    place = os.fsencode(folder)
    checked(library().mount(place, place, null, flags(0x1000), null))
    syscall(442, here, place, ctypes.c_uint(0), struct.pack("=QQQQ", 0, 1, 0, 0), ctypes.c_size_t(32))
    os.chdir(folder)


def drop_capabilities() -> None:
    """Give up what root may do, but for reading: Python may lie in a folder of somebody else."""
    for kept in (1 << CAP_DAC_READ_SEARCH, 0):
        with contextlib.suppress(OSError):
            data = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
            checked(library().capset(struct.pack("=Ii", 0x20080522, 0), data))
            return


def set_limits(limits: dict[str, Any]) -> None:
    """Have the kernel limit CPU time, memory, files and, unless root's, the number of processes."""
    size, memory, seconds = int(limits["file_mb"] * MB), int(limits["memory_mb"] * MB), math.ceil(limits["cpu_seconds"])
    bounds = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (size, size),
        resource.RLIMIT_NOFILE: (MAX_OPEN_FILES, MAX_OPEN_FILES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_STACK: (STACK_BYTES, STACK_BYTES),
        resource.RLIMIT_AS: (memory, memory + SPARE_BYTES),
    }
    with contextlib.suppress(OSError, ValueError, IndexError):  # it counts all that this user runs, hence with the rest
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
        bounds[resource.RLIMIT_NPROC] = (running + limits["processes"], running + limits["processes"])
    for which, wanted in bounds.items():
        allowed = resource.getrlimit(which)[1]
        soft, hard = (bound if allowed == resource.RLIM_INFINITY else min(bound, allowed) for bound in wanted)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (soft, hard))


def protect(settings: dict[str, Any]) -> bool:
    """Give up, for good, what a program does not need, as far as the kernel can see to it.

    Returns:
        Whether starting processes is refused.
    """
    without, folder = settings["without"], settings["folder"]
    version = 0 if "landlock" in without else landlock_version()
    filtered = "filter" not in without and platform.machine() in MACHINES
    set_limits(settings["limits"])
    if version < 3 and "mounts" not in without:  # earlier versions let a file be cut short
        with contextlib.suppress(OSError, AttributeError):
            mount_read_only(folder)
    with contextlib.suppress(OSError, AttributeError):
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    if version:
        with contextlib.suppress(OSError, AttributeError):
            landlock(version, folder, [*settings["readable"], f"/proc/{os.getpid()}"])
    with contextlib.suppress(AttributeError):
        drop_capabilities()
    if filtered:
        try:
            refuse_system_calls()
        except (OSError, AttributeError):
            filtered = False
    return filtered
