"""Client side of the grading processes: start them, send requests, check whether they are alive.

:mod:`grpo.grader.worker` is the other side and describes the protocol. :mod:`grpo.grader.pool` distributes the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_START_LIMIT_S = 300.0  # a cold file server may take minutes to deliver sympy
_CONTROL_LIMIT_S = 30.0


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer.

    Attributes:
        equal: whether the answer is right; a float from a function that scores.
        timed_out: undecided, because the time was up or the worker died; then ``equal`` is False.
    """

    equal: bool | float
    timed_out: bool = False


TIMED_OUT = Verdict(equal=False, timed_out=True)


class Zygote:
    """The process that forks workers. A failed or interrupted request closes it; all later requests raise OSError."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start the process and wait until it has imported the computer algebra (about 1.5 s); OSError if that fails."""
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "grpo.grader.worker", str(theirs.fileno()), *arguments]
        # The same module path as this process, and a fixed hash seed, so that each run gives the same results.
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if Path(entry).exists())
        with theirs, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            try:
                self._reply(_START_LIMIT_S)
            except OSError as error:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)  # to get its exit code
                self.close()
                errors.seek(0)
                message = errors.read().decode(errors="replace").strip()
                code = self._process.returncode
                raise ChildProcessError(f"it ended with code {code}: {message or error}") from error

    def fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        try:
            reply = self._request("fork\n", [theirs.fileno()])
            if reply.startswith("error"):
                raise RuntimeError(f"No grading worker could be forked: {reply}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Worker(self, int(reply), ours)

    def kill(self, pid: int) -> None:
        self._request(f"kill {pid}\n", [])

    def _request(self, text: str, descriptors: list[int]) -> str:
        try:
            socket.send_fds(self._control, [text.encode()], descriptors)
            return self._reply(_CONTROL_LIMIT_S)
        except BaseException:  # also Ctrl-C, as an unread reply would be read as the next one
            self.close()
            raise

    def _reply(self, limit_s: float) -> str:
        self._control.settimeout(limit_s)
        reply = b""
        while not reply.endswith(b"\n"):
            received = self._control.recv(1024)
            if not received:
                raise ConnectionError("it ended without a reply")
            reply += received
        return reply.decode()

    def close(self) -> None:
        """Kill the process and its workers, which are one process group; its number stays valid until ``wait``."""
        self._control.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def abandon(self) -> None:
        """Forget the process, in a forked child, which may neither kill the parent's process nor wait for it."""
        self._control.close()
        self._process.returncode = 0


class Worker:
    """The client of one worker process."""

    def __init__(self, zygote: Zygote, pid: int, connection: socket.socket) -> None:
        self.zygote = zygote
        self.pid = pid
        self._connection = connection
        self._answers = connection.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._connection.close()

    def is_alive(self) -> bool:
        """Whether the idle worker's connection is open."""
        try:
            self._connection.settimeout(0)
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def grade(self, pairs: Sequence[tuple[str, str]], limit_s: float) -> tuple[list[Verdict], bool]:
        """Grade pairs, and return verdicts on the first ones and whether the worker can continue; then they are complete.

        Args:
            limit_s: wall-clock seconds per answer; the worker itself enforces the limit on CPU time.
        """
        verdicts: list[Verdict] = []
        try:
            self._connection.settimeout(limit_s)
            self._connection.sendall(json.dumps(pairs).encode() + b"\n")
            for _ in pairs:
                line = self._answers.readline()
                if not line.endswith(b"\n"):
                    raise ConnectionError("the worker died")
                equal, spent = json.loads(line)
                verdicts.append(Verdict(equal))
                if spent:
                    return verdicts, False
        except OSError:  # the limit was exceeded (TimeoutError), or the worker died
            return [*verdicts, TIMED_OUT], False
        return verdicts, True
