"""What MLflow did not take: kept on disk from a run's first error on, delivered when the run ends or by ``grpo mlflow_import``.

A message may be delivered twice, because its first answer was lost: MLflow keeps equal metrics, parameters and tags once, and
a run is known again by its tag ``run_key``.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from grpo.common.errors import UserError
from grpo.tracking.mlflow_client import without_password
from grpo.tracking.mlflow_run import METHODS, METRICS_PER_CALL, Message, MlflowWriter, fail_soon


class Unsent:
    """The file with a run's ``start`` message and all that MLflow did not take, one JSON line each.

    It is locked (flock) as long as it is written, so that nobody imports half of it. A full disk costs messages, no more.

    Args:
        start: the run's ``start`` message; its ``run_id`` is that of the run where MLflow has it.
    """

    def __init__(self, path: Path, start: Message):
        self.path = path
        self.lost = 0
        self.trouble: OSError | None = None
        self._start = start
        self._file: BinaryIO | None = None
        self._size = 0

    def write(self, message: Message) -> None:
        """Append a message; ``start``, which comes first anyway, is not repeated."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
                _lock(self._file, fcntl.LOCK_EX)
            if self._size == 0:
                self._append(self._start)
            if message["do"] != "start":
                self._append(message)
        except OSError as error:
            self.lost += 1
            self.trouble = error

    def _append(self, message: Message) -> None:
        """Write a whole line or nothing."""
        assert self._file is not None
        line = memoryview(json.dumps(message).encode() + b"\n")
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)

    def lines(self) -> Iterator[bytes]:
        """What is on disk, without ``start``."""
        if self._size > 0:
            with self.path.open("rb") as file:
                yield from itertools.islice(file, 1, None)

    def close(self, delivered: bool) -> None:
        """Give the file free, or remove it."""
        if delivered or self._size == 0:
            with suppress(OSError):  # it may never have been made; one that stays is imported once more, which changes nothing
                self.path.unlink()
        if self._file is not None:
            self._file.close()


def _lock(file: BinaryIO, how: int) -> None:
    """Lock a file; raises BlockingIOError where another process has, and does without where the file system knows no locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError:
        pass


@dataclass
class Delivery:
    """What became of a run's messages."""

    run_id: str = ""
    metrics: int = 0
    gone: list[str] = field(default_factory=list)  # artifacts that are no longer there
    refused: list[str] = field(default_factory=list)  # what MLflow says about messages that it will never take
    damaged: int = 0  # lines

    def complaints(self) -> list[str]:
        """What was not delivered, each in a sentence without a full stop."""
        damaged = [f"{self.damaged} damaged lines were left out"] if self.damaged else []
        gone = [f"{path} was left out, as it is no longer there" for path in self.gone]
        return [*damaged, *gone, *(f"MLflow refused a message: {reason}" for reason in self.refused)]


def deliver(
    start: Message, lines: Iterable[bytes], uri: str, ending: Message | None = None, seconds: float = float("inf")
) -> Delivery:
    """Send a run's messages to MLflow; those that are there already are not doubled.

    Args:
        start: the run's ``start`` message.
        lines: the messages after it.
        ending: the ``finish`` message where there is none among them. If None, the run was KILLED at its last sign of life.
        seconds: time limit.

    Raises:
        TimeoutError: there was more to send than the time allowed.
        Exception: whatever MLflow raises.
    """
    from mlflow.exceptions import MlflowException

    began = time.monotonic()
    run, delivery = MlflowWriter(), Delivery()
    run.obey({**start, "uri": uri, "again": True})
    assert run.run_id is not None
    delivery.run_id = run.run_id
    last_sign, finished = start["time"], False
    for message in _in_batches(_messages(lines, delivery)):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"there was more to deliver than {seconds:.0f} seconds allow")
        if message["do"] == "artifact" and not Path(message["path"]).exists():
            delivery.gone.append(message["path"])
            continue
        try:
            run.obey(message)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            delivery.refused.append(str(error))
        finished = finished or message["do"] == "finish"
        if message["do"] == "log":
            delivery.metrics += len(message["metrics"])
            last_sign = max(metric[2] for metric in message["metrics"])
    if not finished:
        run.obey(ending or {"do": "finish", "status": "KILLED", "time": last_sign})
    return delivery


def _messages(lines: Iterable[bytes], delivery: Delivery) -> Iterator[Message]:
    """The messages; damaged lines, such as the last one after a power cut, are counted."""
    for line in lines:
        try:
            message = json.loads(line)
            METHODS[message["do"]]
        except (ValueError, KeyError, TypeError):
            delivery.damaged += 1
        else:
            yield message


def _in_batches(messages: Iterable[Message]) -> Iterator[Message]:
    """The same, with metrics that follow each other put together: a request costs more than its metrics do."""
    metrics: list[Any] = []
    for message in messages:
        if message["do"] == "log":
            metrics += message["metrics"]
        if metrics and (message["do"] != "log" or len(metrics) >= METRICS_PER_CALL):
            yield {"do": "log", "metrics": metrics}
            metrics = []
        if message["do"] != "log":
            yield message
    if metrics:
        yield {"do": "log", "metrics": metrics}


def describe(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def import_files(files: Sequence[Path], uri: str) -> Iterator[str]:
    """Deliver what runs left on disk; a file that was delivered is removed.

    Yields:
        lines that say what became of each file.

    Raises:
        UserError: MLflow cannot be reached, or not all could be delivered. The files in question are kept.
    """
    fail_soon()
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    problems: list[str] = []
    for path in files:
        try:
            with path.open("rb") as file:
                _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield from _import_file(path, file, uri)
        except BlockingIOError:
            yield f"{path}: left alone, as its run is not over; that delivers it at its end if it can"
        except FileNotFoundError:
            problems.append(f"{path}: no such file")
        except _FileProblem as problem:
            problems.append(f"{path} is kept: {problem}")
    if problems:
        raise UserError("\n".join(problems))


class _FileProblem(Exception):
    """A file cannot be delivered, which says nothing about others."""


def _import_file(path: Path, file: BinaryIO, uri: str) -> Iterator[str]:
    """Deliver one file, and remove it unless something in it was refused."""
    try:
        start = json.loads(file.readline())
        name = f"{start['experiment']} {start['name']}"
    except (ValueError, KeyError, TypeError):
        raise _FileProblem("its first line, which says what run it is, is damaged") from None
    try:
        delivery = deliver(start, file, uri)
    except Exception as error:
        code = getattr(error, "error_code", "INTERNAL_ERROR")
        if code == "RESOURCE_DOES_NOT_EXIST" and start.get("run_id"):
            raise _FileProblem(
                f"it continues run {start['run_id']}, which {start['uri']} has and {without_password(uri)} has not. Set"
                " MLFLOW_TRACKING_URI; or take run_id out of the file's first line, and the import makes a new run"
            ) from None
        if code not in {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE"}:
            raise _FileProblem(describe(error)) from error
        raise UserError(
            f"MLflow at {without_password(uri)} could not be written: {describe(error)}\n"
            f"  {path} is kept, and so are the files after it. Check MLFLOW_TRACKING_URI."
        ) from error
    if delivery.refused:
        raise _FileProblem(f"the rest is in run {delivery.run_id}, but " + "; ".join(delivery.complaints()))
    path.unlink()
    yield f"{name}: run {delivery.run_id}, {delivery.metrics} metrics"
    yield from (f"  {complaint}" for complaint in delivery.complaints())
