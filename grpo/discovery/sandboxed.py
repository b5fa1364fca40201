"""The inside of the sandbox: run as a file by ``grpo/discovery/sandbox.py``, it confines itself and runs one program.

Two processes. The *keeper* is what was started; it watches the other one, kills everything that is left at the end, and tells
how it went. The *program* gives up what it may not do, runs the untrusted code, and sends the points as JSON over a pipe that
serves nothing else. The program may send there what it likes: whoever reads it takes nothing in it on trust.

Nothing of the package is imported, so that the untrusted code finds as little as possible beside it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import math
import operator
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from grpo.discovery import confinement
else:  # by its path: with the package's folder on sys.path the program would find its modules
    _spec = importlib.util.spec_from_file_location("confinement", Path(__file__).with_name("confinement.py"))
    confinement = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(confinement)

MB = 1_000_000
LOOK_SECONDS = 0.02  # how often the keeper looks at the threads and the files of the program
MAX_FILES = 1000
MAX_DIGITS = 4000  # of an integer; Python reads no more than 4300 unless told to
MOST = 10**MAX_DIGITS
POINTS_FROM = ("run_code", "get_centers", "points")


# ------------------------------------------------------------------------------------------------------------- the program


def answer(source: bytes, name: str) -> dict[str, Any]:
    """Run a program: {"points": what it gave, as plain lists} or {"error": what went wrong, for its author}."""
    module = types.ModuleType("program")  # not __main__: what a program does only as a script is not wanted
    module.__file__ = name
    sys.modules["program"] = module
    try:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        found = next((one for one in POINTS_FROM if one in module.__dict__), None)
        if found is None:
            return {"error": "The program defines neither run_code() nor get_centers() nor points"}
        value = module.__dict__[found]
        return {"points": plain(value() if callable(value) else value, found + "()" * callable(value))}
    except BaseException as error:  # whatever the program raises, to end itself too
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        return {"error": told(error, source, name)}


class NotPoints(Exception):
    """What a program gave is no list of points; the message says what it is instead."""


def plain(value: Any, origin: str) -> list[Any]:
    """Points as lists of what JSON knows. No number is changed: what is no integer is left to be refused.

    Raises:
        NotPoints: that cannot be.
    """
    points = listed(value)
    if not isinstance(points, list):
        raise NotPoints(f"{origin} is {a(value)}, expected a list of points, each a list of integers")
    return [plain_point(point, index) for index, point in enumerate(points)]


def plain_point(value: Any, index: int) -> list[Any]:
    """One point; as ``plain``."""
    point = listed(value)
    if not isinstance(point, list):
        raise NotPoints(f"Point {index} is {a(value)}, expected a list of integers")
    return [
        entry if type(entry) is int and -MOST < entry < MOST else plain_entry(entry, index, i) for i, entry in enumerate(point)
    ]


def plain_entry(value: Any, index: int, position: int) -> Any:
    """One coordinate; as ``plain``."""
    scalar = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(scalar, int) and not isinstance(scalar, bool):
        scalar = operator.index(scalar)
        if not -MOST < scalar < MOST:
            digits = int(scalar.bit_length() * math.log10(2)) + 1
            raise NotPoints(f"Point {index}, entry {position} has about {digits} digits, at most {MAX_DIGITS} are allowed")
    elif isinstance(scalar, str):
        scalar = scalar[:100]
    elif not (scalar is None or isinstance(scalar, bool | float)):
        raise NotPoints(f"Point {index}, entry {position} is {a(value)}, expected an integer")
    return scalar


def listed(value: Any) -> Any:
    """A tuple or an array as a list; anything else as it is."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def a(value: object) -> str:
    """What kind of thing a value is: "a generator"."""
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def told(error: BaseException, source: bytes, name: str) -> str:
    """An exception in one line, and the line of the program that it comes from."""
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


def run_program(settings: dict[str, Any], ready: int, keeper: int) -> NoReturn:
    """The program's process, from its start to its end.

    Args:
        ready: a pipe to the keeper, told one byte once the protections stand: 1 if starting processes is refused.
        keeper: the other process.
    """
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        confinement.prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it ended before that took effect
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
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # what it printed is told even if it is killed
    encode, set_digits = json.dumps, sys.set_int_max_str_digits  # as they are now, whatever the program makes of them
    os.write(ready, b"1" if confinement.protect(settings) else b"0")
    os.close(ready)
    reply = answer(source, settings["name"])
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    set_digits(0)
    try:
        left = memoryview(encode(reply).encode())
    except MemoryError:
        left = memoryview(encode({"error": "MemoryError: no memory was left to send the points"}).encode())
    while left:
        left = left[os.write(result, left) :]
    os._exit(0)  # at once: what the program registered for its end does not run


# --------------------------------------------------------------------------------------------------------------- the keeper


def descendants() -> list[int]:
    """All processes below this one. What lost its parent is among them, since this process takes that parent's place."""
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


def tasks(pid: int) -> int:
    """How many threads a process has; 0 where it is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def too_many_files(folder: str, most: float) -> bool:
    """Whether a folder holds more than ``most`` bytes or ``MAX_FILES`` files, or hides what it holds."""
    waiting, size, count = [folder], 0, 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        count += 1
                        if count > MAX_FILES or size > most:
                            return True
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
    return False


def outcome(status: int, usage: resource.struct_rusage) -> tuple[int, float]:
    """The exit status of a process (minus the number of a signal) and its CPU seconds."""
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def end_all(pid: int) -> tuple[int, float] | None:
    """Kill and wait for all processes below this one.

    Returns:
        The outcome of ``pid``, unless that has been waited for already.
    """
    ended = None
    while True:
        try:
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                if found[0] == pid:
                    ended = outcome(found[1], found[2])
        except ChildProcessError:  # none is left: what lost its parent became a child of this process
            return ended
        for one in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.002)


def keep(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the program in a process of its own and watch it until it ends or has to.

    Returns:
        "code": its exit status, minus the number of a signal; "cpu": seconds; "stopped": "processes" or "files" if it made
        too many of them, else ""; "ready": whether the protections stood before it began.
    """
    with contextlib.suppress(OSError, AttributeError):
        confinement.prctl(confinement.PR_SET_CHILD_SUBREAPER, 1)
    limits, keeper = settings["limits"], os.getpid()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            run_program(settings, send, keeper)
        finally:  # whatever went wrong here, this process does not go on as a second keeper
            traceback.print_exc()
            os._exit(1)
    os.close(send)
    ready = os.read(receive, 1)
    watched = select.poll()
    watched.register(settings["lifeline"])
    with contextlib.suppress(OSError, AttributeError):
        watched.register(os.pidfd_open(pid))
    stopped, ended = "", None
    while ended is None:
        events = watched.poll(1000 * LOOK_SECONDS)
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            ended = outcome(status, usage)
        elif settings["lifeline"] in dict(events):  # its other end was closed
            break
        elif sum(map(tasks, [pid] if ready == b"1" else descendants())) > limits["processes"]:
            stopped = "processes"
            break
        elif too_many_files(settings["folder"], settings["folder_mb"] * MB):
            stopped = "files"
            break
    code, cpu = end_all(pid) or ended or (0, 0.0)
    return {"code": code, "cpu": cpu, "stopped": stopped, "ready": bool(ready)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.write(given["status"], json.dumps(keep(given)).encode())
