"""Execution of an untrusted program in a sandbox with limits on time, memory, threads and output.

``sandboxed.py`` confines the program, in another process. This module starts that process, and never waits longer or reads more
than the limits allow.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy
import psutil

from grpo.common.errors import UserError
from grpo.common.imports import study_folders
from grpo.discovery.sandboxed import MB

SCRIPT = Path(__file__).with_name("sandboxed.py")
LOOK_SECONDS = 0.02  # interval at which a program's time and threads are checked
SHOWN = 500  # last bytes of a program's output in a message
MOST_DIGITS = 100  # of an integer in a result
PACKAGES = str(Path(numpy.__file__).parents[1])
# A relative entry would start at the program's working folder, which is another one than here.
LIBRARIES = [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry.startswith("/")]


def _is_library(path: Path) -> bool:
    return path.is_file() and re.search(r"\.so(\.[0-9][^/]*)?$", path.name) is not None


# What Python, shared libraries and numpy read when they are loaded; a program may read it too. Of LD_LIBRARY_PATH only the
# libraries themselves, as its entries may be any folders.
READABLE = [
    *(f"{prefix}/{lib}" for prefix in (sys.prefix, sys.base_prefix) for lib in ("lib", "lib64")), PACKAGES,
    *(str(one) for entry in LIBRARIES for one in Path(entry).glob("*.so*") if _is_library(one) and _is_library(one.resolve())),
    "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/nix/store", "/gnu/store",
    "/etc/ld.so.cache", "/etc/localtime",
    "/dev/null", "/dev/urandom", "/dev/random", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
]  # fmt: skip
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": ":".join(LIBRARIES),
    "MALLOC_ARENA_MAX": "2",  # else threads reserve more address space than the limit allows
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "VECLIB_MAXIMUM")},
}


@dataclass(frozen=True)
class Limits:
    """Limits on a program."""

    seconds: float = 30.0  # wall-clock time, including the start of Python
    cpu_seconds: float = 30.0  # CPU time of all threads
    memory_mb: float = 2000.0  # address space, including that of Python and its libraries
    threads: int = 64  # their number
    output_mb: float = 10.0  # size of its output, and of its result


class ProgramError(Exception):
    """A program has no result; the message, of one line, is for its author."""


def run_program(source: bytes, limits: Limits, name: str = "program.py") -> Any:
    """Run a program in the sandbox and return its points: ``run_code()``, ``get_centers()`` or ``points``, as read from JSON.

    ``name``: the program's name in messages.

    Raises ProgramError: it has no result, or exceeded a limit. Raises UserError: the sandbox could not be set up, or would let
    the program read the project's folder or the home.
    """
    most = int(limits.output_mb * MB)
    with TemporaryFile() as given, TemporaryFile() as result, TemporaryFile() as printed:
        of_the_script = {"name": name, "result": result.fileno(), "parent": os.getpid()}
        of_reading = {"packages": PACKAGES, "readable": READABLE, "closed": _closed()}
        settings = asdict(limits) | of_the_script | of_reading
        given.write(json.dumps(settings | {"source": source.decode("latin-1")}).encode())
        given.seek(0)
        with subprocess.Popen(
            [sys.executable, "-I", "-B", SCRIPT],
            stdin=given,
            stdout=printed,
            stderr=printed,
            cwd="/",
            env=ENVIRONMENT,
            pass_fds=(result.fileno(),),
            start_new_session=True,
        ) as process:
            try:
                failure = _exceeded(process, limits)
            finally:
                process.kill()
        # Read by position, because the program shares the files' offsets.
        size, end = os.fstat(result.fileno()).st_size, os.fstat(printed.fileno()).st_size
        sent = os.pread(result.fileno(), most, 0)
        tail = _one_line(os.pread(printed.fileno(), SHOWN, max(0, end - SHOWN)).decode("utf-8", "replace"))
    if failure:
        pass
    elif end > most or size > most:
        failure = f"The {'result is larger' if size > most else 'program printed more'} than {limits.output_mb:g} MB"
    elif process.returncode < 0:
        number = -process.returncode
        failure = f"The program was killed by signal {number} ({signal.strsignal(number)})"
    elif not sent:
        raise UserError(f"the sandbox, which needs Linux and libseccomp, could not be set up: {tail}")
    else:
        points, failure = _parsed(sent, process.returncode)
        if not failure:
            return points
    raise ProgramError(failure + (f". The end of what it printed: {tail}" if tail else ""))


def _closed() -> list[str]:
    """Folders that a program may not open: the home, the project's folder and the study's."""
    return sorted(
        {"/", os.environ.get("HOME") or "/", str(Path.cwd()), *(str(folder.absolute()) for folder in study_folders())}
    )


def _exceeded(process: subprocess.Popen[bytes], limits: Limits) -> str:
    """Wait until a program ends or exceeds a limit, and return which; "" if none."""
    deadline, watched = time.monotonic() + limits.seconds, psutil.Process(process.pid)
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return ""
        if time.monotonic() > deadline:
            return f"The program took longer than the time limit of {limits.seconds:g} s"
        with suppress(psutil.Error, OSError):  # it has just ended
            if sum(watched.cpu_times()[:2]) > limits.cpu_seconds:
                return f"The program used up its {limits.cpu_seconds:g} s of CPU time"
            # Not psutil's num_threads, which takes the first `Threads:` in a file that begins with the program's own name.
            if len([*Path(f"/proc/{process.pid}/task").iterdir()]) > limits.threads:
                return f"The program started more than {limits.threads} threads"


def _parsed(result: bytes, code: int) -> tuple[Any, str]:
    """Parse the result, which may be anything: points and "", or None and the reason why there are none."""
    if not result.strip():
        return None, f"The program ended without a result (exit code {code}): it must not end itself"
    try:
        reply = json.loads(result.decode("utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        return None, f"What the program gave cannot be read: {error}"
    if not isinstance(reply, dict) or ("points" in reply) == ("error" in reply):
        return None, "What the program sent is no result"
    return reply.get("points"), _one_line(str(reply.get("error", "")))


def _integer(digits: str) -> int:
    """Parse an integer; ValueError if it has so many digits that arithmetic takes long."""
    if (count := len(digits.removeprefix("-"))) > MOST_DIGITS:
        raise ValueError(f"it holds an integer of {count} digits, at most {MOST_DIGITS} are allowed")
    return int(digits)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:2000]).strip()
