"""Execution of an untrusted program in a sandbox with limits on time, memory and files.

``sandboxed.py`` and ``confinement.py`` restrict the program, in another process. This module starts that process, and never
waits longer or reads more than the limits allow.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from grpo.common.errors import UserError

MB = 1_000_000
SCRIPT = Path(__file__).with_name("sandboxed.py")
PIECE = 65536  # bytes read of the supervisor's report
TAIL = 2000  # last bytes kept of a program's output
PATIENCE_SECONDS = 10.0  # until a process that must end is killed
MOST_DIGITS = 100  # of an integer in a result
LEAST_MEMORY_MB = 100  # for Python itself
# Files that shared libraries and numpy read when they are loaded, beside Python's own folders.
READABLE = ("/usr", "/lib", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/localtime")
READABLE_ABOUT_MACHINE = ("/dev/urandom", "/dev/random", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu")


@dataclass(frozen=True)
class Limits:
    """Limits on a program.

    Attributes:
        seconds: wall-clock time, including the start of Python.
        cpu_seconds: CPU time, rounded up to whole seconds.
        memory_mb: address space, including that of Python and its libraries.
        processes: number of threads, and of processes if the system cannot refuse them.
        file_mb: size of a file; all files in the working folder together may have twice as much.
        output_mb: size of its output, and of its result; both are files, so ``file_mb`` holds too.
    """

    seconds: float = 30.0
    cpu_seconds: float = 30.0
    memory_mb: float = 2000.0
    processes: int = 64
    file_mb: float = 16.0
    output_mb: float = 10.0

    @property
    def folder_mb(self) -> float:
        """Size of all files together; larger than one file, whose limit has a better message."""
        return 2 * self.file_mb

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = LEAST_MEMORY_MB if name == "memory_mb" else 0
            if not least <= value < 1e9 or value == 0:
                raise UserError(f"The limit {name} of a program is {value}; it must be at least {least} and more than 0.")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        points: the program's result as read from JSON, unchecked.
        failure: the reason why there is no result, else "".
        printed: the end of the program's output.
    """

    points: object = None
    failure: str = ""
    printed: str = ""


def run_program(source: bytes, limits: Limits, name: str = "program.py", without: Collection[str] = ()) -> Outcome:
    """Run a program in the sandbox and return its points: ``run_code()``, ``get_centers()`` or ``points``.

    Args:
        name: the program's name in messages.
        without: protections to leave out, for tests of kernels that lack them: "filter", "landlock", "mounts".

    Raises:
        RuntimeError: the sandbox could not be set up.
    """
    settings = {"limits": asdict(limits), "folder_mb": limits.folder_mb, "name": name, "without": [*without]}
    most = int(limits.output_mb * MB)
    with _empty_folder() as folder, TemporaryFile() as text, TemporaryFile() as result, TemporaryFile() as printed:
        text.write(source)
        text.seek(0)
        ended = _run(settings | {"folder": str(folder), "result": result.fileno()}, text, printed, limits.seconds)
        # Read by position, because the program shares the files' offsets.
        sizes = {"result": os.fstat(result.fileno()).st_size, "printed": os.fstat(printed.fileno()).st_size}
        sent = os.pread(result.fileno(), most, 0)
        tail = os.pread(printed.fileno(), TAIL, max(0, sizes["printed"] - TAIL)).decode("utf-8", "replace").strip()
    stopped = str(ended.get("stopped", "")) or next((what for what, size in sizes.items() if size > most), "")
    if not stopped and not ended.get("ready") and ended["code"] >= 0:
        raise RuntimeError(f"the sandbox could not be set up: {tail or ended}")
    failure = _failure(ended, stopped, limits)
    if failure:
        return Outcome(failure=failure, printed=tail)
    reply = _parsed(sent, int(ended["code"]))
    return Outcome(reply.get("points"), _clean(str(reply.get("error", ""))), tail)


@functools.cache
def protections() -> dict[str, bool]:
    """Find out which protections this system enforces, by a program that attempts to break them.

    Returns:
        "network": no connections; "filesystem": no writing outside the working folder; "reading": no reading but of Python's
        and the system's libraries; "processes": no new processes and no signals to others.
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
    """The :func:`protections` that this system does not enforce."""
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


# ----------------------------------------------------------------------------------------------------------- the other process


def _run(settings: dict[str, Any], source: IO[bytes], printed: IO[bytes], seconds: float) -> dict[str, Any]:
    """Start the sandbox, wait until it ends or its time is up, and end all its processes.

    Returns:
        the supervisor's report (``supervise`` in sandboxed.py), or its exit status as "code" if it was killed; "stopped" is
        "time" if the time was up.
    """
    status, writable = os.pipe()
    lifeline, held = os.pipe()
    packages = _packages()
    settings = {**settings, "status": writable, "lifeline": lifeline, "packages": packages, "readable": _readable(packages)}
    with os.fdopen(status, "rb", buffering=0) as said, os.fdopen(held, "wb") as life:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(SCRIPT), json.dumps(settings)],
                stdin=source,
                stdout=printed,
                stderr=printed,
                cwd=settings["folder"],
                env=_environment(settings["folder"]),
                pass_fds=(settings["result"], writable, lifeline),
                start_new_session=True,
            )
        finally:
            os.close(writable)
            os.close(lifeline)
        try:
            in_time, _, _ = select.select([said], [], [], seconds)
        finally:
            life.close()  # tells the supervisor to end everything
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            code = process.wait()
        try:
            report = json.loads(said.read(PIECE) or "{}") if in_time else {}
        except ValueError:
            report = {}
    return {"code": code, **report, **({} if in_time else {"stopped": "time"})}


def _failure(ended: dict[str, Any], stopped: str, limits: Limits) -> str:
    """The reason why a run has no result, if known without reading one; else ""."""
    reasons = {
        "time": f"The program took longer than the time limit of {limits.seconds:g} s",
        "result": f"The result is larger than {limits.output_mb:g} MB",
        "printed": f"The program printed more than {limits.output_mb:g} MB",
        "processes": f"The program started more than {limits.processes} threads or processes",
        "files": f"The program keeps more than {limits.folder_mb:g} MB or too many files, named or removed, in its folder",
    }
    code = ended["code"]
    if stopped in reasons:
        return reasons[stopped]
    if code < 0 and (code == -signal.SIGXCPU or ended.get("cpu", 0.0) >= limits.cpu_seconds):
        return f"The program used up its {limits.cpu_seconds:g} s of CPU time"
    if code < 0:
        known = {int(one): one.name for one in signal.Signals}
        hint = {-signal.SIGSEGV: ", as after a recursion that is too deep", -signal.SIGKILL: ", its own or for want of memory"}
        return f"The program was killed by the signal {known.get(-code, -code)}{hint.get(code, '')}"
    return ""


def _parsed(result: bytes, code: int) -> dict[str, Any]:
    """Parse the result, which may be anything, to an object with "points" or "error"."""
    if not result:
        return {"error": f"The program ended without a result (exit code {code}): it must not end itself"}
    try:
        reply = json.loads(result.decode("utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        return {"error": f"What the program gave cannot be read: {error}"}
    if not isinstance(reply, dict) or ("points" in reply) == ("error" in reply):
        return {"error": "What the program sent is no result"}
    return reply


def _integer(digits: str) -> int:
    """Parse an integer; ValueError if it has so many digits that parsing takes long."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits.removeprefix('-'))} digits, at most {MOST_DIGITS} are allowed")
    return int(digits)


def _clean(text: str) -> str:
    """Make a program's message one printable line."""
    return "".join(c if c.isprintable() else " " for c in text[:TAIL]).strip()


# ----------------------------------------------------------------------------------------------------- what a program finds


def _environment(folder: str) -> dict[str, str]:
    """The program's environment variables; of this process's, only the paths of libraries."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "VECLIB_MAXIMUM")}
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    folders = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    memory = {"MALLOC_ARENA_MAX": "2"}  # else threads reserve more address space than the limit allows
    return {**folders, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **threads, **memory, **libraries}


def _packages() -> str:
    """The folder in which numpy is installed."""
    found = importlib.util.find_spec("numpy")
    return str(Path(found.origin).parent.parent) if found and found.origin else sysconfig.get_path("purelib")


def _readable(packages: str) -> list[str]:
    """Files and folders that a program may read."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sysconfig.get_paths().values()}
    libraries = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return [*sorted(prefixes - {"/"}), packages, *libraries, *READABLE, *READABLE_ABOUT_MACHINE]


@contextmanager
def _empty_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end, whatever the program wrote into it."""
    folder = Path(tempfile.mkdtemp(prefix="kissing-"))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, even with folders nested deeper than paths can be, or without permissions for their owner."""
    if folder.is_symlink() or not folder.is_dir():  # without protections, the program may have replaced it
        folder.unlink(missing_ok=True)
        return
    with suppress(OSError):
        folder.rmdir()  # most are empty
        return
    subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", folder], check=True)
