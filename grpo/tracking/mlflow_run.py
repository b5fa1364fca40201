"""Record an MLflow run: write it to a folder, and send the folder while the run goes on.

The folder stays in ``data/state/mlflow`` until MLflow has all of it. ``run.json`` describes the run, ``metrics.jsonl`` has one
line per call of :meth:`MlflowRun.log`, and ``files`` has copies of its artifacts. A thread sends it
(:mod:`grpo.tracking.mlflow_send`), so that training never waits for MLflow. A server that is away, a database that cannot be
opened, or a full disk costs one warning.
"""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from grpo.common.errors import final
from grpo.common.files import dvc_hashes, write_json
from grpo.common.uris import without_password
from grpo.study import paths
from grpo.study.software import environment_tags
from grpo.tracking.mlflow_send import FILES, METRICS, RUN, Delivery, deliver_leftovers
from grpo.tracking.mlflow_study import mlflow_source_tags
from grpo.tracking.mlflow_uri import NOWHERE, describe, tracking_uri

ROUND_SECONDS, PAUSE_SECONDS = 5.0, 60.0  # between two attempts to send; after a failed one
PATIENCE_SECONDS, MOST_SECONDS = 5.0, 60.0  # the wait for MLflow at the end of a run: without a message, and in all

_warned_of: set[str] = set()  # addresses of MLflow


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
        self._errors: dict[str, None] = {}
        self._known: set[int] = set()
        self._over = Event()
        self._sender = Thread(target=self._send_until_over, name="MLflow", daemon=True)
        if self._uri == NOWHERE:
            return
        with self._noting(OSError):
            (self.folder / FILES).mkdir(parents=True)
            self._metrics = (self.folder / METRICS).open("a", buffering=1, encoding="utf-8")  # each line is written at once
            fcntl.flock(self._metrics, fcntl.LOCK_EX)
            write_json(self.folder / RUN, self._about)
            self._delivery = Delivery(self.folder, self._uri)
            self._sender.start()

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

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._describe(tags=self._about["tags"] | _as_text(tags))

    def artifact(self, path: Path) -> None:
        """Add a file as an artifact."""
        self._describe(artifacts=[*self._about["artifacts"], self._copied(path)])

    def table(self, path: Path) -> None:
        """Add a file of JSON lines as the table ``STEM.json``, which MLflow's UI shows."""
        self._describe(tables=[*self._about["tables"], self._copied(path)])

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
        """Close the run and wait for MLflow, a minute at most. If MLflow lacks a part, say how to send it later.

        Returns:
            the run's id; None if MLflow could not be reached or tracking is off (:data:`NOWHERE`).
        """
        self._describe(status=status, ended=self._now())
        self._over.set()
        if self._delivery is not None:
            self._sender.join(PATIENCE_SECONDS)
            if self._sender.is_alive():
                print(f"waiting for MLflow, {MOST_SECONDS:.0f} s at most", file=sys.stderr)
                self._sender.join(MOST_SECONDS - PATIENCE_SECONDS)
            if self._sender.is_alive() and not self._delivery.is_done:
                self._errors[f"no answer within {MOST_SECONDS:.0f} s"] = None
        if self._errors and not self._warn() and not (self._delivery and self._delivery.is_done):
            print(f"MLflow lacks the run {self._about['name']}, or a part of it. {self._remedy()}", file=sys.stderr)
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

    def _copied(self, path: Path) -> str:
        """Copy a file to the run's folder, as the original may change or go before MLflow has it; returns its name there."""
        name = f"{FILES}/{path.name}"
        if self._delivery is not None:
            with self._noting(OSError):
                shutil.copyfile(path, self.folder / name)
        return name

    def _send_until_over(self) -> None:
        """Send what is new until the run is over, then the rest and what earlier runs left; MLflow may fail in any way."""
        assert self._delivery is not None
        monitor, pause = None, 0.0
        while not self._over.wait(pause):
            try:
                self._delivery.send()
                pause = ROUND_SECONDS
                if monitor is None:
                    monitor = SystemMetricsMonitor(self._delivery.run_id, tracking_uri=self._uri)
                    monitor.start()
            except Exception as error:
                pause = PAUSE_SECONDS
                self._errors[describe(error)] = None
                self._warn()
        if monitor is not None:
            monitor.finish()
        with self._noting(Exception):
            self._delivery.send(over=True)
            deliver_leftovers(self._uri)
        with self._noting(OSError):
            self._metrics.close()  # releases the lock

    def _now(self) -> int:
        """Milliseconds since 1970, by a clock that nobody sets back during the run."""
        return int(self._about["started"]) + round(1000 * (time.monotonic() - self._began))

    def _warn(self) -> bool:
        """Print one warning for all errors so far, unless this process has printed it, in this run or an earlier one."""
        if not self._errors or self._uri in _warned_of:
            return False
        _warned_of.add(self._uri)
        wrong = f"MLflow at {self._about['uri']} could not be written: {'; '.join(self._errors)}"
        print(f"warning: {wrong}\n  Training and its results do not depend on it. {self._remedy()}", file=sys.stderr)
        return True

    def _remedy(self) -> str:
        if not (self.folder / RUN).exists():
            return "MLflow lacks some or all of the run."
        folder = final(self.folder)
        return (
            f"What MLflow lacks is kept in {folder}\n"
            "  Check MLFLOW_TRACKING_URI (without it, runs go to mlflow.db here) and the server. The next run sends it, or:\n"
            f"    grpo mlflow_import {shlex.quote(str(folder))}"
        )


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=@-]+", "_", text)[:80]


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}
