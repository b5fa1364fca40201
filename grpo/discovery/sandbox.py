"""Running an untrusted program, with nothing of this machine in its reach but the time and memory that it is given.

What confines it is in ``sandboxed.py`` and ``confinement.py``, which run in another process. Here is what starts that, and
never waits longer, or reads more, than the limits say.
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
PIECE = 65536  # bytes of what the supervisor says
TAIL = 2000  # bytes kept of what a program prints
PATIENCE_SECONDS = 10.0  # for processes that must end
MOST_DIGITS = 100  # of an integer in a result
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
        output_mb: what it prints, and its result; each goes into a file, and is no larger than one may be.
    """

    seconds: float = 30.0
    cpu_seconds: float = 30.0
    memory_mb: float = 2000.0
    processes: int = 64
    file_mb: float = 16.0
    output_mb: float = 10.0

    @property
    def folder_mb(self) -> float:
        """All files together: more than one file alone, for which there is a better message."""
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
    settings = {"limits": asdict(limits), "folder_mb": limits.folder_mb, "name": name, "without": [*without]}
    most = int(limits.output_mb * MB)
    with _empty_folder() as folder, TemporaryFile() as text, TemporaryFile() as result, TemporaryFile() as printed:
        text.write(source)
        text.seek(0)
        ended = _run(settings | {"folder": str(folder), "result": result.fileno()}, text, printed, limits.seconds)
        # By position: the program shares the files' offsets, and may have set them anywhere.
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


# ----------------------------------------------------------------------------------------------------------- the other process


def _run(settings: dict[str, Any], source: IO[bytes], printed: IO[bytes], seconds: float) -> dict[str, Any]:
    """Start the sandbox, wait until it ends or its time is up, and see to it that nothing of it is left.

    Returns:
        what the supervisor reports at its end (``supervise`` in sandboxed.py), or where it was killed its exit status alone, as
        "code"; and "stopped": "time" where the time was up.
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
            life.close()  # which has the supervisor end everything
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
    """Why a run gave no result, where that is known without reading one; "" otherwise."""
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
    """The JSON object that came as the result, or one with an "error"; the program may have sent anything."""
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
    """An integer, unless it is so long that to read it takes long."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits.removeprefix('-'))} digits, at most {MOST_DIGITS} are allowed")
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
