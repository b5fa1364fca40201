"""The inside of the sandbox: a script, started by ``grpo/discovery/sandbox.py``, that restricts itself and runs one program.

It has two processes. The *supervisor* is started first; it watches the other process, kills all that is left at the end, and
reports the outcome. The *program* process gives up its rights, runs the untrusted code, and writes the points as JSON into a
result file. The code may write anything there, so its reader checks everything.

The script imports nothing of the package, so that the untrusted code has access to as little as possible.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import mmap
import os
import resource
import select
import signal
import stat
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from grpo.discovery import confinement
else:  # loaded by path: with the package's folder on sys.path, the program could import its modules
    _spec = importlib.util.spec_from_file_location("confinement", Path(__file__).with_name("confinement.py"))
    confinement = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(confinement)

MB = 1_000_000
LOOK_SECONDS = 0.02  # interval at which the supervisor checks the program's threads and files
MAX_FILES = 1000
POINTS_FROM = ("run_code", "get_centers", "points")


# ------------------------------------------------------------------------------------------------------------- the program


def answer(source: bytes, name: str, encode: Callable[..., str], set_digits: Callable[[int], None]) -> str:
    """Run a program and return JSON: {"points": its points} or {"error": a message for its author}.

    Numbers are not converted; the verifier refuses all but integers.
    """
    module = types.ModuleType("program")  # not __main__, so that its script part does not run
    module.__file__ = name
    sys.modules["program"] = module
    try:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        found = next((one for one in POINTS_FROM if one in module.__dict__), None)
        if found is None:
            return encode({"error": "The program defines neither run_code() nor get_centers() nor points"})
        value = module.__dict__[found]
        points = value() if callable(value) else value
        set_digits(0)
        return encode({"points": points}, default=listed)
    except BaseException as error:  # also SystemExit
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        return encode({"error": explained(error, source, name)})


class NotPoints(Exception):
    """A program's result that is not a list of points; the message says what it is."""


def listed(value: Any) -> Any:
    """Convert an array or a scalar of numpy for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotPoints(f"The points are or hold {a(value)}, expected a list of lists of integers")


def a(value: object) -> str:
    """The type of a value with its article, such as "a generator"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def explained(error: BaseException, source: bytes, name: str) -> str:
    """Describe an exception and the program's line that raised it, in one line."""
    if isinstance(error, NotPoints):
        return str(error)
    own = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == name]
    number, what = own[-1] if own else 0, str(error)
    if isinstance(error, SyntaxError):
        what, number = error.msg, error.lineno or 0 if error.filename == name else number
    message = f"{type(error).__name__}: {what[:1000]}" if what else type(error).__name__
    if isinstance(error, SystemExit):
        message = f"The program ended itself ({message}) before it gave its points"
    elif isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        message += " (a program has no network here, starts no other processes, and writes in its working folder only)"
    elif isinstance(error, MemoryError):
        message += f" (it may use {(resource.getrlimit(resource.RLIMIT_AS)[1] - confinement.SPARE_BYTES) // MB} MB)"
    lines = source.splitlines()
    text = lines[number - 1].decode("utf-8", "replace").strip()[:200] if 0 < number <= len(lines) else ""
    return message + (f" (line {number}: {text})" if number else "")


def run_program(settings: dict[str, Any], ready: int, supervisor: int) -> NoReturn:
    """Run the program's process, from its start to its end.

    Args:
        ready: a pipe to the supervisor; it gets one byte when the protections are active: 1 if starting processes is refused.
        supervisor: process id of the supervisor.
    """
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        confinement.prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # the supervisor ended before the line above took effect
        os._exit(1)
    source = sys.stdin.buffer.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    result = settings["result"]
    for descriptor in {int(one.name) for one in Path("/dev/fd").iterdir()} - {0, 1, 2, result, ready}:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    sys.argv = [settings["name"]]
    if settings["packages"] not in sys.path:
        sys.path.append(settings["packages"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # its output is reported even if it is killed
    encode, set_digits = json.dumps, sys.set_int_max_str_digits  # the program may replace them
    os.write(ready, b"1" if confinement.protect(settings) else b"0")
    os.close(ready)
    left = memoryview(answer(source, settings["name"], encode, set_digits).encode())
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    while left:
        left = left[os.write(result, left) :]
    os._exit(0)  # without the program's exit handlers


# --------------------------------------------------------------------------------------------------------------- the supervisor


def descendants() -> list[int]:
    """All descendants of this process, including orphans, which it adopts."""
    parents: dict[int, int] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(place.name)] = int((place / "stat").read_bytes().rpartition(b")")[2].split()[1])
    below, found = {os.getpid()}, -1
    while found != len(below):
        found = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    return sorted(below - {os.getpid()})


def tasks(pid: int) -> list[Path]:
    """A process's threads, as folders of /proc; empty if it has ended."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def named_files(folder: str, most: float) -> tuple[int, int]:
    """Count bytes and number of the files in a folder, until one exceeds its limit.

    Raises:
        OSError: a folder in it cannot be read.
    """
    waiting, size, count = [folder], 0, 0
    while waiting:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    count += 1
                    if size > most or count > MAX_FILES:
                        return size, count
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return size, count


def removed_files(thread: Path, elsewhere: str, each: int) -> dict[tuple[str, ...], int] | None:
    """Bytes of removed files that a thread still keeps open or mapped; None if the thread has ended.

    Args:
        elsewhere: device of shared memory without a file, which looks like a mapped removed file.
        each: bytes to count for a mapped file, whose size only root can read: the largest size of a file.

    Raises:
        OSError: its files cannot be read.
    """
    found: dict[tuple[str, ...], int] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        maps = (thread / "maps").read_bytes().splitlines()
        for line in maps:
            if line.endswith(b" (deleted)"):
                _, _, _, device, inode, _ = line.decode(errors="replace").split(maxsplit=5)
                if device != elsewhere:
                    found["mapped", device, inode] = each
        for descriptor in (thread / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                file = descriptor.stat()
                if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                    found["open", str(file.st_dev), str(file.st_ino)] = file.st_blocks * 512
        return found if maps else None
    return None


def device_of_shared_memory() -> str:
    """The device that /proc shows for shared memory without a file."""
    with mmap.mmap(-1, 1):
        shared = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/zero (deleted)" in line)
    return shared.split()[3]


def too_many_files(settings: dict[str, Any], threads: list[Path], together: bool, elsewhere: str) -> bool:
    """Whether named and removed files exceed a limit on their size or number, or cannot be read.

    Args:
        together: the threads share memory and open files, so that one live thread shows all.
        elsewhere: as in :func:`removed_files`.
    """
    most, each = settings["folder_mb"] * MB, int(settings["limits"]["file_mb"] * MB)
    try:
        size, count = named_files(settings["folder"], most)
        held: dict[tuple[str, ...], int] = {}
        for thread in threads:
            found = removed_files(thread, elsewhere, each)
            held |= found or {}
            if together and found is not None:
                break
    except OSError:
        return True
    return size + sum(held.values()) > most or count > MAX_FILES


def outcome(status: int, usage: resource.struct_rusage) -> tuple[int, float]:
    """A process's exit status (minus the number of a signal) and its CPU seconds."""
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def end_all(pid: int) -> tuple[int, float] | None:
    """Kill all descendants of this process and wait for them.

    Returns:
        the outcome of ``pid``; None if it has been waited for already.
    """
    ended = None
    while True:
        try:
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                if found[0] == pid:
                    ended = outcome(found[1], found[2])
        except ChildProcessError:  # none is left, as orphans became children of this process
            return ended
        for one in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.002)


def supervise(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the program in another process and watch it until it ends or exceeds a limit.

    Returns:
        "code": its exit status, or minus the number of a signal; "cpu": seconds; "stopped": "processes" or "files" if it made
        too many of them, else ""; "ready": whether the protections were active before it began.
    """
    with contextlib.suppress(OSError, AttributeError):
        confinement.prctl(confinement.PR_SET_CHILD_SUBREAPER, 1)
    limits, supervisor, elsewhere = settings["limits"], os.getpid(), device_of_shared_memory()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            run_program(settings, send, supervisor)
        finally:  # after any error, so that this process does not continue as a second supervisor
            traceback.print_exc()
            os._exit(1)
    os.close(send)
    ready = os.read(receive, 1)
    filtered = ready == b"1"
    watched = select.poll()
    watched.register(settings["lifeline"])
    with contextlib.suppress(OSError, AttributeError):
        watched.register(os.pidfd_open(pid))
    stopped, ended = "", None
    while not stopped:
        events = watched.poll(1000 * LOOK_SECONDS)
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            ended = outcome(status, usage)
        if found or settings["lifeline"] in dict(events):  # the lifeline's other end was closed
            break
        threads = [thread for one in ([pid] if filtered else descendants()) for thread in tasks(one)]
        if len(threads) > limits["processes"]:
            stopped = "processes"
        elif too_many_files(settings, threads, filtered, elsewhere):
            stopped = "files"
    code, cpu = end_all(pid) or ended or (0, 0.0)
    return {"code": code, "cpu": cpu, "stopped": stopped, "ready": bool(ready)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.write(given["status"], json.dumps(supervise(given)).encode())
