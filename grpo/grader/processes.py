"""This side of the grading processes: starting them, asking them, telling whether they are alive.

The other side is :mod:`grpo.grader.worker`, which also states what they say to each other. Which process grades what is up
to :mod:`grpo.grader.pool`.
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
    """Whether an answer is right, or by a function that scores how right it is. ``timed_out``: undecided, because the time was
    up or the worker died; never ``equal``.
    """

    equal: bool | float
    timed_out: bool = False


TIMED_OUT = Verdict(equal=False, timed_out=True)


class Zygote:
    """The process that forks workers. Once a request failed or was interrupted, it is closed and all others raise OSError."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start it and wait until it has imported the computer algebra (about 1.5 s); OSError if that fails."""
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "grpo.grader.worker", str(theirs.fileno()), *arguments]
        # It must find the modules that this process finds, and treat equal strings equally in each run.
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
                    self._process.wait(1)  # for its own exit code
                self.close()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip()
                code = self._process.returncode
                raise ChildProcessError(f"it ended with code {code} and the words: {said or error}") from error

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
        except BaseException:  # Ctrl-C too: the reply that was not read would be taken for the next one
            self.close()
            raise

    def _reply(self, limit_s: float) -> str:
        self._control.settimeout(limit_s)
        reply = b""
        while not reply.endswith(b"\n"):
            received = self._control.recv(1024)
            if not received:
                raise ConnectionError("it ended without a word")
            reply += received
        return reply.decode()

    def close(self) -> None:
        """Kill it and its workers: they are one process group, whose number is ours until ``wait`` below."""
        self._control.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def abandon(self) -> None:
        """In a forked child, which may neither end the parent's process nor wait for it."""
        self._control.close()
        self._process.returncode = 0


class Worker:
    """This process's end of one worker."""

    def __init__(self, zygote: Zygote, pid: int, connection: socket.socket) -> None:
        self.zygote = zygote
        self.pid = pid
        self._connection = connection
        self._answers = connection.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._connection.close()

    def is_alive(self) -> bool:
        """Whether the idle worker still holds its end of the connection."""
        try:
            self._connection.settimeout(0)
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def grade(self, pairs: Sequence[tuple[str, str]], limit_s: float) -> tuple[list[Verdict], bool]:
        """Verdicts on the first of ``pairs`` and whether the worker can go on; if so, they are verdicts on all of them.

        Args:
            limit_s: seconds on the clock for one answer; that of its CPU time the worker keeps itself.
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
