"""The process that writes to MLflow, so that neither MLflow's import nor its database takes time from training.

It reads one JSON message a line from its standard input, and answers ``finish`` with one line. When the input ends, because
the process that trains has ended or was killed, it marks what is unfinished as KILLED and ends too.

From a run's first error on (server away, database locked), its messages go to a file instead (:mod:`grpo.mlflow_unsent`). When
the run ends, one attempt is made to deliver them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from grpo.mlflow_run import Message, Run, fail_soon, waited_for_once
from grpo.mlflow_unsent import Unsent, deliver, told
from grpo.tracking import without_password

DELIVERY_SECONDS = 60.0  # how long the end of a run may take to deliver what was kept on disk


class Recorder:
    """One MLflow run, as messages about it come."""

    def __init__(self) -> None:
        self._run = Run()
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
                self._error = told(error)
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
        complaints = [f"{unsent.lost} messages could not be kept on disk: {told(unsent.trouble)}"] if unsent.trouble else []
        delivered = False
        try:
            with waited_for_once("deliver", uri):
                delivery = deliver({**self._start, "run_id": self._run.run_id}, unsent.lines(), uri, ending, DELIVERY_SECONDS)
            self._run.run_id = delivery.run_id
            delivered = not delivery.refused
            complaints += delivery.complaints()
        except Exception as error:
            complaints.insert(0, told(error))
        unsent.close(delivered)
        self._error = "; ".join(complaints) or None

    def answer(self) -> dict[str, Any]:
        """What ``finish`` is answered with."""
        return {"run_id": self._run.run_id, "error": self._error}


def main() -> None:
    """Obey messages until there are no more."""
    # What stops the training, such as the end of a Slurm job, is sent to every process; this one has to write that it ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what MLflow prints is no answer
    fail_soon()
    lines: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    import mlflow.tracking  # noqa: F401 - now, while the other process has its own imports to do

    logging.getLogger("mlflow").setLevel(
        logging.CRITICAL
    )  # its errors, with their tracebacks, are told by the run in one message
    runs: dict[int, Recorder] = {}
    while (line := lines.get()) is not None:
        message = json.loads(line)
        recorder = runs.setdefault(message["run"], Recorder())
        recorder.obey(message)
        if message["do"] == "finish":
            answers.write(json.dumps(recorder.answer()) + "\n")
            answers.flush()
            del runs[message["run"]]
    for recorder in runs.values():
        recorder.obey({"do": "finish", "status": "KILLED", "time": int(time.time() * 1000)})


def _read(lines: SimpleQueue[str | None]) -> None:
    """Take messages in at once: what still waits in the other process is lost when that is killed."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    main()
