"""The one place that writes metrics: CSV files for the pipeline, MLflow for the eye.

A run's files hold everything that is reproducible; wall-clock figures go to a file of their own, so that the others can be
compared byte for byte. MLflow is written by a process of its own: neither its import nor its database slows training down,
and a tracking server that fails does not fail the run.
"""

from __future__ import annotations

import getpass
import hashlib
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from grpo.study import paths
from grpo.study.environment import environment_tags

DATABASE = "mlflow.db"
ARTIFACTS = "mlruns"
SECONDS_BETWEEN_FLUSHES = 2.0
WRITER_STARTS_SECONDS = 60.0


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the project's folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.workspace() / DATABASE}"


class MlflowRun:
    """One MLflow run, written by a process of its own (:mod:`grpo.tracking.mlflow_process`).

    It carries the tag ``run_key``, by which it is known again when MLflow could not be written and the run is imported later.

    Args:
        experiment: the MLflow experiment's name; made if it does not exist.
        name: the run's name.
        params, tags: values are turned into text.
    """

    def __init__(self, experiment: str, name: str, params: Mapping[str, Any], tags: Mapping[str, Any]):
        self._number = next(_numbers)
        self._pending: list[tuple[str, float, int, int]] = []
        self._last_flush = time.monotonic()
        self._uri = tracking_uri()
        key = uuid.uuid4().hex
        unsent = f"{_file_name(experiment)}-{_file_name(name)}-{key[:12]}.jsonl"
        self._unsent = paths.workspace() / paths.UNSENT_METRICS / unsent  # exists as long as MLflow lacks something
        self._send(
            "start",
            uri=self._uri,
            artifacts=(paths.workspace() / ARTIFACTS / experiment).as_uri(),
            experiment=experiment,
            name=name,
            params=_as_text(params),
            tags=_as_text({**environment_tags(), **mlflow_source_tags(), **source_tags(), **tags, "run_key": key}),
            time=_milliseconds(),
            unsent=str(self._unsent),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step."""
        now = _milliseconds()
        self._pending += [(key, float(value), now, step) for key, value in metrics.items()]
        if time.monotonic() - self._last_flush > SECONDS_BETWEEN_FLUSHES:
            self._flush()

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._send("tag", tags=_as_text(tags))

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file with the run."""
        self._send("artifact", path=str(path.absolute()))

    def finish(self, status: str = "FINISHED") -> str | None:
        """Write what is left and close the run.

        Returns:
            the run's id, or None where it could not be made. Where something could not be written, a warning says what and
            how to deliver it later; the run's files are whole.
        """
        self._flush()
        self._send("finish", status=status, time=_milliseconds())
        answer = _writer().answer()
        if answer["error"] is not None:
            print(_warning(self._uri, answer["error"], self._unsent), file=sys.stderr)
        run_id: str | None = answer["run_id"]
        return run_id

    def _flush(self) -> None:
        pending, self._pending, self._last_flush = self._pending, [], time.monotonic()
        if pending:
            self._send("log", metrics=pending)

    def _send(self, do: str, **arguments: Any) -> None:
        _writer().send(json.dumps({"run": self._number, "do": do, **arguments}))


def _warning(uri: str, error: str, unsent: Path) -> str:
    """What a user has to know when MLflow could not be written."""
    lines = [f"warning: MLflow at {without_password(uri)} could not be written: {error}", "  The run's own files are complete."]
    if unsent.exists():
        lines += [
            f"  What MLflow lacks is kept in {unsent}",
            "  Check MLFLOW_TRACKING_URI and the server; once it can be reached, this delivers it:",
            f"    grpo mlflow_import {shlex.quote(str(unsent))}",
        ]
    else:
        lines += ["  Check MLFLOW_TRACKING_URI, or unset it to use a local file."]
    return "\n".join(lines)


def without_password(uri: str) -> str:
    """The URI as others may read it."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", uri)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=@-]+", "_", text)[:80]


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}


class _Writer:
    """The line to the process that writes, which is started where there is none; see :mod:`grpo.tracking.mlflow_process`.

    A thread connects and sends, so that a process that is slow holds nobody up.
    """

    def __init__(self) -> None:
        self._lines: SimpleQueue[str] = SimpleQueue()
        self.connection: Future[BinaryIO] = Future()
        threading.Thread(target=self._feed, name="mlflow", daemon=True).start()

    def send(self, line: str) -> None:
        """Have a message written, sooner or later."""
        self._lines.put(line)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a ``finish``."""
        line, trouble = b"", "the process that writes to it has ended"
        try:
            connection = self.connection.result()
        except OSError as error:
            trouble = f"the process that writes to it cannot be reached ({error})"
        else:
            with suppress(OSError):
                line = connection.readline()
        if not line:
            _writer.cache_clear()  # the next run gets a new one
            return {"run_id": None, "error": trouble}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _feed(self) -> None:
        try:
            connection = _connect()
        except OSError as error:
            self.connection.set_exception(error)
            return
        self.connection.set_result(connection)
        with suppress(OSError):  # it has ended, which its missing answer will tell
            while True:
                connection.write(self._lines.get().encode() + b"\n")
                connection.flush()


def _connect() -> BinaryIO:
    """Connect to the process that writes for this machine's runs, and start it if nobody listens.

    Raises:
        OSError: it does not start.
    """
    path = _socket()
    started = None
    deadline = time.monotonic() + WRITER_STARTS_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            stream: BinaryIO = connection.makefile("rwb")  # type: ignore[assignment]
            if stream.readline():
                return stream
            refusal: OSError = ConnectionResetError("it ended")
        except (FileNotFoundError, ConnectionError) as error:
            refusal = error
        connection.close()
        if time.monotonic() > deadline:
            raise refusal
        if started is None or started.poll() is not None:
            with path.with_suffix(".log").open("a") as log:  # not this run's stderr, which may be closed earlier
                started = subprocess.Popen(
                    [sys.executable, "-m", "grpo.tracking.mlflow_process", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the process that trains, which then says how the run ended
                )
        time.sleep(0.05)


def _socket() -> Path:
    """Where the process listens that writes for runs of this user, folder and job, with these settings of MLflow."""
    deciding = ("MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "PG", "SLURM_JOB_ID", "HTTP", "NO_PROXY", "REQUESTS_")
    settings = {key: value for key, value in os.environ.items() if key.upper().startswith(deciding)}
    about = json.dumps([sys.executable, __file__, str(Path.cwd()), settings], sort_keys=True)
    temporary = tempfile.gettempdir()
    # A socket's path holds about a hundred bytes.
    folder = Path("/tmp" if len(os.fsencode(temporary)) > 60 else temporary) / f"grpo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder / hashlib.sha256(about.encode()).hexdigest()[:16]


_numbers = itertools.count()


@lru_cache(maxsize=1)
def _writer() -> _Writer:
    return _Writer()


def source_tags() -> dict[str, str]:
    """The git commit the code stands at, and whether it was changed since; asked once for each folder."""
    return _source_tags(Path.cwd())


@lru_cache
def _source_tags(folder: Path) -> dict[str, str]:

    def git(*args: str) -> str:
        try:
            return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
        except FileNotFoundError:
            return ""

    deciding = ("grpo", "params.yaml", "dvc.yaml", "constraints.txt")
    from_the_top = (f":(top){name}" for name in deciding)  # `grpo quickstart` works in a folder below
    changed = bool(git("status", "--porcelain", "--untracked-files=no", "--", *deciding, *from_the_top))
    return {"git_commit": git("rev-parse", "--verify", "--quiet", "HEAD") or "none", "git_changed": str(changed).lower()}


def mlflow_source_tags() -> dict[str, str]:
    """What MLflow's own columns show (commit, source, user), and the name of the DVC experiment that a run is part of."""
    commit, experiment = source_tags()["git_commit"], os.environ.get("DVC_EXP_NAME")
    program = Path(sys.argv[0])
    try:
        user = {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):  # a container may run as a user without a name
        user = {}
    return {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": shlex.join(["grpo" if program.name == "__main__.py" else program.name, *sys.argv[1:]]),
        **({"mlflow.source.git.commit": commit} if commit != "none" else {}),
        **user,
        **({"dvc_experiment": experiment} if experiment else {}),
    }
