"""Send the folders of runs to MLflow.

:meth:`Delivery.send` sends what MLflow lacks of a folder. It can be called at any time and repeatedly: the tag ``run_key``
identifies the run, and MLflow stores equal metrics (key, step, time, value), parameters and tags once. It is called by a thread
of the training process, by the next run for folders that earlier runs left, and by ``grpo mlflow_import``.

A study is an MLflow experiment. Each state of the study (params.yaml, commit) is a run in it, and the parent (tag
``mlflow.parentRunId``) of the runs made in this state. Their tag ``experiment`` names the experiment of the study.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pandas as pd
from filelock import FileLock
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from grpo.common.errors import UserError
from grpo.common.files import read_jsonl
from grpo.common.metrics import TRL_NAMES
from grpo.study import paths
from grpo.tracking.mlflow_uri import describe, local_database, without_password

ROUND_SECONDS = 2.0  # between two rounds of sending during a run
END_SECONDS = 60.0  # how long to wait for MLflow at the end of a run, and for other writers of a database
LEFTOVER_SECONDS = 10.0  # how long a run's thread sends folders of earlier runs
SLOW_SECONDS, SILENT_SECONDS = 2.0, 60.0  # after a failure slower than the first, pause for the second
ARTIFACTS = "mlruns"  # folder for artifacts beside a local database
PLACES = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
# Files in a run's folder: its description, its metrics, and its id once MLflow has it.
RUN, METRICS, RUN_ID = "run.json", "metrics.jsonl", "run_id"
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # the UI opens its training view
    "mlflow.note.content": "One run per state of the study (params.yaml and commit), with the runs made in this state below it;"
    " their tag `experiment` names the experiment. Steps are optimizer steps. See docs/tracking.md.",
}
for _logger in ("mlflow", "alembic"):  # they print tracebacks; the run prints one warning instead
    logging.getLogger(_logger).setLevel(logging.CRITICAL)


# ---------------------------------------------------------------------------------------------------------- one folder


class Delivery:
    """What MLflow has of a run's folder. A new object sends everything again, which changes nothing.

    Attributes:
        run_id: in MLflow, once the run is there.
        metrics: number of values sent.
        left_out: what can never be sent, each in a sentence without a full stop.
    """

    def __init__(self, folder: Path, uri: str):
        self.folder, self.uri = folder, uri
        self.run_id: str | None = None
        self.metrics = 0
        self.left_out: list[str] = []
        self._experiment_id = ""
        self._parent_id: str | None = None
        self._described: dict[str, Any] = {}  # run.json, as far as MLflow has it
        self._offset = 0  # of metrics.jsonl, in bytes

    def send(self, abandoned: bool = False) -> None:
        """Send what is new; when the run is over, also its status, files and checkpoints.

        Args:
            abandoned: the run's process is gone. Without a recorded status it counts as KILLED at its last write.

        Raises:
            Exception: any error of the network, the server, the database or the folder.
        """
        about = json.loads((self.folder / RUN).read_bytes())
        try:
            client = open_store(self.uri)
        except FileNotFoundError:
            self.run_id = None
            raise
        if self.run_id is None:
            self._find_or_make(client, about)
        self._send_description(client, about)
        over = abandoned or about["status"] is not None
        self._send_metrics(client, over)
        if over:
            self._send_files(client, about)
            self._send_checkpoints(client, about)
            last_sign = max(about["started"], int(1000 * (self.folder / METRICS).stat().st_mtime))
            client.set_terminated(self.run_id, about["status"] or "KILLED", end_time=about["ended"] or last_sign)
            self._end_parent(client)

    def _find_or_make(self, client: MlflowClient, about: dict[str, Any]) -> None:
        """Find the run, its experiment and its parent in MLflow; make what is missing."""
        database, tags = local_database(self.uri), about["tags"]
        with _alone(self.uri):  # only one of several processes makes the experiment and the parent
            self._experiment_id = _experiment(client, about["experiment"], self.uri)
            if about["study"] is not None:
                self._parent_id = _parent(client, self._experiment_id, about["study"], about["started"])
                tags = tags | {"mlflow.parentRunId": self._parent_id}
        if database is None:
            with suppress(OSError, KeyError):  # in a container the user may have no name
                tags = tags | {"mlflow.user": getpass.getuser()}  # not in a local database, which may be passed on
        found = client.search_runs([self._experiment_id], f"tags.run_key = '{about['tags']['run_key']}'")
        run = found[0] if found else client.create_run(self._experiment_id, about["started"], tags, about["name"])
        self.run_id = run.info.run_id
        (self.folder / RUN_ID).write_text(self.run_id)

    def _send_description(self, client: MlflowClient, about: dict[str, Any]) -> None:
        """Send parameters, tags and datasets."""
        if about == self._described:
            return
        client.log_batch(
            self.run_id,
            params=[Param(_allowed(key), value) for key, value in about["params"].items()],
            tags=[RunTag(_allowed(key), value) for key, value in about["tags"].items()],
        )
        inputs = []
        for each in about["datasets"]:
            schema = json.dumps({"mlflow_colspec": [{"name": name, "type": "string"} for name in each["columns"]]})
            source, profile = json.dumps({"uri": each["uri"]}), json.dumps({"num_rows": each["rows"]})
            dataset = Dataset(each["name"], each["digest"], "local", source, schema, profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", each["context"])]))
        if inputs:
            client.log_inputs(self.run_id, datasets=inputs)
        self._described = about

    def _send_metrics(self, client: MlflowClient, over: bool) -> None:
        """Send new metrics, also under TRL's names where there are any."""
        rows, length, damaged = self._rows(self._offset, over)
        metrics = [
            Metric(_allowed(shown), value, row["time"], row["step"])
            for row in rows
            for key, value in row["metrics"].items()
            for shown in (key, *([TRL_NAMES[key]] if key in TRL_NAMES else []))
        ]
        if metrics:
            client.log_batch(self.run_id, metrics=metrics)
        self._offset += length
        self.metrics += sum(len(row["metrics"]) for row in rows)
        self.left_out += [f"{damaged} damaged lines were left out"] if damaged else []

    def _rows(self, offset: int, over: bool) -> tuple[list[dict[str, Any]], int, int]:
        """Read the rows of metrics.jsonl after ``offset``; an unfinished last line counts only if the run is over.

        Returns:
            the rows, their number of bytes, and the number of damaged lines (cut off by a full disk, a kill or a power cut).
        """
        with (self.folder / METRICS).open("rb") as file:
            file.seek(offset)
            new = file.read()
        if not over:
            new = new[: new.rfind(b"\n") + 1]
        rows, damaged = [], 0
        for line in filter(None, new.split(b"\n")):
            try:
                row = json.loads(line)
                rows.append({"time": int(row["time"]), "step": int(row["step"]), "metrics": dict(row["metrics"])})
            except (ValueError, KeyError, TypeError):
                damaged += 1
        return rows, len(new), damaged

    def _send_files(self, client: MlflowClient, about: dict[str, Any]) -> None:
        """Send artifacts, and tables in the form that MLflow's UI shows."""
        gone = [path for path in (*about["artifacts"], *about["tables"]) if not Path(path).exists()]
        self.left_out += [f"{path} was left out, as it is no longer there" for path in gone]
        kept = {artifact.path for artifact in client.list_artifacts(self.run_id)}
        for path in about["artifacts"]:
            if path not in gone:
                client.log_artifact(self.run_id, path)
        for path in map(Path, about["tables"]):
            if str(path) not in gone and f"{path.stem}.json" not in kept:  # a second call of log_table would append
                client.log_table(self.run_id, pd.DataFrame(read_jsonl(path, "train", dict)), f"{path.stem}.json")

    def _send_checkpoints(self, client: MlflowClient, about: dict[str, Any]) -> None:
        """Send checkpoints as logged models with the evaluation at their step and the place of the weights in DVC."""
        if not about["checkpoints"]:
            return
        found = client.search_logged_models([self._experiment_id], f"source_run_id = '{self.run_id}'")
        models = {model.name: model for model in found}
        known = {output.model_id for output in client.get_run(self.run_id).outputs.model_outputs} if models else set()
        data = next(((d["name"], d["digest"]) for d in about["datasets"] if d["context"] == "validation"), (None, None))
        rows, _, _ = self._rows(0, over=True)
        outputs, metrics = [], []
        for each in about["checkpoints"]:
            model = models.get(each["name"])
            if model is None:
                tags = each["tags"] | {"mlflow.model.isExternal": "true", "mlflow.note.content": _where(each["tags"])}
                made = {"name": each["name"], "source_run_id": self.run_id, "tags": tags, "params": each["params"]}
                model = client.create_logged_model(self._experiment_id, **made, model_type="checkpoint")
                client.finalize_logged_model(model.model_id, "READY")
            if model.model_id not in known:
                outputs.append(LoggedModelOutput(model.model_id, each["step"]))
            metrics += [
                Metric(_allowed(key), value, row["time"], row["step"], model.model_id, *data)
                for row in rows
                for key, value in row["metrics"].items()
                if row["step"] == each["step"] and key.startswith("val/")
            ]
        if outputs:
            client.log_outputs(self.run_id, outputs)
        client.log_batch(self.run_id, metrics=metrics)

    def _end_parent(self, client: MlflowClient) -> None:
        """End the parent run, unless other runs below it are still running."""
        going_on = f"tags.mlflow.parentRunId = '{self._parent_id}' and attributes.status = 'RUNNING'"
        if self._parent_id and not client.search_runs([self._experiment_id], going_on, max_results=1):
            client.set_terminated(self._parent_id)


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w.\- :/]", "_", name)


def _where(tags: dict[str, str]) -> str:
    return (
        f"DVC stores the weights: `{tags['dvc.path']}`, in a folder with the hash `{tags['dvc.md5']}` in dvc.lock."
        f" `dvc checkout {tags['dvc.folder']}` restores it at a commit whose dvc.lock has this hash (`dvc pull` from a remote)."
    )


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    """Find or make the study's experiment; return its id."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = local_database(uri)
        place = (database.parent / ARTIFACTS / name).as_uri() if database else None
        try:
            return str(client.create_experiment(name, place, EXPERIMENT_TAGS))
        except MlflowException:  # a process on another machine may have made it in the meantime
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        command = f"MLFLOW_TRACKING_URI={without_password(uri)} mlflow experiments restore --experiment-id"
        raise UserError(f"its experiment {name} is deleted. Restore it: {command} {experiment.experiment_id}")
    return str(experiment.experiment_id)


def _parent(client: MlflowClient, experiment_id: str, state: dict[str, Any], started: int) -> str:
    """Find or make the run of the study's state, set it to running, and return its id."""
    found = client.search_runs([experiment_id], f"tags.study_key = '{state['key']}'")
    if not found:
        tags = state["tags"] | {"study_key": state["key"]}
        found = [client.create_run(experiment_id, started, tags, state["name"])]
        client.log_dict(found[0].info.run_id, state["settings"], "study.json")
    if found[0].info.status != "RUNNING":
        client.update_run(found[0].info.run_id, status="RUNNING")
    return str(found[0].info.run_id)


# ----------------------------------------------------------------------------------------------------- where it is sent


_opened: dict[str, tuple[MlflowClient, tuple[int, int] | None]] = {}  # by URI: a client, and the file of a local database


def open_store(uri: str) -> MlflowClient:
    """Open MLflow's client. A new database is set up under a lock, as processes would race to make its tables.

    Raises:
        FileNotFoundError: the database was removed or replaced since; MLflow would still write to the old file.
    """
    database = local_database(uri)
    if uri not in _opened:
        with _alone(uri) if database else nullcontext():
            client = MlflowClient(uri)
            client.search_experiments(max_results=1)
            if database:
                bring_artifacts_along(database)
        _opened[uri] = client, _file(database)
    client, file = _opened[uri]
    if file != _file(database):
        raise FileNotFoundError(f"{database} was removed or replaced during the run")
    return client


def _alone(uri: str) -> FileLock:
    """The lock for what only one process at a time may do in MLflow: beside a local database, or in the project's folder."""
    database = local_database(uri)
    lock = Path(f"{database}.lock") if database else paths.workspace() / paths.RUN_LOCKS / "mlflow.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(lock, timeout=END_SECONDS)


def _file(database: Path | None) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    with suppress(OSError):
        return ((about := database.stat()).st_dev, about.st_ino) if database else None
    return None


def bring_artifacts_along(database: Path) -> None:
    """Update the paths of artifacts in a local database that was moved or copied together with them.

    MLflow stores the absolute path of each experiment and run, and has no function to change it.
    """
    artifacts = database.parent / ARTIFACTS
    with closing(sqlite3.connect(database, timeout=END_SECONDS)) as connection, connection:
        places = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        for former in {place.rpartition("/")[0] for (place,) in places} - {artifacts.as_uri()}:
            left_there = Path(unquote(urlsplit(former).path)).exists() and not artifacts.exists()
            if former.startswith("file://") and former.endswith(f"/{ARTIFACTS}") and not left_there:
                values = {"now": artifacts.as_uri(), "former": former, "length": len(former)}
                for table, column in PLACES.items():
                    below = f"substr({column}, 1, :length + 1) = :former || '/'"
                    moved = f"UPDATE {table} SET {column} = :now || substr({column}, :length + 1) WHERE {below}"
                    connection.execute(moved, values)


# ------------------------------------------------------------------------------------------------- while a run goes on


_silent: dict[str, tuple[float, Exception]] = {}  # by URI: time and error of a server's last slow failure


class Sender(threading.Thread):
    """Thread that sends the folder of this process's run, and folders that earlier runs left."""

    def __init__(self, folder: Path, uri: str):
        super().__init__(name="mlflow", daemon=True)
        self.delivery = Delivery(folder, uri)
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Send what is new every two seconds, and the rest at the end."""
        try:
            self._error = self._send_all()
        except Exception as error:  # e.g. a setting of MLflow that is not a number
            self._error = error

    def _send_all(self) -> Exception | None:
        monitor = None
        while True:
            if self._send() is None and monitor is None:
                monitor = SystemMetricsMonitor(self.delivery.run_id, tracking_uri=self.delivery.uri)
                monitor.start()
                _deliver_leftovers(self.delivery.uri)
            if self._over.wait(ROUND_SECONDS):
                break
        if monitor is not None:
            monitor.finish()
        deadline = time.monotonic() + END_SECONDS
        while (error := self._send()) and "database is locked" in str(error) and time.monotonic() < deadline:
            pass  # MLflow itself waits for 20 s
        return error

    def finish(self) -> str | None:
        """Send the rest; return what went wrong, or None."""
        self._over.set()
        self.join(END_SECONDS)
        if self.is_alive():
            return f"it took longer than {END_SECONDS:.0f} s"
        left_out = "; ".join(self.delivery.left_out)
        return describe(self._error) if self._error else left_out or None

    def _send(self) -> Exception | None:
        """Send what is new; return the error, if any. After a slow failure, further runs in this process do not wait again."""
        began = time.monotonic()
        failed_at, error = _silent.get(self.delivery.uri, (float("-inf"), OSError()))
        if began - failed_at < SILENT_SECONDS:
            return error
        try:
            self.delivery.send()
        except Exception as error:
            if time.monotonic() - began > SLOW_SECONDS and local_database(self.delivery.uri) is None:
                _silent[self.delivery.uri] = time.monotonic(), error
            return error
        return None


def _deliver_leftovers(uri: str) -> None:
    """Send the folders of runs that were killed or could not reach this server; a folder that cannot be sent stays."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    for folder in sorted((paths.workspace() / paths.UNSENT_METRICS).glob("*")):
        with suppress(Exception):
            if json.loads((folder / RUN).read_bytes())["uri"] == without_password(uri) and time.monotonic() < deadline:
                deliver(folder, uri)


def deliver(folder: Path, uri: str) -> Delivery:
    """Send the folder of a run that is over, and remove it.

    Raises:
        BlockingIOError: the run is not over, or another process sends its folder.
        Exception: see :meth:`Delivery.send`; the folder is kept.
    """
    with _held(folder / METRICS):
        delivery = Delivery(folder, uri)
        delivery.send(abandoned=True)
        shutil.rmtree(folder)
    return delivery


@contextmanager
def _held(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# ---------------------------------------------------------------------------------------------------------- by hand


def import_folders(folders: Iterable[Path], uri: str) -> Iterator[str]:
    """Send the folders of runs that are over to MLflow, and remove each one that was sent.

    Yields:
        a line on each folder.

    Raises:
        UserError: MLflow cannot be reached, or some folders could not be sent; they are kept.
    """
    problems: list[str] = []
    for folder in folders:
        if not (folder / RUN).exists():
            problems.append(f"{folder}: not the folder of a run. Correct the path.")
            continue
        try:
            about = json.loads((folder / RUN).read_bytes())
            name, there = f"{about['experiment']} {about['name']}", about["uri"]
        except (ValueError, KeyError, TypeError):
            problems.append(f"{folder} is kept: its description {RUN} is damaged. Remove the folder to give the run up.")
            continue
        if there != without_password(uri) and (folder / RUN_ID).exists():
            run_id = (folder / RUN_ID).read_text()
            problems.append(
                f"{folder} is kept: it continues run {run_id}, which is at {there} and not at {without_password(uri)}. Set"
                f" MLFLOW_TRACKING_URI; or remove {RUN_ID} from the folder to make a new run."
            )
            continue
        try:
            delivery = deliver(folder, uri)
        except BlockingIOError:
            yield f"{folder}: skipped, as its run is not over; it sends the folder itself"
        except Exception as error:
            if getattr(error, "error_code", "INTERNAL_ERROR") in {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE"}:
                raise UserError(
                    f"MLflow at {without_password(uri)} could not be written: {describe(error)}\n"
                    f"  {folder} is kept, and so are the folders after it. Check MLFLOW_TRACKING_URI."
                ) from error
            problems.append(f"{folder} is kept: {describe(error)}")
        else:
            yield f"{name}: run {delivery.run_id}, {delivery.metrics} metrics"
            yield from (f"  {sentence}" for sentence in delivery.left_out)
    if problems:
        raise UserError("\n".join(problems))
