"""What of a run's folder becomes what in MLflow. Each function may be called again with the same: nothing is entered twice.

A study is an MLflow experiment. Each state of it (params.yaml, commit) is a run there, whose children by the tag
``mlflow.parentRunId`` are the runs that were made in this state; the tag ``experiment`` says which experiment of the study.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo.common.errors import UserError
from grpo.common.metrics import TRL_NAMES
from grpo.study import paths
from grpo.tracking.mlflow_client import METRICS, STATE, SYSTEM, local_database, without_password

ARTIFACTS = "mlruns"  # folder for the artifacts of a local database, beside it
PLACES = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
LOCK_SECONDS = 60.0  # how long other writers are waited for
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # the UI opens its training view
    "mlflow.note.content": "A run for each state of the study (params.yaml and commit), and below it what ran then, by the tag"
    " `experiment`. Metrics are over optimizer steps; docs/tracking.md says what to look at.",
}


@dataclass
class Sent:
    """What MLflow is known to have of a folder; a new one makes everything be sent again, which changes nothing."""

    run_id: str | None = None
    experiment_id: str = ""
    parent_id: str | None = None  # of the study's run
    about: dict[str, Any] = field(default_factory=dict)  # of run.json: params, tags and datasets
    offsets: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # bytes of metrics.jsonl and system.jsonl
    metrics: int = 0
    damaged: int = 0  # lines
    gone: list[str] = field(default_factory=list)  # artifacts that are no longer there
    refused: dict[str, str] = field(default_factory=dict)  # what MLflow will never take, and why

    def complaints(self) -> list[str]:
        """What was not sent, each in a sentence without a full stop."""
        damaged = [f"{self.damaged} damaged lines were left out"] if self.damaged else []
        gone = [f"{path} was left out, as it is no longer there" for path in self.gone]
        return [*damaged, *gone, *(f"MLflow refused {what}: {reason}" for what, reason in self.refused.items())]


# ----------------------------------------------------------------------------------------------- experiment, parent and run


def find_or_make(client: Any, folder: Path, about: dict[str, Any], uri: str, run_id: str | None, sent: Sent) -> None:
    """Note the ids of the folder's run, its experiment and its parent; what there is not yet is made.

    Args:
        run_id: the run's, where it is known.
    """
    sent.experiment_id = _experiment(client, about["experiment"], uri)
    if (folder / STATE).exists():
        state = json.loads((folder / STATE).read_bytes())
        sent.parent_id = _parent(client, sent.experiment_id, state, about["started"], uri)
    if run_id is None:
        runs = client.search_runs([sent.experiment_id], f"tags.run_key = '{about['tags']['run_key']}'")
        run_id = runs[0].info.run_id if runs else None
    if run_id is None:
        tags = about["tags"] | ({"mlflow.parentRunId": sent.parent_id} if sent.parent_id else {})
        run = client.create_run(sent.experiment_id, start_time=about["started"], run_name=about["name"], tags=tags)
        run_id, sent.about["tags"] = run.info.run_id, about["tags"]
    sent.run_id = run_id


def _experiment(client: Any, name: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = local_database(uri)
        place = (database.parent / ARTIFACTS / name).as_uri() if database else None
        try:
            client.create_experiment(name, artifact_location=place, tags=EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run may have made it in the meantime
                raise
        experiment = client.get_experiment_by_name(name)
    if experiment.lifecycle_stage == "deleted":
        command = f"MLFLOW_TRACKING_URI={without_password(uri)} mlflow experiments restore --experiment-id"
        raise UserError(f"its experiment {name} is deleted. Bring it back: {command} {experiment.experiment_id}")
    found: str = experiment.experiment_id
    return found


def bring_artifacts_along(database: Path) -> None:
    """Have the artifacts of a local database where they lie now, if it was moved or copied with them.

    MLflow has the absolute place of each experiment and run, and no function that changes it.
    """
    here = (database.parent / ARTIFACTS).as_uri()
    with closing(sqlite3.connect(database, timeout=LOCK_SECONDS)) as connection, connection:
        for (place,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            former, name = place.rpartition("/")[::2]
            now = f"{here}/{name}"
            left_there = _path(place).exists() and not _path(now).exists()
            if former.startswith("file://") and former.endswith(f"/{ARTIFACTS}") and former != here and not left_there:
                for table, column in PLACES.items():
                    whose = f"{column} = :place OR substr({column}, 1, length(:place) + 1) = :place || '/'"
                    moved = f"UPDATE {table} SET {column} = :now || substr({column}, length(:place) + 1) WHERE {whose}"
                    connection.execute(moved, {"place": place, "now": now})


def _path(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


_parents: dict[tuple[str, str], tuple[str, str]] = {}  # by place and key: ids of the experiment and of the study's run


def _parent(client: Any, experiment_id: str, state: dict[str, Any], started: int, uri: str) -> str:
    """The id of the run of the study's state. Of the processes that work in a project's folder only one makes it."""
    from filelock import FileLock

    here = (uri, state["key"])
    if here not in _parents:
        lock = paths.workspace() / paths.RUN_LOCKS / "mlflow.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_SECONDS):
            runs = client.search_runs([experiment_id], f"tags.study_key = '{state['key']}'")
            if not runs:
                tags = state["tags"] | {"study_key": state["key"]}
                runs = [client.create_run(experiment_id, start_time=started, run_name=state["name"], tags=tags)]
                client.log_text(runs[0].info.run_id, json.dumps(state["settings"], indent=2), STATE)
        if runs[0].info.status != "RUNNING":
            client.update_run(runs[0].info.run_id, status="RUNNING")  # until `end_parents`
        _parents[here] = experiment_id, runs[0].info.run_id
    return _parents[here][1]


def end_parents(client: Any) -> None:
    """Have the studies' runs that this process has used end, unless another process's runs below them still go on."""
    while _parents:
        _, (experiment_id, run_id) = _parents.popitem()
        going_on = f"tags.mlflow.parentRunId = '{run_id}' and attributes.status = 'RUNNING'"
        if not client.search_runs([experiment_id], going_on, max_results=1):
            client.set_terminated(run_id)


# ------------------------------------------------------------------------------------------------- what is told of the run


def send_description(client: Any, about: dict[str, Any], sent: Sent) -> None:
    """Parameters, tags, and the datasets that it works with."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

    for kind, make in (("params", Param), ("tags", RunTag)):
        new = about[kind].items() - sent.about.get(kind, {}).items()
        log(client, kind, [make(*each) for each in sorted(new)], sent)
        sent.about[kind] = about[kind]
    datasets = about.get("datasets", [])
    if datasets != sent.about.get("datasets", []):
        inputs = []
        for each in datasets:
            schema = json.dumps({"mlflow_colspec": [{"name": name, "type": "string"} for name in each["columns"]]})
            source, profile = json.dumps({"uri": each["uri"]}), json.dumps({"num_rows": each["rows"]})
            dataset = Dataset(each["name"], each["digest"], "local", source, schema, profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", each["context"])]))
        client.log_inputs(sent.run_id, datasets=inputs)
        sent.about["datasets"] = datasets


def send_metrics(client: Any, folder: Path, sent: Sent, to_the_end: bool) -> None:
    """Send the run's and its machine's new metrics; where TRL has a name for one, under that name too."""
    from mlflow.entities import Metric

    for name in (METRICS, SYSTEM):
        rows, length, damaged = _new_rows(folder / name, sent.offsets[name], to_the_end)
        named = ((row, key, value) for row in rows for key, value in row["metrics"].items())
        metrics = [
            Metric(shown, value, row["time"], row["step"])
            for row, key, value in named
            for shown in ((key, TRL_NAMES[key]) if key in TRL_NAMES else (key,))
        ]
        log(client, "metrics", metrics, sent)
        sent.offsets[name] += length
        sent.damaged += damaged
        if name == METRICS:
            sent.metrics += sum(len(row["metrics"]) for row in rows)


def _new_rows(file: Path, offset: int, to_the_end: bool) -> tuple[list[dict[str, Any]], int, int]:
    """The rows after ``offset``, the last one too, if it is without an end, where nobody writes on.

    Returns:
        rows, how many bytes they take, and how many lines were damaged: cut off by a full disk, a kill or a power cut.
    """
    if not file.exists():
        return [], 0, 0
    with file.open("rb") as stream:
        stream.seek(offset)
        new = stream.read()
    if not to_the_end:
        new = new[: new.rfind(b"\n") + 1]
    rows, damaged = [], 0
    for line in filter(None, new.split(b"\n")):
        try:
            row = json.loads(line)
            rows.append({"time": int(row["time"]), "step": int(row["step"]), "metrics": dict(row["metrics"])})
        except (ValueError, KeyError, TypeError):
            damaged += 1
    return rows, len(new), damaged


def log(client: Any, kind: str, values: list[Any], sent: Sent) -> None:
    """Send params, tags or metrics; what MLflow will never take, such as a name with an @, does not keep the rest from it."""
    from mlflow.exceptions import MlflowException

    values = [value for value in values if f"{kind} {value.key}" not in sent.refused]
    if not values:
        return
    try:
        client.log_batch(sent.run_id, **{kind: values})
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        keys = {value.key for value in values}
        if len(keys) == 1:
            sent.refused[f"{kind} {keys.pop()}"] = str(error)
        for key in keys if len(keys) > 1 else ():
            log(client, kind, [value for value in values if value.key == key], sent)


# -------------------------------------------------------------------------------------------------- what it leaves behind


def send_files(client: Any, about: dict[str, Any], sent: Sent) -> None:
    """Copies of its files, and its tables, in the form that MLflow's UI shows."""
    files, tables = about["artifacts"], about.get("tables", [])
    sent.gone = [path for path in (*files, *tables) if not Path(path).exists()]
    for path in files:
        if path not in sent.gone:
            client.log_artifact(sent.run_id, path)
    for path in map(Path, tables):
        if str(path) not in sent.gone:
            records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            columns = list(dict.fromkeys(key for record in records for key in record))
            table = {"columns": columns, "data": [[record.get(key) for key in columns] for record in records]}
            client.log_text(sent.run_id, json.dumps(table, ensure_ascii=False), f"{path.stem}.json")


def send_checkpoints(client: Any, folder: Path, about: dict[str, Any], sent: Sent) -> None:
    """Checkpoints as logged models that hold no weights but say where DVC has them, each with the evaluation at its step."""
    from mlflow.entities import LoggedModelOutput, Metric

    kept = about.get("checkpoints", [])
    if not kept:
        return
    found = client.search_logged_models([sent.experiment_id], f"source_run_id = '{sent.run_id}'")
    models = {model.name: model for model in found}
    outputs = {output.model_id for output in client.get_run(sent.run_id).outputs.model_outputs} if models else set()
    rows, _, _ = _new_rows(folder / METRICS, 0, to_the_end=True)
    data = next(((d["name"], d["digest"]) for d in about["datasets"] if d["context"] == "validation"), (None, None))
    new: list[LoggedModelOutput] = []
    metrics: list[Metric] = []
    for each in kept:
        model = models.get(each["name"])
        if model is None:
            tags = each["tags"] | {"mlflow.model.isExternal": "true", "mlflow.note.content": _where(each["tags"])}
            made = {"name": each["name"], "source_run_id": sent.run_id, "tags": tags, "params": each["params"]}
            model = client.create_logged_model(sent.experiment_id, **made, model_type="checkpoint")
            client.finalize_logged_model(model.model_id, "READY")
        if model.model_id not in outputs:
            new.append(LoggedModelOutput(model.model_id, each["step"]))
        metrics += [
            Metric(key, value, row["time"], row["step"], model.model_id, *data)
            for row in rows
            for key, value in row["metrics"].items()
            if row["step"] == each["step"] and key.startswith("val/")
        ]
    if new:
        client.log_outputs(sent.run_id, new)
    log(client, "metrics", metrics, sent)


def _where(tags: dict[str, str]) -> str:
    return (
        f"The weights are DVC's, not MLflow's: `{tags['dvc.path']}`, in a folder whose hash in dvc.lock is `{tags['dvc.md5']}`."
        f" `dvc checkout {tags['dvc.folder']}` brings it at a commit whose dvc.lock has this hash (`dvc pull` from a remote)."
    )
