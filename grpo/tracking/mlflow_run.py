"""Record an MLflow run: write it to a folder, and send the folder while the run goes on.

The folder stays in ``data/state/mlflow`` until MLflow has all of it. ``run.json`` describes the run, and ``metrics.jsonl`` has
one line per call of :meth:`MlflowRun.log`. :mod:`grpo.tracking.mlflow_send` sends it. A server that is away, or a full
disk, costs a warning at the end of the run.
"""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from grpo.common.files import dvc_hashes, write_json
from grpo.study import paths
from grpo.study.software import environment_tags
from grpo.tracking.mlflow_send import METRICS, RUN, Delivery, deliver_leftovers
from grpo.tracking.mlflow_study import mlflow_source_tags
from grpo.tracking.mlflow_uri import NOWHERE, describe, tracking_uri, without_password

ROUND_SECONDS, PAUSE_SECONDS = 5.0, 60.0  # between two attempts to send; after a failed one


class MlflowRun:
    """One MLflow run as a folder.

    The tag ``run_key`` identifies the run in MLflow, so that a folder can be sent twice. The process holds a lock (flock) on
    ``metrics.jsonl`` until it ends; a folder without this lock belongs to a run that is over.

    Args:
        experiment: name of the MLflow experiment; made if it does not exist.
        name: name of the run.
        params, tags: values are converted to text.
        state: of the study, from :func:`grpo.tracking.mlflow_study.study_state`; it becomes the parent of this run.
    """

    def __init__(
        self,
        experiment: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
    ):
        self._uri, key = tracking_uri(), uuid.uuid4().hex
        own_tags = {**environment_tags(), **mlflow_source_tags(), **tags, "run_key": key}
        self._about: dict[str, Any] = {
            "uri": without_password(self._uri),
            "experiment": experiment,
            "name": name,
            "params": _as_text(params),
            "tags": _as_text(own_tags),
            "study": state,
            "datasets": [],
            "artifacts": [],
            "tables": [],
            "checkpoints": [],
            "started": round(1000 * time.time()),
            "status": None,
            "ended": None,
        }
        self._began = time.monotonic()
        self.folder = paths.workspace() / paths.UNSENT_METRICS / f"{_file_name(experiment)}-{_file_name(name)}-{key[:12]}"
        self._delivery: Delivery | None = None
        self._monitor: SystemMetricsMonitor | None = None
        self._errors: dict[str, None] = {}
        self._known: set[int] = set()
        if self._uri == NOWHERE:
            return
        with self._noting(OSError):
            self.folder.mkdir(parents=True)
            self._metrics = (self.folder / METRICS).open("a", buffering=1, encoding="utf-8")  # each line is written at once
            fcntl.flock(self._metrics, fcntl.LOCK_EX)
            write_json(self.folder / RUN, self._about)
            self._delivery = Delivery(self.folder, self._uri)
            self._send()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step; the same ones again, from a saved state, count once."""
        if self._delivery is None:
            return
        row = {"step": step, "metrics": {key: float(value) for key, value in metrics.items()}}
        if (known := hash(json.dumps(row))) in self._known:
            return
        self._known.add(known)
        with self._noting(OSError):
            self._metrics.write(json.dumps({"time": self._now(), **row}) + "\n")
        if time.monotonic() >= self._next_round:
            self._send()

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._describe(tags=self._about["tags"] | _as_text(tags))

    def artifact(self, path: Path) -> None:
        """Add a file as an artifact; it is copied when the run ends."""
        self._describe(artifacts=[*self._about["artifacts"], str(path.absolute())])

    def table(self, path: Path) -> None:
        """Add a file of JSON lines as the table ``STEM.json``, which MLflow's UI shows."""
        self._describe(tables=[*self._about["tables"], str(path.absolute())])

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
        self._describe(datasets=[*self._about["datasets"], about | {"rows": rows}])

    def checkpoints(self, folder: Path) -> None:
        """Record the checkpoints in a folder that DVC stores, each with its DVC hashes but without weights."""
        whole, hashes = dvc_hashes(folder)
        models = []
        for metadata in sorted(folder.glob("*/metadata.json")):
            weights = [name for name in hashes if name.startswith(f"{metadata.parent.name}/") and name.endswith(".safetensors")]
            tags = {"dvc.path": metadata.parent.as_posix(), "dvc.folder": folder.as_posix(), "dvc.md5": whole}
            tags |= {f"dvc.md5.{Path(name).name}": hashes[name] for name in weights}
            about = json.loads(metadata.read_bytes())
            name = re.sub(r"[^\w-]+", "-", f"{self._about['name']}-{metadata.parent.name}")
            models.append({"name": name, "step": int(about["update"]), "params": _as_text(about), "tags": tags})
        self._describe(checkpoints=models)

    def finish(self, status: str = "FINISHED") -> str | None:
        """Close the run and send the rest. If MLflow cannot be written, print a warning that says how to send it later.

        Returns:
            the run's id; None if MLflow could not be reached or tracking is off (:data:`NOWHERE`).
        """
        self._describe(status=status, ended=self._now())
        if self._monitor is not None:
            self._monitor.finish()
        if self._delivery is not None:
            with self._noting(Exception):
                self._delivery.send(over=True)
                deliver_leftovers(self._uri)
            with self._noting(OSError):
                self._metrics.close()  # releases the lock
        if self._errors:
            print(self._warning(), file=sys.stderr)
        return self._delivery.run_id if self._delivery else None

    def _describe(self, **changed: Any) -> None:
        self._about |= changed
        if self._delivery is not None:
            with self._noting(OSError):
                write_json(self.folder / RUN, self._about)

    @contextmanager
    def _noting(self, kind: type[Exception]) -> Iterator[None]:
        """Note errors of MLflow, or of a full or read-only disk, which must not end the run; :meth:`finish` reports them."""
        try:
            yield
        except kind as error:
            self._errors[describe(error)] = None

    def _send(self) -> None:
        """Send what is new. MLflow may fail in any way, which must not end the run; :meth:`finish` reports what lasts."""
        assert self._delivery is not None
        pause = ROUND_SECONDS
        try:
            self._delivery.send()
            if self._monitor is None:
                self._monitor = SystemMetricsMonitor(self._delivery.run_id, tracking_uri=self._uri)
                self._monitor.start()
        except Exception:
            pause = PAUSE_SECONDS
        self._next_round = time.monotonic() + pause

    def _now(self) -> int:
        """Milliseconds since 1970, by a clock that nobody sets back during the run."""
        return int(self._about["started"]) + round(1000 * (time.monotonic() - self._began))

    def _warning(self) -> str:
        text = f"warning: MLflow at {self._about['uri']} could not be written: {'; '.join(self._errors)}\n"
        if not (self.folder / RUN).exists():
            return text + "  The run's own files are complete. MLflow lacks some or all of it."
        return text + (
            f"  The run's own files are complete. What MLflow lacks is kept in {self.folder}\n"
            "  Check MLFLOW_TRACKING_URI (without it, runs go to mlflow.db here) and the server. The next run sends it, or:\n"
            f"    grpo mlflow_import {shlex.quote(str(self.folder))}"
        )


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=@-]+", "_", text)[:80]


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}
