"""The one place that writes metrics: CSV files for the pipeline, MLflow for the eye.

A run's files hold everything that is reproducible; wall-clock figures go to a file of their own, so that the others can be
compared byte for byte. MLflow is written by a process of its own: neither its import nor its database slows training down,
and a tracking server that fails does not fail the run.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from grpo.memory import peak_mb, reset_peak

DATABASE = "mlflow.db"
ARTIFACTS = "mlruns"
SECONDS_BETWEEN_FLUSHES = 2.0


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the working folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(DATABASE).absolute()}"


class MlflowRun:
    """One MLflow run, written by a process of its own (:mod:`grpo.mlflow_process`).

    Args:
        experiment: the MLflow experiment's name; made if it does not exist.
        name: the run's name.
        params, tags: values are turned into text.
    """

    def __init__(self, experiment: str, name: str, params: Mapping[str, Any], tags: Mapping[str, Any]):
        self._number = next(_numbers)
        self._pending: list[tuple[str, float, int, int]] = []
        self._last_flush = time.monotonic()
        self._send(
            "start",
            uri=tracking_uri(),
            artifacts=(Path(ARTIFACTS).absolute() / experiment).as_uri(),
            experiment=experiment,
            name=name,
            params=_as_text(params),
            tags=_as_text({**tags, **source_tags()}),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step."""
        now = int(time.time() * 1000)
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
            the run's id, or None where MLflow could not be written (a warning says why; the run's files are whole).
        """
        self._flush()
        self._send("finish", status=status)
        answer = _writer().answer()
        if answer["error"] is not None:
            print(f"warning: MLflow at {tracking_uri()} could not be written: {answer['error']}", file=sys.stderr)
            print(
                "  The run's own files are complete. Check MLFLOW_TRACKING_URI, or unset it to use a local file.",
                file=sys.stderr,
            )
        run_id: str | None = answer["run_id"]
        return run_id

    def _flush(self) -> None:
        pending, self._pending, self._last_flush = self._pending, [], time.monotonic()
        if pending:
            self._send("log", metrics=pending)

    def _send(self, do: str, **arguments: Any) -> None:
        _writer().send(json.dumps({"run": self._number, "do": do, **arguments}))


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}


class _Writer:
    """The writing process, fed by a thread, so that one that is slow holds nobody up."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grpo.mlflow_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the process that trains, which then says how the run ended
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._feed, name="mlflow", daemon=True).start()

    def send(self, line: str) -> None:
        """Have a message written, sooner or later."""
        self._lines.put(line)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a ``finish``."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _writer.cache_clear()  # the next run gets a new one
            return {"run_id": None, "error": "the process that writes to it has ended"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            while True:
                self._process.stdin.write(self._lines.get() + "\n")
                self._process.stdin.flush()
        except OSError:  # it has ended, which its missing answer will tell
            pass


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

    changed = bool(git("status", "--porcelain", "--untracked-files=no", "--", "grpo", "params.yaml", "dvc.yaml"))
    return {"git_commit": git("rev-parse", "--verify", "--quiet", "HEAD") or "none", "git_changed": str(changed).lower()}


class RunLog:
    """A training run's history, validation, and times.

    Writes ``history.csv`` (one row for each optimizer step) and ``validation.csv`` (one row for each evaluation) below
    ``folder`` as it goes, and passes the same numbers on to MLflow.
    """

    def __init__(self, folder: Path, mlflow: MlflowRun):
        self.mlflow = mlflow
        self.validations: list[dict[str, float]] = []
        self.times: list[dict[str, float]] = []
        self.phase_totals: dict[str, float] = {}  # seconds of each phase, over all steps
        self._phases: dict[str, float] = {}
        self._peaks: dict[str, float] = {}  # MiB
        self._updates = 0
        self._step_began = time.perf_counter()
        self._history = _CsvWriter(folder / "history.csv")
        self._validation = _CsvWriter(folder / "validation.csv")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall-clock time to this step's ``name``, and note the memory it needed."""
        reset_peak()
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            for times, key in ((self._phases, name), (self.phase_totals, f"{name}_s")):
                times[key] = times.get(key, 0.0) + seconds
            self._peaks[name] = max(peak_mb(), self._peaks.get(name, 0.0))

    def step(
        self,
        step: int,
        updates: list[dict[str, float]],
        rollout: dict[str, float],
        tokens: int,
        elsewhere: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step of a method's loop: its optimizer steps, its rollout batch, and its times.

        ``step_s`` is the time since the step before ended, without evaluation.

        Args:
            rollout: metrics of the rollout batch; empty where there is none.
            tokens: response tokens of the step's batch.
            elsewhere: figures measured in other processes; they take the place of this one's by the same name.
        """
        elsewhere = elsewhere or {}
        for update in updates:
            self._updates += 1
            row = {"step": step, "update": self._updates, **rollout, **update}
            self._history.write(row)
            self.mlflow.log({k: v for k, v in row.items() if k not in {"step", "update"}}, step=self._updates)
        seconds = {f"{name}_s": value for name, value in self._phases.items()}
        peaks = {f"{name}_peak_mb": value for name, value in self._peaks.items()}
        ended = time.perf_counter()
        times = {
            "step": step,
            "step_s": ended - self._step_began - self._phases.get("evaluation", 0.0),
            **seconds,
            **peaks,
            **elsewhere,
        }
        times["tokens_per_s"] = tokens / max(1e-9, times.get("rollout_s", 0.0) + times["training_s"])
        for name, value in elsewhere.items():
            if name.endswith("_s") and name not in seconds:
                self.phase_totals[name] = self.phase_totals.get(name, 0.0) + value
        self._step_began = ended
        self.times.append(times)
        self.mlflow.log({f"time/{k}": v for k, v in times.items() if k != "step"}, step=self._updates)
        self._phases, self._peaks = {}, {}

    def validation(self, step: int, update: int, metrics: dict[str, float]) -> None:
        """Record one evaluation on the validation set, of the policy after ``update`` optimizer steps."""
        row = {"step": step, "update": update, **{f"val/{key}": value for key, value in metrics.items()}}
        self.validations.append(row)
        self._validation.write(row)
        self.mlflow.log({k: v for k, v in row.items() if k.startswith("val/")}, step=update)

    def close(self) -> None:
        """Close the files."""
        self._history.close()
        self._validation.close()


class _CsvWriter:
    """Rows of one shape, written as they come; the first row names the columns."""

    def __init__(self, path: Path):
        self._file: TextIO = path.open("w", newline="", encoding="utf-8")
        self._writer: csv.DictWriter[str] | None = None

    def write(self, row: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, fieldnames=list(row), lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
