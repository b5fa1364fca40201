"""Log a training run: CSV files for the pipeline, and the same numbers in MLflow.

Times go to a separate file, so that all other files of equal runs are equal byte for byte.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.common.errors import IN_PHASE
from grpo.common.process import peak_mb, reset_peak
from grpo.tracking.mlflow_run import MlflowRun


@dataclass
class Outputs:
    """Places of a run's outputs."""

    results: Path  # a draft folder, renamed when it is complete
    checkpoints: Path  # the same
    state: Path  # folder of the saved states. Each identity and code version has its own, so that no run resumes from another's
    mlflow: MlflowRun
    timing: dict[str, Any] = field(default_factory=dict)  # wall-clock figures, filled in by the training


class RunLog:
    """A training run's history, validation and times.

    Writes ``history.csv`` (one row per optimizer step) and ``validation.csv`` (one row per evaluation) to ``folder`` during the
    run, and gives the same numbers to MLflow.

    ``began``: ``time.perf_counter()`` at the start of the run, if that was earlier. ``devices``: by phase the device whose
    memory is measured; default: ``cpu``.
    """

    def __init__(self, folder: Path, mlflow: MlflowRun, began: float | None = None, devices: Mapping[str, str] | None = None):
        self.mlflow = mlflow
        self.history: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self.times: list[dict[str, float]] = []
        self.phase_totals: dict[str, float] = {}  # seconds per phase, over all steps
        self.resumed_after: list[int] = []  # steps
        self._phases: dict[str, float] = {}
        self._peaks: dict[str, float] = {}  # MiB
        self._devices = devices or {}
        self._step_began = time.perf_counter()
        self._began = self._step_began if began is None else began
        names = {"history": "history.csv", "validations": "validation.csv"}
        self._files = {rows: (folder / name).open("w", newline="", encoding="utf-8") for rows, name in names.items()}

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far, without work that was lost in a kill."""
        return time.perf_counter() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block's wall-clock time and peak memory as the phase ``name`` of this step."""
        device = self._devices.get(name, "cpu")
        reset_peak(device)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"{IN_PHASE}{name}")
            raise
        finally:
            seconds = time.perf_counter() - start
            for times, key in ((self._phases, name), (self.phase_totals, f"{name}_s")):
                times[key] = times.get(key, 0.0) + seconds
            self._peaks[name] = max(peak_mb(device), self._peaks.get(name, 0.0))

    def step(
        self,
        step: int,
        updates: list[dict[str, float]],
        rollout: dict[str, float],
        tokens: int,
        elsewhere: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step of a method's loop: its optimizer steps, its rollout batch and its times.

        ``step_s`` is the time since the end of the previous step, without evaluation.

        Args:
            rollout: metrics of the rollout batch; empty if there is none.
            tokens: response tokens of the step's batch.
            elsewhere: times and memory measured in other processes; they replace this process's by the same name.
        """
        elsewhere = elsewhere or {}
        for update in updates:
            self._write("history", {"step": step, "update": len(self.history) + 1, **rollout, **update})
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
        self._write("times", times)
        self._phases, self._peaks = {}, {}

    def validation(self, step: int, update: int, metrics: dict[str, float]) -> None:
        """Record one evaluation on the validation set after ``update`` optimizer steps."""
        shown = {f"val/{key}": value for key, value in metrics.items()}
        self._write("validations", {"step": step, "update": update, **shown})

    def state(self) -> dict[str, Any]:
        """Everything recorded so far, to be saved with the run's state."""
        kept = ("history", "validations", "times", "phase_totals", "resumed_after", "elapsed_s")
        return {name: getattr(self, name) for name in kept}

    def restore(self, state: dict[str, Any]) -> None:
        """Record again everything of a saved run; MLflow gets what it lacks of that."""
        for name in ("history", "validations", "times"):
            for row in state[name]:
                self._write(name, row)
        self.phase_totals = state["phase_totals"]
        self.resumed_after = [*state["resumed_after"], int(self.times[-1]["step"])]
        self.mlflow.tag(resumed_after=", ".join(map(str, self.resumed_after)))
        self._phases, self._peaks, self._step_began = {}, {}, time.perf_counter()
        self._began = self._step_began - state["elapsed_s"]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, row: dict[str, float]) -> None:
        """Add a row to ``history``, ``validations`` or ``times``, to its file, if any, and to MLflow."""
        rows = getattr(self, name)
        rows.append(row)
        if name in self._files:
            writer = csv.DictWriter(self._files[name], fieldnames=list(rows[0]), lineterminator="\n")
            if len(rows) == 1:
                writer.writeheader()
            writer.writerow(row)
            self._files[name].flush()
        # Times belong to the last update of their step.
        update = (
            row["update"] if "update" in row else next(r["update"] for r in reversed(self.history) if r["step"] == row["step"])
        )
        prefix = "time/" if name == "times" else ""
        metrics = {f"{prefix}{key}": value for key, value in row.items() if key not in {"step", "update"}}
        self.mlflow.log(metrics, step=int(update))


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
