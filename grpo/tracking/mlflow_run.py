"""Record runs in MLflow while they go on.

The result files, such as history.csv, have all that MLflow shows. If MLflow cannot be written, one warning says so, the run
goes on, and this process writes nothing more to it.

A study is an MLflow experiment. Each state of the study (params.yaml, commit) is a run in it, and the parent (tag
``mlflow.parentRunId``) of the runs made in this state. Their tag ``experiment`` names the experiment of the study. The runs of
a finished arm are then moved below a run of the arm (:mod:`grpo.reporting.mlflow_arms`).
"""

from __future__ import annotations

import getpass
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd
from filelock import FileLock
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from grpo.common.files import read_jsonl, write_text
from grpo.study import paths
from grpo.study.software import environment_tags
from grpo.tracking.mlflow_study import mlflow_source_tags
from grpo.tracking.mlflow_uri import NOWHERE, client_of, failure, local_database, tracking_uri

EVERY_SECONDS = 5.0  # between two writes of metrics
LOCK_SECONDS = 60.0  # the wait for other processes that create the database, the experiment or the parent
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # the UI opens its training view
    "mlflow.note.content": "One run per state of the study (params.yaml and commit), with the runs made in this state below it;"
    " their tag `experiment` names the experiment. Steps are optimizer steps. See docs/tracking.md.",
}

Method = TypeVar("Method", bound=Callable[..., None])
_failed: set[str] = set()  # addresses of MLflow that this process could not write


def _never_fails(write: Method) -> Method:
    """Decorate a method that writes to MLflow: its first error prints a warning, after which nothing more is written."""

    @wraps(write)
    def call(run: MlflowRun, *args: Any, **kwargs: Any) -> None:
        if run.uri in (NOWHERE, *_failed):
            return
        try:
            write(run, *args, **kwargs)
        except Exception as error:
            _failed.add(run.uri)
            print(
                f"warning: {failure(run.uri, error)}\n  The run goes on without MLflow; history.csv has everything."
                " Check the server and MLFLOW_TRACKING_URI; without it, runs go to mlflow.db in this folder.",
                file=sys.stderr,
            )

    return cast(Method, call)


@dataclass
class MlflowRun:
    """One run in MLflow."""

    experiment: str  # name of the MLflow experiment; created if it does not exist
    name: str
    params: Mapping[str, Any]  # its values, and those of tags, are converted to text
    tags: Mapping[str, Any]
    state: Mapping[str, Any] | None = None  # from :func:`grpo.tracking.mlflow_study.study_state`; the parent of this run
    id_file: Path | None = None  # file for the run's id. If it exists, that run continues
    run_id: str = field(default="", init=False)  # empty if MLflow could not be written or tracking is off (:data:`NOWHERE`)

    def __post_init__(self) -> None:
        self.uri = tracking_uri()
        self._client: MlflowClient
        self._monitor: SystemMetricsMonitor
        self._metrics: list[Metric] = []  # not yet written
        self._last_step: dict[str, int] = {}  # by metric
        self._written_at = 0.0
        self._start()

    @_never_fails
    def _start(self) -> None:
        lock = paths.workspace() / paths.RUN_LOCKS / "mlflow.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_SECONDS):
            self._client = client_of(self.uri)
            experiment_id = self._find_or_create_experiment()
            former = self.id_file.read_text() if self.id_file and self.id_file.exists() else ""
            run = self._find(experiment_id, f"attributes.run_id = '{former}'") if former else None
            run = run or self._create_run(experiment_id)
        self.run_id = run.info.run_id
        if self.id_file is not None:
            write_text(self.id_file, self.run_id)
        self._client.update_run(self.run_id, "RUNNING")
        for key in run.data.metrics:
            if not key.startswith("system/"):
                self._last_step[key] = max(metric.step for metric in self._client.get_metric_history(self.run_id, key))
        params = {_allowed(key): str(value) for key, value in self.params.items()}
        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        tags = environment_tags() | mlflow_source_tags() | dict(self.tags)
        self._client.log_batch(self.run_id, params=missing, tags=_run_tags(tags))
        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        self._monitor.start()

    def _find_or_create_experiment(self) -> str:
        if (known := self._client.get_experiment_by_name(self.experiment)) is not None:
            return str(known.experiment_id)
        database = local_database(self.uri)
        artifacts = (database.parent / "mlruns" / self.experiment).as_uri() if database else None
        return str(self._client.create_experiment(self.experiment, artifacts, EXPERIMENT_TAGS))

    def _find(self, experiment_id: str, where: str) -> Run | None:
        return next(iter(self._client.search_runs([experiment_id], where)), None)

    def _create_run(self, experiment_id: str) -> Run:
        tags = {}
        if self.state is not None:
            tags["mlflow.parentRunId"] = self._find_or_create_parent(experiment_id, self.state)
        if local_database(self.uri) is None:  # such a file may be passed on
            with suppress(OSError, KeyError):  # in a container the user may have no name
                tags["mlflow.user"] = getpass.getuser()
        return self._client.create_run(experiment_id, tags=tags, run_name=self.name)

    def _find_or_create_parent(self, experiment_id: str, state: Mapping[str, Any]) -> str:
        if known := self._find(experiment_id, f"tags.study_key = '{state['key']}'"):
            return str(known.info.run_id)
        tags = state["tags"] | {"study_key": state["key"]}
        run_id = str(self._client.create_run(experiment_id, tags=tags, run_name=state["name"]).info.run_id)
        self._client.log_dict(run_id, state["settings"], "study.json")
        self._client.set_terminated(run_id)
        return run_id

    @_never_fails
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step. If a step is recorded again, after a resume, its first values stay."""
        for name, value in metrics.items():
            if step > self._last_step.get(key := _allowed(name), -1):
                self._last_step[key] = step
                self._metrics.append(Metric(key, float(value), round(1000 * time.time()), step))
        if time.monotonic() >= self._written_at + EVERY_SECONDS:
            self._write_metrics()

    def _write_metrics(self) -> None:
        self._client.log_batch(self.run_id, metrics=self._metrics)
        self._metrics, self._written_at = [], time.monotonic()

    @_never_fails
    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._client.log_batch(self.run_id, tags=_run_tags(tags))

    @_never_fails
    def artifact(self, path: Path) -> None:
        """Add a file as an artifact."""
        self._client.log_artifact(self.run_id, str(path))

    @_never_fails
    def table(self, path: Path) -> None:
        """Add a file of JSON lines as the table ``STEM.json``, which MLflow's UI shows."""
        self._client.log_table(self.run_id, pd.DataFrame(read_jsonl(path, "train", dict)), f"{path.stem}.json")

    @_never_fails
    def dataset(self, path: Path, digest: str, context: str) -> None:
        """Name a dataset that the run reads (file and digest, not its content); ``context`` is training or validation."""
        entry = Dataset(path.with_suffix("").as_posix(), digest, "local", json.dumps({"uri": path.as_posix()}))
        self._client.log_inputs(self.run_id, datasets=[DatasetInput(entry, [InputTag("mlflow.data.context", context)])])

    def finish(self, status: str = "FINISHED") -> str | None:
        """Write the rest and how the run ended; return the run's id, if it has one."""
        self._end(status)
        return self.run_id or None

    @_never_fails
    def _end(self, status: str) -> None:
        self._monitor.finish()
        self._write_metrics()
        self._client.set_terminated(self.run_id, status)


def _run_tags(tags: Mapping[str, Any]) -> list[RunTag]:
    return [RunTag(_allowed(key), str(value)) for key, value in tags.items()]


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w.\- :/]", "_", name)
