"""Send the folders of runs to MLflow.

:meth:`Delivery.send` sends what MLflow lacks of a folder. A folder can be sent repeatedly: the tag ``run_key`` identifies the
run, and MLflow stores equal metrics (key, step, time, value), parameters and tags once. Folders are sent by their run, by the
next run where earlier ones left them, and by ``grpo mlflow_import``.

A study is an MLflow experiment. Each state of the study (params.yaml, commit) is a run in it, and the parent (tag
``mlflow.parentRunId``) of the runs made in this state. Their tag ``experiment`` names the experiment of the study.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import re
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import pandas as pd
import sqlalchemy
from filelock import FileLock
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.tracking import MlflowClient
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from grpo.common.errors import UserError
from grpo.common.files import read_jsonl
from grpo.common.metrics import mlflow_names
from grpo.common.uris import without_password
from grpo.study import paths
from grpo.tracking.mlflow_uri import describe, local_database

WAIT_SECONDS = 60.0  # for other processes that use MLflow
LOCKED_SECONDS = 10.0  # for a SQLite database that another process has locked
ARTIFACTS = "mlruns"  # folder for artifacts beside a local database
PLACES = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
RUN, METRICS, FILES = "run.json", "metrics.jsonl", "files"  # in a run's folder: its description, metrics and artifacts
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # the UI opens its training view
    "mlflow.note.content": "One run per state of the study (params.yaml and commit), with the runs made in this state below it;"
    " their tag `experiment` names the experiment. Steps are optimizer steps. See docs/tracking.md.",
}
for _logger in ("mlflow", "alembic"):  # they print tracebacks; the run prints one warning instead
    logging.getLogger(_logger).setLevel(logging.CRITICAL)


# ------------------------------------------------------------------------------------------------------ a run's folder


Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", max_length=500)]
Key = Annotated[str, Field(pattern=r"^\w+$")]  # becomes a part of MLflow's search expressions
EXPERIMENT = r"\w[\w.@ -]*"  # its name is that of the folder of its artifacts
Texts = dict[str, str]


def _with_key(tags: Texts) -> Texts:
    if not re.fullmatch(r"\w+", tags.get("run_key", "")):
        raise ValueError("run_key is none of ours")
    return tags


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class State(_Strict):
    """A state of a study (:func:`grpo.tracking.mlflow_study.study_state`)."""

    key: Key
    name: Name
    tags: Texts
    settings: dict[str, JsonValue]


class UsedDataset(_Strict):
    """A dataset of a run (:meth:`grpo.tracking.mlflow_run.MlflowRun.dataset`)."""

    name: str
    digest: str
    uri: str
    context: str
    rows: int


class Checkpoint(_Strict):
    """A checkpoint of a run (:meth:`grpo.tracking.mlflow_run.MlflowRun.checkpoints`)."""

    name: Name
    step: int
    params: Texts
    tags: Texts


class RunFile(_Strict):
    """Content of run.json, which may come from elsewhere. :class:`grpo.tracking.mlflow_run.MlflowRun` writes it."""

    uri: str
    experiment: Annotated[str, Field(pattern=f"^{EXPERIMENT}$", max_length=200)]
    name: Name
    params: Texts
    tags: Annotated[Texts, AfterValidator(_with_key)]
    study: State | None
    datasets: list[UsedDataset]
    artifacts: list[str]
    tables: list[str]
    checkpoints: list[Checkpoint]
    started: int
    status: Literal["FINISHED", "FAILED", "KILLED"] | None
    ended: int | None


def read_run(folder: Path) -> dict[str, Any]:
    """Read run.json and check that the folder is one of ours, with nothing in it that leads elsewhere.

    Raises:
        UserError: it is not.
    """
    strange = [path.name for path in folder.iterdir() if path.name not in (RUN, METRICS, FILES, f".{RUN}.draft")]
    strange = [name for name in strange if not name.startswith(f".{RUN}.draft.")]  # of a process that was killed
    strange += [path.name for path in (folder, *folder.rglob("*")) if path.is_symlink()]
    if strange:
        raise UserError(f"{folder}: holds {strange[0]}, which no folder of a run has. Name folders in {paths.UNSENT_METRICS}.")
    try:
        about = RunFile.model_validate_json((folder / RUN).read_bytes()).model_dump()
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        raise UserError(f"{folder / RUN}: not the description of a run ({where}: {wrong['msg']})") from None
    for name in (*about["artifacts"], *about["tables"]):
        _file_of(folder, name)
    return about


def _file_of(folder: Path, name: str) -> Path:
    """Find an artifact: a copy in the run's folder, or in a folder of an earlier version a file of the project.

    Raises:
        UserError: it is elsewhere, also by a link, or hidden (``.git/config`` may hold a password).
    """
    file = (folder / name).resolve()
    for root in (folder / FILES, Path.cwd(), paths.workspace()):
        below = file.relative_to(root.resolve()).parts if file.is_relative_to(root.resolve()) else (".",)
        if not any(part.startswith(".") for part in below):
            return file
    raise UserError(
        f"{folder / RUN}: {name} is outside of the folder of the run and of the project. Nothing of the run was sent."
    )


def client_of(uri: str) -> MlflowClient:
    """A client of MLflow, after one attempt to open a database: MLflow itself makes ten, which take 100 s.

    Raises:
        Exception: the database cannot be opened or written.
    """
    if database := local_database(uri):
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    elif re.match("postgresql|mysql|mssql|sqlite", uri):
        sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool).connect().close()
    return MlflowClient(uri)


class Delivery:
    """What MLflow has of a run's folder. A new object sends everything again, which changes nothing.

    Attributes:
        run_id: in MLflow, once the run is there.
        is_done: whether MLflow has all of a run that is over; then the folder is gone.
    """

    def __init__(self, folder: Path, uri: str):
        self.folder, self.uri = folder, uri
        self.run_id: str | None = None
        self.is_done = False
        self._client: MlflowClient
        self._experiment_id = ""
        self._described: dict[str, Any] = {}  # run.json, as far as MLflow has it
        self._offset = 0  # of metrics.jsonl, in bytes

    def send(self, over: bool = False) -> None:
        """Send what is new. If the run is over, also send its files, checkpoints and status, and remove the folder.

        Without a recorded status the run counts as KILLED at its last write.

        Raises:
            Exception: any error of the network, the server, the database or the folder.
        """
        about = read_run(self.folder)
        if self.run_id is None:
            self._find_or_make(about)
        if about != self._described:
            self._send_description(about)
        self._send_metrics()
        if over:
            self._send_files(about)
            self._send_checkpoints(about)
            ended = about["ended"] or int(1000 * (self.folder / METRICS).stat().st_mtime)
            self._client.set_terminated(self.run_id, about["status"] or "KILLED", end_time=ended)
            shutil.rmtree(self.folder)
            self.is_done = True

    def _find_or_make(self, about: dict[str, Any]) -> None:
        """Find the run, its experiment and its parent in MLflow; make what is missing."""
        tags, database = about["tags"], local_database(self.uri)
        lock = paths.workspace() / paths.RUN_LOCKS / "mlflow.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=WAIT_SECONDS):  # processes would race to make the database, the experiment and the parent
            self._client = client_of(self.uri)
            self._experiment_id = self._experiment(about["experiment"])
            if about["study"] is not None:
                tags = tags | {"mlflow.parentRunId": self._parent(about["study"], about["started"])}
        if database is None:
            with suppress(OSError, KeyError):  # in a container the user may have no name
                tags = tags | {"mlflow.user": getpass.getuser()}  # not in a local database, which may be passed on
        found = self._client.search_runs([self._experiment_id], f"tags.run_key = '{about['tags']['run_key']}'")
        run = found[0] if found else self._client.create_run(self._experiment_id, about["started"], tags, about["name"])
        self.run_id = run.info.run_id

    def _experiment(self, name: str) -> str:
        found, database = self._client.get_experiment_by_name(name), local_database(self.uri)
        if database is not None:
            bring_artifacts_along(database)
        if found is not None and found.lifecycle_stage == "deleted":
            command = f"MLFLOW_TRACKING_URI={without_password(self.uri)} mlflow experiments restore --experiment-id"
            raise UserError(f"its experiment {name} is deleted. Restore it: {command} {found.experiment_id}")
        if found is not None:
            return str(found.experiment_id)
        place = (database.parent / ARTIFACTS / name).as_uri() if database else None
        return str(self._client.create_experiment(name, place, EXPERIMENT_TAGS))

    def _parent(self, state: dict[str, Any], started: int) -> str:
        found = self._client.search_runs([self._experiment_id], f"tags.study_key = '{state['key']}'")
        if found:
            return str(found[0].info.run_id)
        tags = state["tags"] | {"study_key": state["key"]}
        run_id = self._client.create_run(self._experiment_id, started, tags, state["name"]).info.run_id
        self._client.log_dict(run_id, state["settings"], "study.json")
        self._client.set_terminated(run_id)
        return str(run_id)

    def _send_description(self, about: dict[str, Any]) -> None:
        params = [Param(_allowed(key), value) for key, value in about["params"].items()]
        tags = [RunTag(_allowed(key), value) for key, value in about["tags"].items()]
        self._client.log_batch(self.run_id, params=params, tags=tags)
        inputs = []
        for each in about["datasets"]:
            source, profile = json.dumps({"uri": each["uri"]}), json.dumps({"num_rows": each["rows"]})
            dataset = Dataset(each["name"], each["digest"], "local", source, profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", each["context"])]))
        if inputs:
            self._client.log_inputs(self.run_id, datasets=inputs)
        self._described = about

    def _send_metrics(self) -> None:
        """Send new metrics, also under TRL's names where there are any."""
        with (self.folder / METRICS).open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        loss_type = self._described["params"].get("loss_type")
        new = new[: new.rfind(b"\n") + 1]  # the run may be writing a line
        metrics = [
            Metric(_allowed(shown), value, row["time"], row["step"])
            for row in _rows(new)
            for key, value in row["metrics"].items()
            for shown in mlflow_names(key, loss_type)
        ]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)
        self._offset += len(new)

    def _send_files(self, about: dict[str, Any]) -> None:
        """Send the artifacts that are still there, and tables in the form that MLflow's UI shows."""
        sent = {artifact.path for artifact in self._client.list_artifacts(self.run_id)}
        for name in (*about["artifacts"], *about["tables"]):
            path = _file_of(self.folder, name)
            if not path.is_file():
                print(f"warning: MLflow: {path} was left out, as it is no longer there", file=sys.stderr)
            elif name in about["artifacts"]:
                self._client.log_artifact(self.run_id, str(path))
            elif f"{path.stem}.json" not in sent:  # a second call of log_table would append
                self._client.log_table(self.run_id, pd.DataFrame(read_jsonl(path, "train", dict)), f"{path.stem}.json")

    def _send_checkpoints(self, about: dict[str, Any]) -> None:
        """Send checkpoints as logged models with the evaluation at their step and the place of the weights in DVC."""
        if not about["checkpoints"]:
            return
        found = self._client.search_logged_models([self._experiment_id], f"source_run_id = '{self.run_id}'")
        whole = {model.name for model in found if model.status == "READY"}
        data = next(((d["name"], d["digest"]) for d in about["datasets"] if d["context"] == "validation"), (None, None))
        rows = _rows((self.folder / METRICS).read_bytes())
        for each in about["checkpoints"]:
            if each["name"] in whole:
                continue
            tags = each["tags"] | {"mlflow.model.isExternal": "true", "mlflow.note.content": _where(each["tags"])}
            made = {"name": each["name"], "source_run_id": self.run_id, "tags": tags, "params": each["params"]}
            model = self._client.create_logged_model(self._experiment_id, **made, model_type="checkpoint")
            metrics = [
                Metric(_allowed(key), value, row["time"], row["step"], model.model_id, *data)
                for row in rows
                for key, value in row["metrics"].items()
                if row["step"] == each["step"] and key.startswith("val/")
            ]
            self._client.log_batch(self.run_id, metrics=metrics)
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, each["step"])])
            self._client.finalize_logged_model(model.model_id, "READY")


def _rows(content: bytes) -> list[dict[str, Any]]:
    """Read lines of metrics.jsonl, without those that a kill or a full disk cut off."""
    rows = []
    for line in content.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w.\- :/]", "_", name)


def _where(tags: dict[str, str]) -> str:
    return (
        f"DVC stores the weights: `{tags['dvc.path']}`, in a folder with the hash `{tags['dvc.md5']}` in dvc.lock."
        f" `dvc checkout {shlex.quote(tags['dvc.folder'])}` restores it at a commit whose dvc.lock has this hash"
        " (`dvc pull` from a remote)."
    )


def bring_artifacts_along(database: Path) -> None:
    """Update the paths of artifacts in a local database that was moved or copied together with them.

    MLflow stores the absolute path of each experiment and run, and has no function to change it.
    """
    with closing(sqlite3.connect(database, timeout=WAIT_SECONDS)) as connection, connection:
        for (place,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            name = unquote(place.rpartition("/")[2])
            here = database.parent / ARTIFACTS / name
            if place != here.as_uri() and re.fullmatch(EXPERIMENT, name) and here.exists():
                for table, column in PLACES.items():
                    connection.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (place, here.as_uri()))


# -------------------------------------------------------------------------------------------- folders that runs left


def deliver(folder: Path, uri: str) -> str:
    """Send the folder of a run that is over, and remove it; return the run's name and its id in MLflow.

    Raises:
        BlockingIOError: the run is not over, or another process sends its folder.
        Exception: see :meth:`Delivery.send`; the folder is kept.
    """
    about, delivery = read_run(folder), Delivery(folder, uri)
    with (folder / METRICS).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        delivery.send(over=True)
    return f"{about['experiment']} {about['name']}: run {delivery.run_id}"


def deliver_leftovers(uri: str) -> None:
    """Send the folders of runs that were killed or could not reach this server; a folder that cannot be sent stays."""
    for folder in sorted((paths.workspace() / paths.UNSENT_METRICS).glob("*")):
        with suppress(Exception):
            if json.loads((folder / RUN).read_bytes())["uri"] == without_password(uri):
                deliver(folder, uri)


def import_folders(folders: Iterable[Path], uri: str) -> Iterator[str]:
    """Send the folders of runs that are over to MLflow, remove each one that was sent, and yield a line on each.

    Raises:
        UserError: MLflow cannot be reached, or some folders could not be sent; they are kept.
    """
    try:
        client_of(uri).search_experiments(max_results=1)
    except Exception as error:
        raise UserError(
            f"MLflow at {without_password(uri)} cannot be reached: {describe(error)}\n"
            f"  All folders are kept. Check MLFLOW_TRACKING_URI."
        ) from error
    problems = []
    for folder in folders:
        if missing := [name for name in (RUN, METRICS) if not (folder / name).is_file()]:
            problems.append(f"{folder / missing[0]}: no such file. Name folders of runs in {paths.UNSENT_METRICS}.")
            continue
        try:
            yield deliver(folder, uri)
        except BlockingIOError:
            yield f"{folder}: skipped, as its run is not over; it sends the folder itself"
        except Exception as error:
            problems.append(f"{folder} is kept: {describe(error)}")
    if problems:
        raise UserError("\n".join(problems))
