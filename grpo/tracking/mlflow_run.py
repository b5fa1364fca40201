"""One run in MLflow, and what it takes to write it beside many others: to SQLite, or to a server that may be away."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

LOCK_SECONDS = 60  # how long SQLite waits for other writers
CONNECT_SECONDS = 5
SLOW_SECONDS, MOMENT_SECONDS = 2.0, 60.0  # what failed this slowly, this long ago, is not waited for again
METRICS_PER_CALL = 1000  # MLflow takes no more
HTTP_SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # MLflow's take minutes to fail

Message = dict[str, Any]


class MlflowWriter:
    """One MLflow run. Each method does what the message of its name asks for, and raises what MLflow raises."""

    def __init__(self) -> None:
        self.client: Any = None
        self.run_id: str | None = None

    def obey(self, message: Message) -> None:
        """Do what a message asks for: ``do`` names a method, the rest are its arguments."""
        arguments = {key: value for key, value in message.items() if key not in {"run", "do", "unsent"}}
        METHODS[message["do"]](self, **arguments)

    def start(
        self,
        uri: str,
        artifacts: str,
        experiment: str,
        name: str,
        params: dict[str, str],
        tags: dict[str, str],
        time: int,
        run_id: str | None = None,
        again: bool = False,
    ) -> None:
        """Make the run, and its experiment where it is new.

        Args:
            artifacts: URI of the folder for the artifacts of a new experiment in a local database.
            time: when it started, in ms.
            run_id: a run to go on with instead.
            again: go on with the run that has the tag ``run_key``, if there is one.
        """
        from mlflow.entities import Param

        _knock(uri)
        with _single_tries():  # a second try would make a second run where only the first one's answer was lost
            experiment_id = self._experiment(uri, experiment, artifacts)
            if again and run_id is None:
                found = self.client.search_runs([experiment_id], f"tags.run_key = '{tags['run_key']}'")
                run_id = found[0].info.run_id if found else None
            if run_id is None:
                run_id = self.client.create_run(experiment_id, start_time=time, run_name=name, tags=tags).info.run_id
            elif again:
                self.client.get_run(run_id)
        self.run_id = run_id
        # One transaction for all: each costs the database a write to disk.
        self.client.log_batch(run_id, params=[Param(*param) for param in params.items()])

    def _experiment(self, uri: str, name: str, artifacts: str) -> str:
        """The experiment's id; it is made if there is none."""
        from filelock import FileLock
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        local = uri.startswith("sqlite:///")
        if local:
            _wait_for_locks()
        database = uri.removeprefix("sqlite:///").partition("?")[0]
        # Processes that meet a new database at once race to make its tables; the first one does it alone.
        with FileLock(f"{database}.lock", timeout=LOCK_SECONDS) if local else nullcontext():
            self.client = MlflowClient(tracking_uri=uri)
            found = self.client.get_experiment_by_name(name)
            if found is None:
                try:
                    return str(self.client.create_experiment(name, artifact_location=artifacts if local else None))
                except MlflowException:  # another run may have made it in the meantime
                    found = self.client.get_experiment_by_name(name)
                    if found is None:
                        raise
            return str(found.experiment_id)

    def log(self, metrics: list[tuple[str, float, int, int]]) -> None:
        """Record (key, value, time in ms, step)."""
        from mlflow.entities import Metric

        for start in range(0, len(metrics), METRICS_PER_CALL):
            batch = metrics[start : start + METRICS_PER_CALL]
            self.client.log_batch(self.run_id, metrics=[Metric(*metric) for metric in batch])

    def tag(self, tags: dict[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(*tag) for tag in tags.items()])

    def artifact(self, path: str) -> None:
        """Keep a copy of a file with the run."""
        self.client.log_artifact(self.run_id, path)

    def finish(self, status: str, time: int) -> None:
        """Close the run, which ended at ``time`` (ms)."""
        self.client.set_terminated(self.run_id, status, end_time=time)


METHODS: Mapping[str, Callable[..., None]] = {
    "start": MlflowWriter.start,
    "log": MlflowWriter.log,
    "tag": MlflowWriter.tag,
    "artifact": MlflowWriter.artifact,
    "finish": MlflowWriter.finish,
}


@lru_cache(maxsize=1)
def _wait_for_locks() -> None:
    """Let SQLite wait ``LOCK_SECONDS`` for other writers.

    SQLAlchemy's 5 s hold until MLflow sets 20 s at the start of each session, whatever ``?timeout=`` in the URI says.
    """
    import sqlite3

    from sqlalchemy import Engine, event

    pragma = f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}"

    @event.listens_for(Engine, "connect")
    def at_first(connection: Any, record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute(pragma)

    @event.listens_for(Engine, "before_cursor_execute", retval=True)
    def in_sessions(
        conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> tuple[str, Any]:
        return (pragma if statement.startswith("PRAGMA busy_timeout") else statement), parameters


def _knock(uri: str) -> None:
    """Raise OSError where nothing listens: sooner than MLflow would, which has one limit for connecting and for answering."""
    parts = urlsplit(uri)
    port = {"http": 80, "https": 443}.get(parts.scheme)
    if port is not None and parts.hostname and (parts.scheme not in getproxies() or proxy_bypass(parts.hostname)):
        socket.create_connection((parts.hostname, parts.port or port), timeout=CONNECT_SECONDS).close()


def fail_soon() -> None:
    """Have MLflow's HTTP client give up after seconds instead of minutes, unless the user has set otherwise."""
    for name, value in HTTP_SETTINGS.items():
        os.environ.setdefault(name, value)


@contextmanager
def _single_tries() -> Iterator[None]:
    """Have MLflow send each request once, unless the user has set otherwise."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    usual = os.environ.get(name)
    if usual == HTTP_SETTINGS[name]:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if usual is not None:
            os.environ[name] = usual


_failed_slowly: dict[tuple[str, str], tuple[float, Exception]] = {}


@contextmanager
def waited_for_once(what: str, uri: str) -> Iterator[None]:
    """Fail at once where the same thing failed slowly a moment ago: a process with many runs waits for one of them only."""
    failed_at, last_error = _failed_slowly.get((what, uri), (float("-inf"), OSError()))
    began = time.monotonic()
    if began - failed_at < MOMENT_SECONDS:
        raise last_error
    try:
        yield
    except Exception as error:
        if time.monotonic() - began > SLOW_SECONDS:
            _failed_slowly[what, uri] = time.monotonic(), error
        raise
