"""Record runs in MLflow while they go on.

MLflow's client writes in the thread that trains: when a run begins, then every :data:`EVERY_SECONDS`, and at the end. Each wait
has a limit. If MLflow cannot be written, one warning says so, the run goes on, and attempts become rarer. What MLflow lacks at
the end is kept as a folder in ``data/state/mlflow``, which ``grpo mlflow_import`` writes to MLflow later.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from grpo.common.errors import final
from grpo.common.files import write_text
from grpo.common.safe_text import without_password
from grpo.study import paths
from grpo.study.software import environment_tags
from grpo.tracking.mlflow_study import mlflow_source_tags
from grpo.tracking.mlflow_uri import NOWHERE, describe, tracking_uri
from grpo.tracking.mlflow_writer import KINDS, RECORD, Writer

EVERY_SECONDS = 5.0  # from one write to the next
PAUSE_SECONDS = 60.0  # after a failed write; each further one doubles it

_warned_of: set[str] = set()  # addresses of MLflow


class MlflowRun:
    """One run in MLflow.

    Args:
        experiment: name of the MLflow experiment; made if it does not exist.
        params, tags: values are converted to text.
        state: of the study, from :func:`grpo.tracking.mlflow_study.study_state`; it becomes the parent of this run.
        key_file: file with the run's key. If it exists, the run in MLflow that has this key goes on.
    """

    def __init__(
        self,
        experiment: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        key_file: Path | None = None,
    ):
        key = uuid.uuid4().hex
        if key_file is not None and key_file.exists():
            key = key_file.read_text(encoding="utf-8")
        elif key_file is not None:
            write_text(key_file, key)
        self._record: dict[str, Any] = {
            "experiment": experiment,
            "name": name,
            "key": key,
            "params": _as_text(params),
            "tags": _as_text({**environment_tags(), **mlflow_source_tags(), **tags}),
            "study": state,
            "datasets": [],
            "rows": [],
            "started": _now(),
            "status": None,
            "ended": None,
        }
        self._files: dict[str, list[Path]] = {kind: [] for kind in KINDS}
        self._uri = tracking_uri()
        names = "-".join(re.sub(r"[^\w.=@-]+", "_", part)[:80] for part in (experiment, name))
        self.folder = paths.workspace() / paths.UNSENT_METRICS / f"{names}-{key[:12]}"
        self._writer = Writer(self._record, self._uri)
        self._monitor: SystemMetricsMonitor | None = None
        self._next, self._pause = 0.0, PAUSE_SECONDS
        self._try(self._writer.write)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step. If a step is recorded again, after a resume, its first values stay."""
        if self._uri == NOWHERE:
            return
        self._record["rows"].append((_now(), step, {key: float(value) for key, value in metrics.items()}))
        if time.monotonic() >= self._next:
            self._try(self._writer.write)

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._record["tags"] = self._record["tags"] | _as_text(tags)

    def artifact(self, path: Path) -> None:
        """Add a file as an artifact; it must stay until the run is finished."""
        self._files["artifacts"].append(path)

    def table(self, path: Path) -> None:
        """Add a file of JSON lines as the table ``STEM.json``, which MLflow's UI shows."""
        self._files["tables"].append(path)

    def dataset(self, path: Path, digest: str, context: str) -> None:
        """Record a dataset of the run: file name, number of rows and digest, but not the content.

        Args:
            path: JSON lines, relative to the project's folder.
            digest: at most 36 characters.
            context: ``training`` or ``validation``.
        """
        name = "/".join(path.with_suffix("").parts[1:])  # without data/: dataset/main/train
        about = {"name": name, "digest": digest, "uri": path.as_posix(), "context": context}
        rows = path.read_text(encoding="utf-8").count("\n")
        self._record["datasets"] = [*self._record["datasets"], about | {"rows": rows}]

    def finish(self, status: str = "FINISHED") -> str | None:
        """Write the rest to MLflow, or keep the run for ``grpo mlflow_import``.

        Returns:
            the run's id; None if MLflow could not be reached or tracking is off (:data:`NOWHERE`).
        """
        if self._monitor is not None:
            self._monitor.finish()
        self._record |= {"status": status, "ended": _now()}
        if self._try(partial(self._writer.finish, self._files)):
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier attempt at this run
        else:
            self._keep()
        return self._writer.run_id

    def _try(self, write: Callable[[], None]) -> bool:
        """Write to MLflow, and return whether that succeeded. No error of MLflow ends the run."""
        if self._uri == NOWHERE:
            return True
        try:
            write()
            if self._monitor is None and self._record["status"] is None:
                self._monitor = SystemMetricsMonitor(self._writer.run_id, resume_logging=True, tracking_uri=self._uri)
                self._monitor.start()
        except Exception as error:
            self._next, self._pause = time.monotonic() + self._pause, 2 * self._pause
            self._warn(error)
            return False
        self._next, self._pause = time.monotonic() + EVERY_SECONDS, PAUSE_SECONDS
        return True

    def _warn(self, error: Exception) -> None:
        """Print one warning for all runs of this process."""
        if self._uri in _warned_of:
            return
        _warned_of.add(self._uri)
        print(
            f"warning: MLflow at {without_password(self._uri)} could not be written: {describe(error)}\n"
            "  Training and its results do not depend on it. What MLflow lacks of a run at its end is kept. Check the server\n"
            "  and MLFLOW_TRACKING_URI (without it, runs go to mlflow.db here). When MLflow is back:\n"
            f"    grpo mlflow_import {shlex.quote(str(final(self.folder.parent)))}/*",
            file=sys.stderr,
        )

    def _keep(self) -> None:
        try:
            for kind, files in self._files.items():
                (self.folder / kind).mkdir(parents=True, exist_ok=True)
                for file in files:
                    shutil.copyfile(file, self.folder / kind / file.name)
            write_text(self.folder / RECORD, json.dumps(self._record) + "\n")
        except OSError as error:
            wrong = f"MLflow lacks a part of the run {self._record['name']}, which could not be kept: {describe(error)}"
            print(f"warning: {wrong}", file=sys.stderr)


def _now() -> int:
    """Milliseconds since 1970."""
    return round(1000 * time.time())


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}
