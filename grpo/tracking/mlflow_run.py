"""An MLflow run, as the code that trains sees it: a folder that it writes, and a thread that sends the folder.

The folder is in ``data/state/mlflow`` until MLflow has all of it, and is the truth until then: ``run.json`` says what run it
is, ``metrics.jsonl`` has a line for each call of :meth:`MlflowRun.log`. :mod:`grpo.tracking.mlflow_send` reads it. A server
that is slow, away or broken costs a warning at the run's end.
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
    """One MLflow run, as a folder.

    The tag ``run_key`` identifies it in MLflow, so that a folder can be sent twice. The process holds a lock (flock) on the
    file of metrics until it ends: a folder without this lock belongs to a run that is over.

    Args:
        experiment: the MLflow experiment's name; made if it does not exist.
        name: the run's name.
        params, tags: values are turned into text.
        state: of the study, from :func:`grpo.tracking.mlflow_study.study_state`; it becomes this run's parent.
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
            write_json(self.folder / RUN, self._about)  # last, as it makes the folder a run's
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
            # The first line break ends what a full disk may have left of the line before.
            line = b"\n" + json.dumps(row).encode() + b"\n"
            if self._metrics.write(line) < len(line):
                raise OSError("the disk took half a line")

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._describe(tags=self._about["tags"] | _as_text(tags))

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file with the run, made when the run ends."""
        self._describe(artifacts=[*self._about["artifacts"], str(path.absolute())])

    def table(self, path: Path) -> None:
        """Keep a file of JSON lines with the run as a table ``STEM.json``, which MLflow's UI shows."""
        self._describe(tables=[*self._about["tables"], str(path.absolute())])

    def dataset(self, path: Path, digest: str, context: str) -> None:
        """Record what the run works with: the file, its rows and columns, and its digest; not its content.

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
        """Record the checkpoints in a folder that DVC keeps, each with the hashes by which DVC finds it; no weights."""
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
        """Close the run, and wait until MLflow has it.

        Returns:
            the run's id, or None if MLflow could not be asked for one, or is not to be asked (:data:`NOWHERE`). Where something
            could not be written, a warning says what, and how to deliver it later; the run's own files are whole.
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
            self._metrics.close()  # which releases its lock
        return self._sender.delivery.run_id

    def _now(self) -> int:
        """Milliseconds since 1970; setting the system's clock while the run goes on does not change how long it took."""
        return int(self._about["started"]) + round(1000 * (time.monotonic() - self._began))

    def _describe(self, **changed: Any) -> None:
        """Change what the folder says of the run."""
        self._about |= changed
        with self._noting_trouble():
            if self._metrics is not None:
                write_json(self.folder / RUN, self._about)

    @contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        """A disk that is full or read-only costs the record in MLflow, no more."""
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
            "  Check MLFLOW_TRACKING_URI (without it, runs go to mlflow.db here) and the server. The next run delivers it, or:",
            f"    grpo mlflow_import {shlex.quote(str(self.folder))}",
        ]
        return "\n".join(lines)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=@-]+", "_", text)[:80]


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}
