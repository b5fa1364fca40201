"""Record an MLflow run: write it to a folder, and send the folder from a thread.

The folder stays in ``data/state/mlflow`` until MLflow has all of it. ``run.json`` describes the run, and ``metrics.jsonl`` has
one line per call of :meth:`MlflowRun.log`. :mod:`grpo.tracking.mlflow_send` sends it. A slow, unreachable or broken server only
costs a warning at the end of the run.
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
from typing import Any, BinaryIO

from grpo.common.files import dvc_hashes, write_json
from grpo.study import paths
from grpo.study.software import environment_tags
from grpo.tracking.mlflow_send import METRICS, RUN, Sender
from grpo.tracking.mlflow_study import mlflow_source_tags, source_tags
from grpo.tracking.mlflow_uri import NOWHERE, describe, tracking_uri, without_password


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
        uri, key = tracking_uri(), uuid.uuid4().hex
        own_tags = {**environment_tags(), **mlflow_source_tags(), **source_tags(), **tags, "run_key": key}
        self._about: dict[str, Any] = {
            "uri": without_password(uri),
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
        self._metrics: BinaryIO | None = None
        self._lost = 0
        self._trouble: OSError | None = None
        self._sender: Sender | None = None
        if uri == NOWHERE:
            return
        with self._noting_trouble():
            self.folder.mkdir(parents=True)
            self._metrics = (self.folder / METRICS).open("ab", buffering=0)
            fcntl.flock(self._metrics, fcntl.LOCK_EX)
            write_json(self.folder / RUN, self._about)  # last, as only a folder with this file counts as a run
        self._sender = Sender(self.folder, uri)
        if self._metrics is not None:
            self._sender.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step."""
        if self._sender is None:
            return
        row = {"time": self._now(), "step": step, "metrics": {key: float(value) for key, value in metrics.items()}}
        with self._noting_trouble():
            if self._metrics is None:
                raise FileNotFoundError("there is no file to write to")
            # The first line break ends a line that a full disk may have cut.
            line = b"\n" + json.dumps(row).encode() + b"\n"
            if self._metrics.write(line) < len(line):
                raise OSError("the disk took half a line")

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
        """Record a dataset of the run: file name, number of rows, columns and digest, but not the content.

        Args:
            path: JSON lines, relative to the project's folder.
            digest: at most 36 characters.
            context: ``training`` or ``validation``.
        """
        with path.open("rb") as file:
            first = file.readline()
            rows = bool(first) + sum(1 for _ in file)
        name = "/".join(path.with_suffix("").parts[1:])  # without data/: dataset/main/train
        about = {"name": name, "digest": digest, "uri": path.as_posix(), "context": context}
        self._describe(datasets=[*self._about["datasets"], about | {"rows": rows, "columns": [*json.loads(first or "{}")]}])

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
        """Close the run and wait until MLflow has it. If something fails, print a warning that says how to send it later.

        Returns:
            the run's id; None if MLflow could not be reached or tracking is off (:data:`NOWHERE`).
        """
        if self._sender is None:
            return None
        self._describe(status=status, ended=self._now())
        error = self._sender.finish() if self._metrics is not None else None
        lost = f"{self._lost} messages could not be kept on disk: {describe(self._trouble)}" if self._trouble else None
        if errors := [each for each in (error, lost) if each]:
            print(self._warning("; ".join(errors)), file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._metrics is not None and not self._sender.is_alive():
            self._metrics.close()  # releases the lock
        return self._sender.delivery.run_id

    def _now(self) -> int:
        """Milliseconds since 1970; setting the system's clock while the run goes on does not change how long it took."""
        return int(self._about["started"]) + round(1000 * (time.monotonic() - self._began))

    def _describe(self, **changed: Any) -> None:
        """Change the description of the run."""
        self._about |= changed
        with self._noting_trouble():
            if self._metrics is not None:
                write_json(self.folder / RUN, self._about)

    @contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        """Note errors of a full or read-only disk, which must not end the run."""
        try:
            yield
        except OSError as error:
            self._lost += 1
            self._trouble = error

    def _warning(self, error: str) -> str:
        lines = [
            f"warning: MLflow at {self._about['uri']} could not be written: {error}",
            "  The run's own files are complete.",
        ]
        if not (self.folder / RUN).exists():
            return "\n".join([*lines, "  Check MLFLOW_TRACKING_URI, or unset it to use a local file."])
        lines += [
            f"  What MLflow lacks is kept in {self.folder}",
            "  Check MLFLOW_TRACKING_URI (without it, runs go to mlflow.db here) and the server. The next run sends it, or:",
            f"    grpo mlflow_import {shlex.quote(str(self.folder))}",
        ]
        return "\n".join(lines)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=@-]+", "_", text)[:80]


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}
