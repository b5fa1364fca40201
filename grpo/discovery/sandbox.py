"""Running an untrusted program, with nothing of this machine in its reach but the time and memory that it is given.

What confines it is in ``sandboxed.py`` and ``confinement.py``, which run in another process. Here is what starts that, listens
to it and never waits longer, or keeps more, than the limits say.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError

MB = 1_000_000
SCRIPT = Path(__file__).with_name("sandboxed.py")
PIECE = 65536  # bytes read at a time
TAIL = 2000  # bytes kept of what a program prints
PATIENCE_SECONDS = 10.0  # for processes that were told to end
MOST_DIGITS = 4300  # of an integer in a result; a program's own are refused earlier, with a better message
LEAST_MEMORY_MB = 100  # Python itself needs some
# Beside Python's own folders, what shared libraries and numpy read when they are loaded.
READABLE = ("/usr", "/lib", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/localtime")
READABLE_ABOUT_MACHINE = ("/dev/urandom", "/dev/random", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu")


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: wall-clock time, with the start of Python.
        cpu_seconds: CPU time, rounded up to whole seconds.
        memory_mb: address space, with that of Python and its libraries.
        processes: threads, and processes where the system does not let these be refused.
        file_mb: each file; all files in the working folder together may have twice that.
        output_mb: what it prints, and its result.
    """

    seconds: float = 30.0
    cpu_seconds: float = 30.0
    memory_mb: float = 2000.0
    processes: int = 64
    file_mb: float = 16.0
    output_mb: float = 10.0

    @property
    def folder_mb(self) -> float:
        """All files together: more than one file alone, of which the program is told better."""
        return 2 * self.file_mb

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = LEAST_MEMORY_MB if name == "memory_mb" else 0
            if not least <= value < 1e9 or value == 0:
                raise UserError(f"The limit {name} of a program is {value}; it must be at least {least} and more than 0.")


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        points: what the program gave, as JSON has it; nothing in it has been checked.
        failure: why it gave nothing; "" if it gave something.
        printed: the end of what it printed.
    """

    points: object = None
    failure: str = ""
    printed: str = ""


def run_program(source: bytes, limits: Limits, name: str = "program.py", without: Collection[str] = ()) -> Outcome:
    """Run a program in the sandbox and take the points that it gives: ``run_code()``, ``get_centers()`` or ``points``.

    Args:
        name: what the program is called in messages.
        without: for tests, protections to leave out as where a kernel lacks them: "filter", "landlock", "mounts".
    """
    with _empty_folder() as folder, tempfile.TemporaryFile() as text:
        text.write(source)
        text.seek(0)
        settings = {"limits": asdict(limits), "folder": str(folder), "folder_mb": limits.folder_mb, "name": name}
        settings["without"] = [*without]
        heard = _Heard(int(limits.output_mb * MB))
        _run(settings, text.fileno(), limits.seconds, heard)
    printed = heard.tail.decode("utf-8", "replace").strip()
    if not heard.stopped and not heard.keeper.get("ready") and heard.exit_code >= 0:
        raise RuntimeError(f"the sandbox could not be set up: {printed or heard.keeper}")
    failure = _failure(heard, limits)
    if failure:
        return Outcome(failure=failure, printed=printed)
    reply = _parsed(heard.result, int(heard.keeper["code"]))
    return Outcome(reply.get("points"), _clean(str(reply.get("error", ""))), printed)


@functools.cache
def protections() -> dict[str, bool]:
    """What this system enforces, found out by a program that tries.

    Returns:
        "network": no connections; "filesystem": nothing outside the working folder is written; "reading": of files, only
        Python's and the system's libraries are read; "processes": no processes are started and none gets signals.
    """
    with tempfile.TemporaryDirectory() as outside:
        secret = Path(outside, "secret")
        secret.write_text("secret", encoding="utf-8")
        about_machine = ["/proc/self/net/tcp", "/proc/self/mountinfo"]
        program = _ATTEMPTS.format(secret=str(secret), process=os.getpid(), about_machine=about_machine)
        outcome = run_program(program.encode(), Limits(seconds=60.0))
    refused = outcome.points if isinstance(outcome.points, list) else []
    return {name: [name] in refused for name in ("network", "filesystem", "reading", "processes")}


def unenforced() -> list[str]:
    """Which of the :func:`protections` this system does not enforce."""
    return [name for name, enforced in protections().items() if not enforced]


_ATTEMPTS = """
import os, socket, time

def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False

def fork():
    if os.fork() == 0:
        os._exit(0)

def connect():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("127.0.0.1", 9))

secret = {secret!r}
attempts = {{
    "network": [connect, socket.socketpair],
    "filesystem": [lambda: open(secret + ".new", "w"), lambda: open(secret, "a"), lambda: os.truncate(secret, 0)],
    "reading": [lambda name=name: open(name) for name in [secret, "/proc/{process}/environ", *{about_machine!r}]],
    "processes": [fork, lambda: os.kill({process}, 0)],
}}
points = [[name] for name, tried in attempts.items() if all([refused(one) for one in tried])]
"""


# --------------------------------------------------------------------------------------------------------------- listening


@dataclass
class _Heard:
    """What came from the keeper and the program: over each pipe no more than about ``most`` bytes are waited for."""

    most: int
    result: bytearray = field(default_factory=bytearray)
    printed: int = 0
    tail: bytes = b""
    status: bytes = b""
    stopped: str = ""
    exit_code: int = 0

    def take(self, pipe: str, data: bytes) -> None:
        """Note what came over a pipe, and whether it is too much."""
        if pipe == "status":
            self.status = (self.status + data)[:PIECE]
        elif pipe == "result":
            self.result += data
            if len(self.result) > self.most:
                self.stopped = self.stopped or "result"
        else:
            self.printed += len(data)
            self.tail = (self.tail + data)[-TAIL:]
            if self.printed > self.most:
                self.stopped = self.stopped or "printed"

    @property
    def keeper(self) -> dict[str, Any]:
        """What the keeper told at its end; empty if it was killed."""
        try:
            return dict(json.loads(self.status))
        except ValueError:
            return {}


def _run(settings: dict[str, Any], source: int, seconds: float, heard: _Heard) -> None:
    """Start the sandbox, listen until it ends or has to, and see to it that nothing of it is left."""
    pipes = {name: os.pipe() for name in ("result", "printed", "status", "lifeline")}
    open_ends = {end for pair in pipes.values() for end in pair}
    theirs = {name: pipes[name][0 if name == "lifeline" else 1] for name in pipes}
    ours = {name: pipes[name][0] for name in ("result", "printed", "status")}

    def close(*ends: int) -> None:
        for end in open_ends.intersection(ends):
            os.close(end)
            open_ends.remove(end)

    packages = _packages()
    told = {name: theirs[name] for name in ("result", "status", "lifeline")}
    settings = {**settings, **told, "packages": packages, "readable": _readable(packages)}
    deadline = time.monotonic() + seconds
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(SCRIPT), json.dumps(settings)],
            stdin=source,
            stdout=theirs["printed"],
            stderr=theirs["printed"],
            cwd=settings["folder"],
            env=_environment(settings["folder"]),
            pass_fds=tuple(told.values()),
            start_new_session=True,
        )
        close(*theirs.values())
        try:
            _listen(ours, deadline, heard)
        finally:
            close(pipes["lifeline"][1])  # which has the keeper end everything
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            heard.exit_code = process.wait()
        _drain(ours, heard)
    finally:
        close(*open_ends.copy())


def _listen(ours: dict[str, int], deadline: float, heard: _Heard) -> None:
    """Take in what comes, until the keeper is done, time is up or it is too much.

    The result's end is not waited for: a process that keeps that pipe open would have one wait for ever.
    """
    with selectors.DefaultSelector() as selector:
        for name, end in ours.items():
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ, name)
        while not heard.stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                heard.stopped = "time"
            for key, _ in selector.select(max(left, 0.0)):
                data = os.read(key.fd, PIECE)
                heard.take(key.data, data)
                if not data:
                    selector.unregister(key.fd)
                    if key.data == "status":
                        return


def _drain(ours: dict[str, int], heard: _Heard) -> None:
    """Take in what is left in the pipes when all writers have ended."""
    for name, end in ours.items():
        with suppress(BlockingIOError):
            while heard.stopped in ("", "time") and (data := os.read(end, PIECE)):
                heard.take(name, data)


def _failure(heard: _Heard, limits: Limits) -> str:
    """Why a run gave no result, where that is known without reading one; "" otherwise."""
    keeper, stopped = heard.keeper, heard.stopped or heard.keeper.get("stopped")
    code, cpu = keeper.get("code", heard.exit_code), keeper.get("cpu", 0.0)
    for what, message in (
        ("time", f"The program took longer than the time limit of {limits.seconds:g} s"),
        ("result", f"The result is larger than {limits.output_mb:g} MB"),
        ("printed", f"The program printed more than {limits.output_mb:g} MB"),
        ("processes", f"The program started more than {limits.processes} threads or processes"),
        ("files", f"The program keeps more than {limits.folder_mb:g} MB or too many files, named or removed, in its folder"),
    ):
        if stopped == what:
            return message
    if code < 0 and (code == -signal.SIGXCPU or cpu >= limits.cpu_seconds):
        return f"The program used up its {limits.cpu_seconds:g} s of CPU time"
    if code < 0:
        known = {int(one): one.name for one in signal.Signals}
        hint = {-signal.SIGSEGV: ", as after a recursion that is too deep", -signal.SIGKILL: ", its own or for want of memory"}
        return f"The program was killed by the signal {known.get(-code, -code)}{hint.get(code, '')}"
    return ""


def _parsed(result: bytearray, code: int) -> dict[str, Any]:
    """The JSON object that came over the result's pipe, or one with an "error"; the program may have sent anything."""
    if not result:
        return {"error": f"The program ended without a result (exit code {code}): it must not end itself"}
    try:
        reply = json.loads(result.decode("utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        return {"error": f"What the program sent is no JSON ({error})"}
    if not isinstance(reply, dict) or ("points" in reply) == ("error" in reply):
        return {"error": "What the program sent is no result"}
    return reply


def _integer(digits: str) -> int:
    """An integer, unless it is so long that to read it takes long; Python's own limit may be off."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _clean(text: str) -> str:
    """A message of a program as one line that can be printed."""
    return "".join(c if c.isprintable() else " " for c in text[:TAIL]).strip()


# ----------------------------------------------------------------------------------------------------- what a program finds


def _environment(folder: str) -> dict[str, str]:
    """The few variables that a program sees: nothing of this process but where libraries are."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "VECLIB_MAXIMUM")}
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    folders = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    memory = {"MALLOC_ARENA_MAX": "2"}  # more address space than the limit allows would go to threads
    return {**folders, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **threads, **memory, **libraries}


def _packages() -> str:
    """The folder that numpy is installed in."""
    found = importlib.util.find_spec("numpy")
    return str(Path(found.origin).parent.parent) if found and found.origin else sysconfig.get_path("purelib")


def _readable(packages: str) -> list[str]:
    """Files and folders that a program may read."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sysconfig.get_paths().values()}
    libraries = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return [*sorted(prefixes - {"/"}), packages, *libraries, *READABLE, *READABLE_ABOUT_MACHINE]


@contextmanager
def _empty_folder() -> Iterator[Path]:
    """A new folder, removed at the end whatever has been written into it."""
    folder = Path(tempfile.mkdtemp(prefix="kissing-"))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder in which folders may be nested deeper than paths or recursion go, and closed even to their owner."""
    if folder.is_symlink() or not folder.is_dir():  # where nothing kept the program from putting something else there
        folder.unlink(missing_ok=True)
        return
    with suppress(OSError):
        folder.rmdir()  # most are empty
        return
    subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", folder], check=True)
