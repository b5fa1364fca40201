"""Brings the folders of runs to MLflow: :func:`sync` sends what a folder has and MLflow does not.

It may be called at any time, and as often as one likes: a run is known by its tag ``run_key``, and MLflow keeps equal metrics
(key, step, time, value), parameters and tags once. ``grpo mlflow_import`` calls it for what is left on disk. While runs go on,
a process of its own does, one for all runs of a machine, since starting MLflow takes longer than a small run does: the first
run starts it, and it ends some seconds after the last.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from grpo.common.errors import UserError
from grpo.common.files import write_json
from grpo.study import paths
from grpo.tracking.mlflow_client import (
    ANSWER,
    METRICS,
    RUN,
    SYSTEM,
    describe,
    is_locked,
    local_database,
    lock_of_sender,
    read_answer,
    tracking_uri,
    without_password,
)
from grpo.tracking.mlflow_store import (
    LOCK_SECONDS,
    Sent,
    bring_artifacts_along,
    end_parents,
    find_or_make,
    send_checkpoints,
    send_description,
    send_files,
    send_metrics,
)
from grpo.tracking.system_metrics import SystemMetrics

ROUND_SECONDS = 2.0  # between two looks at a run that goes on
RETRY_SECONDS = 10.0  # the same where MLflow could not be written
LINGER_SECONDS = 8.0  # how long the process waits for another run
CONNECT_SECONDS = 5
SLOW_SECONDS, MOMENT_SECONDS = 2.0, 60.0  # what failed this slowly, this long ago, is not waited for again
# MLflow's own settings take minutes to fail. No request is sent twice: a second one would make a second run where only the
# first one's answer was lost. A second call of `sync` finds it.
HTTP_SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def sync(folder: Path, uri: str, sent: Sent) -> bool:
    """Send to MLflow what a run's folder has and MLflow has not, and note it in ``sent``.

    A run whose process is no more, and has not said how it ended, was KILLED at its last sign of life.

    Returns:
        whether the run is over.

    Raises:
        BlockingIOError: another process is at it.
        Exception: whatever the network, the server, the database or the folder raises.
    """
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alive = is_locked(folder / METRICS)  # asked first: what is read after its end is the last word
        about = json.loads((folder / RUN).read_bytes())
        require_listener(uri)
        client = _client(uri)
        if sent.run_id is None:
            # By its key it is found here, or made anew, as where a database was removed; elsewhere it must be the run itself.
            run_id = None if about["uri"] == without_password(uri) else read_answer(folder)["run_id"]
            find_or_make(client, folder, about, uri, run_id, sent)
            write_json(folder / ANSWER, {"run_id": sent.run_id, "over": False, "errors": []})
        send_description(client, about, sent)
        over = not alive or about["status"] is not None
        send_metrics(client, folder, sent, to_the_end=over)
        if not over:
            return False
        send_files(client, about, sent)
        send_checkpoints(client, folder, about, sent)
        seen = int((folder / METRICS).stat().st_mtime * 1000)  # of a coarser clock, which may be some milliseconds behind
        ended = about["ended"] or max(seen, about["started"])
        client.set_terminated(sent.run_id, about["status"] or "KILLED", end_time=ended)
        return True


_opened: dict[str, tuple[int, int] | None] = {}  # which file a local database was when it was opened


@lru_cache(maxsize=1)
def _client(uri: str) -> Any:
    """MLflow's client. Processes that meet a new database at once race to make its tables; the first one does it alone."""
    from filelock import FileLock
    from mlflow.tracking import MlflowClient

    database = local_database(uri)
    with FileLock(f"{database}.lock", timeout=LOCK_SECONDS) if database else nullcontext():
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
        if database:
            bring_artifacts_along(database)
        _opened[uri] = _file_of_database(uri)
    return client


def require_listener(uri: str) -> None:
    """Raise OSError where nothing listens: sooner than MLflow would, which has one limit for connecting and for answering."""
    parts = urlsplit(uri)
    port = {"http": 80, "https": 443}.get(parts.scheme)
    if port is not None and parts.hostname and (parts.scheme not in getproxies() or proxy_bypass(parts.hostname)):
        socket.create_connection((parts.hostname, parts.port or port), timeout=CONNECT_SECONDS).close()


def fail_soon() -> None:
    """Have MLflow's HTTP client give up after seconds instead of minutes, unless the user has set otherwise."""
    for name, value in HTTP_SETTINGS.items():
        os.environ.setdefault(name, value)


# ----------------------------------------------------------------------------------------------------- while runs go on


class Sender:
    """Brings the folders of a machine's runs to one place, as long as there are any."""

    def __init__(self, uri: str):
        self._uri = uri
        self._sent: defaultdict[Path, Sent] = defaultdict(Sent)
        self._next_look: defaultdict[Path, float] = defaultdict(float)
        self._machine: dict[Path, SystemMetrics] = {}
        self._failed: dict[bool, tuple[float, Exception]] = {}  # when and how; of ends of runs, and of runs that went on

    def look(self, folder: Path) -> None:
        """Send what is new in a folder, when it is time to; at the run's end say what became of it."""
        about = json.loads((folder / RUN).read_bytes())
        over = about["status"] is not None
        if not over:
            self._measure(folder, about)
        if not over and time.monotonic() < self._next_look[folder]:
            return
        over = over or not is_locked(folder / METRICS)
        sent, errors, pause = self._sent[folder], [], ROUND_SECONDS
        try:
            with self._waited_for_once(over):
                over = self._sync(folder, sent, deadline=time.monotonic() + (LOCK_SECONDS if over else 0.0))
        except BlockingIOError:
            return
        except Exception as error:
            errors, pause = [describe(error)], RETRY_SECONDS
        self._next_look[folder] = time.monotonic() + pause
        if over and (folder / RUN).exists():  # an import may have been quicker
            write_json(folder / ANSWER, {"run_id": sent.run_id, "over": True, "errors": [*errors, *sent.complaints()]})

    def _measure(self, folder: Path, about: dict[str, Any]) -> None:
        """Sample the machine for a run that goes on, where the disk takes it."""
        if folder not in self._machine:
            self._machine[folder] = SystemMetrics(folder / SYSTEM, about["started"], about.get("gpus"))
        with suppress(OSError):
            self._machine[folder].look()

    def _sync(self, folder: Path, sent: Sent, deadline: float) -> bool:
        while True:
            try:
                return sync(folder, self._uri, sent)
            except Exception as error:  # MLflow itself waits for 20 s
                if "database is locked" not in str(error) or time.monotonic() > deadline:
                    raise

    def close(self) -> None:
        """Say that the studies, too, have ended for now; where MLflow is away, they are left as they are."""
        with suppress(Exception):
            end_parents(_client(self._uri))

    @contextmanager
    def _waited_for_once(self, over: bool) -> Iterator[None]:
        """Fail at once where the same thing failed slowly a moment ago: of many runs only one waits for a silent server."""
        began = time.monotonic()
        failed_at, last_error = self._failed.get(over, (float("-inf"), OSError()))
        if began - failed_at < MOMENT_SECONDS:
            raise last_error
        try:
            yield
        except Exception as error:
            if time.monotonic() - began > SLOW_SECONDS:
                self._failed[over] = time.monotonic(), error
            raise


def main(name: str) -> None:
    """Look after the folders of this sender as long as there are any, unless another process does."""
    # What stops the training, such as the end of a Slurm job, is sent to every process; this one has to write that it ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fail_soon()
    while True:
        with lock_of_sender(name).open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            with suppress(FileNotFoundError):
                os.truncate(lock_of_sender(name).with_suffix(".log"), 0)
            _serve(name, tracking_uri())
        if not _unfinished(name):  # looked for once more, as a run that has just begun may still have seen the lock
            return


def _serve(name: str, uri: str) -> None:
    """Look after the folders, until there have been none for ``LINGER_SECONDS``."""
    import mlflow.tracking  # noqa: F401 - now, while the process that trains has its own imports to do

    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # its errors, with tracebacks, are told by the run in one message
    sender, last = Sender(uri), time.monotonic()
    while time.monotonic() - last < LINGER_SECONDS:
        for folder in _unfinished(name):
            last = time.monotonic()
            if uri in _opened and _opened[uri] != _file_of_database(uri):  # MLflow writes to a file that was removed since
                os.execv(sys.executable, [sys.executable, "-m", "grpo.tracking.mlflow_sync", name])
            with suppress(FileNotFoundError):  # an import may be quicker
                sender.look(folder)
        time.sleep(0.05)
    sender.close()


def _unfinished(name: str) -> list[Path]:
    """The folders that this sender is not done with; those that MLflow has, and whose runs were killed, are removed."""
    unfinished = []
    for folder in sorted((paths.workspace() / paths.UNSENT_METRICS).glob(f"*.{name}")):
        answer = read_answer(folder)
        if not answer["over"] and (folder / RUN).exists():
            unfinished.append(folder)
        elif answer["over"] and not answer["errors"] and not is_locked(folder / METRICS):
            shutil.rmtree(folder, ignore_errors=True)
    return unfinished


def _file_of_database(uri: str) -> tuple[int, int] | None:
    """Which file the local database is; None where there is none."""
    database = local_database(uri)
    with suppress(OSError):
        return ((about := database.stat()).st_dev, about.st_ino) if database else None
    return None


# ---------------------------------------------------------------------------------------------------------- by hand


def import_folders(folders: Iterable[Path], uri: str) -> Iterator[str]:
    """Bring the folders of runs that are over to MLflow; one that was delivered is removed.

    Yields:
        lines that say what became of each folder.

    Raises:
        UserError: MLflow cannot be reached, or not all could be delivered. The folders in question are kept.
    """
    fail_soon()
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    problems: list[str] = []
    for folder in folders:
        if not (folder / RUN).exists():
            problems.append(f"{folder}: no folder of a run")
            continue
        try:
            about = json.loads((folder / RUN).read_bytes())
            name = f"{about['experiment']} {about['name']}"
        except (ValueError, KeyError, TypeError):
            problems.append(f"{folder} is kept: {RUN}, which says what run it is, is damaged")
            continue
        sent = Sent()
        try:
            if is_locked(folder / METRICS):
                raise BlockingIOError
            sync(folder, uri, sent)
        except BlockingIOError:
            yield f"{folder}: left alone, as its run is not over; that delivers it at its end if it can"
        except Exception as error:
            code = getattr(error, "error_code", "INTERNAL_ERROR")
            if code in {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE"}:
                raise UserError(
                    f"MLflow at {without_password(uri)} could not be written: {describe(error)}\n"
                    f"  {folder} is kept, and so are the folders after it. Check MLFLOW_TRACKING_URI."
                ) from error
            reason = describe(error)
            if code == "RESOURCE_DOES_NOT_EXIST" and sent.run_id:
                reason = (
                    f"it continues run {sent.run_id}, which {about['uri']} has and {without_password(uri)} has not. Set"
                    f" MLFLOW_TRACKING_URI; or remove {ANSWER} from it, and the import makes a new run"
                )
            problems.append(f"{folder} is kept: {reason}")
        else:
            if sent.refused:
                problems.append(f"{folder} is kept: the rest is in run {sent.run_id}, but {'; '.join(sent.complaints())}")
                continue
            shutil.rmtree(folder)
            yield f"{name}: run {sent.run_id}, {sent.metrics} metrics"
            yield from (f"  {complaint}" for complaint in sent.complaints())
    with suppress(Exception):  # each run is there, and only the study's own would be shown as going on
        end_parents(_client(uri))
    if problems:
        raise UserError("\n".join(problems))


if __name__ == "__main__":
    main(sys.argv[1])
