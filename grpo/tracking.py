"""The one place that writes metrics: CSV files for the pipeline, MLflow for the eye.

A run's files hold everything that is reproducible; wall-clock figures go to a file of their own, so that the others can be
compared byte for byte. MLflow is fed from a thread of its own: neither its import nor its database slows training down,
and a tracking server that fails does not fail the run.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from grpo.memory import peak_mb, reset_peak

DATABASE = "mlflow.db"
ARTIFACTS = "mlruns"
SECONDS_BETWEEN_FLUSHES = 2.0


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the working folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(DATABASE).absolute()}"


class MlflowRun:
    """One MLflow run, written from a background thread.

    Args:
        experiment: the MLflow experiment's name; made if it does not exist.
        name: the run's name.
        params, tags: values are turned into text.
    """

    def __init__(self, experiment: str, name: str, params: Mapping[str, Any], tags: Mapping[str, Any]):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._pending: list[tuple[str, float, int, int]] = []
        self._last_flush = time.monotonic()
        self._jobs: list[Future[Any]] = []
        self._client: Any = None
        self._run_id: str | None = None
        self._submit(self._start, experiment, name, dict(params), dict(tags))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step."""
        now = int(time.time() * 1000)
        self._pending += [(key, float(value), now, step) for key, value in metrics.items()]
        if time.monotonic() - self._last_flush > SECONDS_BETWEEN_FLUSHES:
            self._flush()

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._submit(self._tag, {key: str(value) for key, value in tags.items()})

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file with the run."""
        self._submit(lambda: self._client.log_artifact(self._run_id, str(path), folder))

    def finish(self, status: str = "FINISHED") -> str | None:
        """Write what is left and close the run.

        Returns:
            the run's id, or None where MLflow could not be written (a warning says why; the run's files are whole).
        """
        self._flush()
        self._submit(lambda: self._client.set_terminated(self._run_id, status))
        self._pool.shutdown(wait=True)
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        if errors:
            print(f"warning: MLflow at {tracking_uri()} could not be written: {errors[0]!r}", file=sys.stderr)
            print(
                "  The run's own files are complete. Check MLFLOW_TRACKING_URI, or unset it to use a local file.",
                file=sys.stderr,
            )
        return self._run_id

    def _submit(self, function: Any, *args: Any) -> None:
        self._jobs.append(self._pool.submit(function, *args))

    def _flush(self) -> None:
        pending, self._pending, self._last_flush = self._pending, [], time.monotonic()
        if pending:
            self._submit(self._write, pending)

    def _write(self, pending: list[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        for start in range(0, len(pending), 1000):  # MLflow takes at most 1,000 metrics a call
            self._client.log_batch(self._run_id, metrics=[Metric(*m) for m in pending[start : start + 1000]])

    def _tag(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._run_id, tags=[RunTag(*tag) for tag in tags.items()])

    def _start(self, experiment: str, name: str, params: dict[str, Any], tags: dict[str, Any]) -> None:
        from filelock import FileLock
        from mlflow.tracking import MlflowClient

        uri = tracking_uri()
        local = uri.startswith("sqlite:///")
        # Processes that meet a new database at once race to make its tables; the first one does it alone.
        with FileLock(f"{uri.removeprefix('sqlite:///')}.lock") if local else nullcontext():
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            if found is None:
                location = (Path(ARTIFACTS).absolute() / experiment).as_uri() if local else None
                experiment_id = self._client.create_experiment(experiment, artifact_location=location)
            else:
                experiment_id = found.experiment_id
        run = self._client.create_run(experiment_id, run_name=name, tags={k: str(v) for k, v in (tags | source_tags()).items()})
        self._run_id = run.info.run_id
        from mlflow.entities import Param

        # One transaction for all: each costs the database a write to disk.
        self._client.log_batch(self._run_id, params=[Param(key, str(value)) for key, value in params.items()])


def source_tags() -> dict[str, str]:
    """The git commit the code stands at, and whether it was changed since."""

    def git(*args: str) -> str:
        try:
            return subprocess.run(["git", *args], capture_output=True, text=True, check=False).stdout.strip()
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

    def step(self, step: int, updates: list[dict[str, float]], rollout: dict[str, float], tokens: int) -> None:
        """Record one step of a method's loop: its optimizer steps, its rollout batch, and its times.

        Args:
            rollout: metrics of the rollout batch; empty where there is none.
            tokens: response tokens of the step's batch.
        """
        for update in updates:
            self._updates += 1
            row = {"step": step, "update": self._updates, **rollout, **update}
            self._history.write(row)
            self.mlflow.log({k: v for k, v in row.items() if k not in {"step", "update"}}, step=self._updates)
        seconds = {f"{name}_s": value for name, value in self._phases.items()}
        times = {
            "step": step,
            **seconds,
            "tokens_per_s": tokens / max(1e-9, self._phases.get("rollout", 0.0) + self._phases["training"]),
            **{f"{name}_peak_mb": value for name, value in self._peaks.items()},
        }
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
