"""The process that writes to MLflow, so that neither MLflow's import nor its database takes time from training.

Starting MLflow takes longer than a small run does. So all runs of a machine that write to one place share the process: the
first one starts it, and it ends some seconds after the last one. It listens on a Unix socket, reads one JSON message a line
from each connection, and answers ``finish`` with one line. When a connection ends, because the process that trains has ended or
was killed, what is unfinished there is marked as KILLED.

From a run's first error on (server away, database locked), its messages go to a file instead
(:mod:`grpo.tracking.mlflow_unsent`). When the run ends, one attempt is made to deliver them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from grpo.tracking.mlflow_client import tracking_uri, without_password
from grpo.tracking.mlflow_run import Message, MlflowWriter, fail_soon, waited_for_once
from grpo.tracking.mlflow_unsent import Unsent, deliver, describe

DELIVERY_SECONDS = 60.0  # how long the end of a run may take to deliver what was kept on disk
LINGER_SECONDS = 8.0  # how long the process waits for another run
READY = b"ready\n"  # what a connection is greeted with


class Recorder:
    """One MLflow run, as messages about it come."""

    def __init__(self) -> None:
        self._run = MlflowWriter()
        self._start: Message = {}
        self._unsent: Unsent | None = None
        self._error: str | None = None

    def obey(self, message: Message) -> None:
        """Have MLflow do what a message asks for; from the first error on, keep the messages on disk until the run ends."""
        if message["do"] == "start":
            self._start = message
        if self._unsent is None:
            try:
                self._send(message)
                return
            except Exception as error:  # whatever the network, the server or the database raises
                self._error = describe(error)
            about = {"uri": without_password(self._start["uri"]), "run_id": self._run.run_id}
            self._unsent = Unsent(Path(self._start["unsent"]), {**self._start, **about})
        self._unsent.write(message)
        if message["do"] == "finish":
            self._deliver(self._unsent, message)

    def _send(self, message: Message) -> None:
        if message["do"] == "start":
            with waited_for_once("start", message["uri"]):
                self._run.obey(message)
        else:
            self._run.obey(message)

    def _deliver(self, unsent: Unsent, ending: Message) -> None:
        """Try once to deliver what is on disk."""
        uri = self._start["uri"]
        complaints = [f"{unsent.lost} messages could not be kept on disk: {describe(unsent.trouble)}"] if unsent.trouble else []
        delivered = False
        try:
            with waited_for_once("deliver", uri):
                delivery = deliver({**self._start, "run_id": self._run.run_id}, unsent.lines(), uri, ending, DELIVERY_SECONDS)
            self._run.run_id = delivery.run_id
            delivered = not delivery.refused
            complaints += delivery.complaints()
        except Exception as error:
            complaints.insert(0, describe(error))
        unsent.close(delivered)
        self._error = "; ".join(complaints) or None

    def answer(self) -> dict[str, Any]:
        """What ``finish`` is answered with."""
        return {"run_id": self._run.run_id, "error": self._error}


class Connections:
    """The processes that train, by the lines that they send.

    Attributes:
        lines: (connection, line) as they come; None as a line where the connection has ended.
    """

    def __init__(self, listener: socket.socket, path: Path, lock: TextIO):
        self.lines: SimpleQueue[tuple[socket.socket, bytes | None]] = SimpleQueue()
        self._listener, self._path, self._lock_file = listener, path, lock
        self._open = 0
        self._closed = False
        self._database: tuple[int, int] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        """Take messages in at once: what still waits in the other process is lost when that is killed."""
        with self._lock:
            if self._database and _file_of_database() != self._database:  # what is written to a removed file, nobody ever sees
                self._stop()
            if self._closed:  # without a greeting the other side starts a process of its own
                connection.close()
                return
            self._open += 1
        with suppress(OSError):
            connection.sendall(READY)
            for line in connection.makefile("rb"):
                self.lines.put((connection, line))
        self.lines.put((connection, None))

    def ended(self) -> None:
        """One of them is dealt with."""
        with self._lock:
            self._open -= 1

    def wrote(self) -> None:
        """The database has been opened."""
        with self._lock:
            self._database = self._database or _file_of_database()

    def close(self) -> bool:
        """Greet no others, if there are none now; whether that is so."""
        with self._lock:
            if self._open == 0:
                self._stop()
            return self._open == 0

    def _stop(self) -> None:
        """Make room for another process."""
        if not self._closed:
            self._closed = True
            self._path.unlink(missing_ok=True)
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)


def _file_of_database() -> tuple[int, int] | None:
    """Which file the local database is; None where there is none."""
    uri = tracking_uri()
    if not uri.startswith("sqlite:///"):
        return None
    with suppress(OSError):
        about = Path(uri.removeprefix("sqlite:///").partition("?")[0]).stat()
        return about.st_dev, about.st_ino
    return None


def main(path: Path) -> None:
    """Obey messages that come through the socket ``path``, until there has been nobody for ``LINGER_SECONDS``."""
    # What stops the training, such as the end of a Slurm job, is sent to every process; this one has to write that it ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fail_soon()
    with path.with_suffix(".lock").open("a") as lock, socket.socket(socket.AF_UNIX) as listener:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if path.exists():  # another process, started at the same moment, listens
                    return
                time.sleep(0.05)  # another one is about to end
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
        connections = Connections(listener, path, lock)
        import mlflow.tracking  # noqa: F401 - now, while the other process has its own imports to do

        # Its errors, with their tracebacks, are told by the run in one message.
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        _serve(connections)


def _serve(connections: Connections) -> None:
    """Do what the lines say, until nobody is there to send more."""
    runs: dict[tuple[socket.socket, int], Recorder] = {}
    while True:
        try:
            connection, line = connections.lines.get(timeout=LINGER_SECONDS)
        except Empty:
            if connections.close():
                return
            continue
        if line is None:
            for key in [key for key in runs if key[0] is connection]:
                runs.pop(key).obey({"do": "finish", "status": "KILLED", "time": int(time.time() * 1000)})
            connections.ended()
            continue
        message = json.loads(line)
        key = connection, message["run"]
        recorder = runs.setdefault(key, Recorder())
        recorder.obey(message)
        connections.wrote()
        if message["do"] == "finish":
            del runs[key]
            with suppress(OSError):  # it may be gone by now
                connection.sendall(json.dumps(recorder.answer()).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
