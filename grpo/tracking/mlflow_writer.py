"""Write the record of a run to MLflow: during the run, or later from the folder in which it was kept.

The tag ``run_key`` identifies a run, so a resumed run goes on in the run that MLflow has, and a folder can be imported again.
Of each metric MLflow gets the steps after the last one that it has, so no step is there twice.

A study is an MLflow experiment. Each state of the study (params.yaml, commit) is a run in it, and the parent (tag
``mlflow.parentRunId``) of the runs made in this state. Their tag ``experiment`` names the experiment of the study.
"""

from __future__ import annotations

import getpass
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.tracking import MlflowClient

from grpo.common.errors import UserError
from grpo.common.files import read_json, read_jsonl
from grpo.common.metrics import mlflow_names
from grpo.common.safe_text import without_password
from grpo.study import paths
from grpo.tracking.mlflow_uri import ARTIFACTS, EXPERIMENT, bring_artifacts_along, client_of, describe, local_database

WAIT_SECONDS = 60.0  # for other processes that make the database, the experiment or the parent
RECORD, KINDS = "run.json", ("artifacts", "tables")  # in the folder of a run: what it recorded, and copies of its files
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # the UI opens its training view
    "mlflow.note.content": "One run per state of the study (params.yaml and commit), with the runs made in this state below it;"
    " their tag `experiment` names the experiment. Steps are optimizer steps. See docs/tracking.md.",
}


class Writer:
    """Writes to MLflow what it lacks of a run.

    Args:
        record: all that the run has recorded so far, but its files (:class:`grpo.tracking.mlflow_run.MlflowRun`).

    Attributes:
        run_id: in MLflow, once the run is there.
    """

    def __init__(self, record: dict[str, Any], uri: str):
        self.record, self.uri = record, uri
        self.run_id: str | None = None
        self._client: MlflowClient
        self._experiment_id = ""
        self._described: dict[str, Any] = {}  # tags and datasets that MLflow has
        self._rows = 0  # rows of metrics that are written
        self._last: dict[str, int] = {}  # by metric the last step that MLflow has

    def write(self) -> None:
        """Write what is new.

        Raises:
            Exception: any error of the network, the server, the database or the disk.
        """
        if self.run_id is None:
            self.run_id = self._find_or_create()
        record, described = self.record, {key: self.record[key] for key in ("tags", "datasets")}
        if described != self._described:
            tags = [RunTag(_allowed(key), value) for key, value in record["tags"].items()]
            self._client.log_batch(self.run_id, tags=tags)
            if inputs := [_dataset_input(**each) for each in record["datasets"]]:
                self._client.log_inputs(self.run_id, datasets=inputs)
            self._described = described
        loss_type, last, new = record["params"].get("loss_type"), dict(self._last), []
        for at, step, values in record["rows"][self._rows :]:
            for key, value in values.items():
                for name in map(_allowed, mlflow_names(key, loss_type)):
                    if step > last.get(name, -1):
                        new.append(Metric(name, value, at, step))
                        last[name] = step
        if new:
            self._client.log_batch(self.run_id, metrics=new)
        self._rows, self._last = len(record["rows"]), last

    def finish(self, files: Mapping[str, Iterable[Path]]) -> None:
        """Write what is new, the files by their kind, and how the run ended.

        Raises:
            Exception: as :meth:`write`.
        """
        self.write()
        written = {artifact.path for artifact in self._client.list_artifacts(self.run_id)}
        for path in files["artifacts"]:
            self._client.log_artifact(self.run_id, str(path))
        for path in files["tables"]:
            if f"{path.stem}.json" not in written:  # log_table would append to it
                self._client.log_table(self.run_id, pd.DataFrame(read_jsonl(path, "train", dict)), f"{path.stem}.json")
        self._client.set_terminated(self.run_id, self.record["status"], end_time=self.record["ended"])

    def _find_or_create(self) -> str:
        """Find the run, and the last step of each of its metrics; if there is none, create it."""
        lock = paths.workspace() / paths.RUN_LOCKS / "mlflow.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=WAIT_SECONDS):  # processes would race to make the database, the experiment and the parent
            self._client = client_of(self.uri)
            self._experiment_id = self._experiment(self.record["experiment"])
            found = self._client.search_runs([self._experiment_id], f"tags.run_key = '{self.record['key']}'")
            run = found[0] if found else self._create()
        run_id = str(run.info.run_id)
        if found:
            self._client.update_run(run_id, "RUNNING")
        for key in run.data.metrics:
            if not key.startswith("system/"):
                self._last[key] = max(metric.step for metric in self._client.get_metric_history(run_id, key))
        params = {_allowed(key): value for key, value in self.record["params"].items()}
        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        self._client.log_batch(run_id, params=missing)
        return run_id

    def _create(self) -> Run:
        state, tags = self.record["study"], {"run_key": self.record["key"]}
        if state is not None:
            tags["mlflow.parentRunId"] = self._parent(state)
        if local_database(self.uri) is None:  # such a file may be passed on
            with suppress(OSError, KeyError):  # in a container the user may have no name
                tags["mlflow.user"] = getpass.getuser()
        return self._client.create_run(self._experiment_id, self.record["started"], tags, self.record["name"])

    def _experiment(self, name: str) -> str:
        found, database = self._client.get_experiment_by_name(name), local_database(self.uri)
        if database is not None:
            bring_artifacts_along(database)
        if found is not None:
            return str(found.experiment_id)
        place = (database.parent / ARTIFACTS / name).as_uri() if database else None
        return str(self._client.create_experiment(name, place, EXPERIMENT_TAGS))

    def _parent(self, state: Mapping[str, Any]) -> str:
        found = self._client.search_runs([self._experiment_id], f"tags.study_key = '{state['key']}'")
        if found:
            return str(found[0].info.run_id)
        tags = state["tags"] | {"study_key": state["key"]}
        run_id = self._client.create_run(self._experiment_id, self.record["started"], tags, state["name"]).info.run_id
        self._client.log_dict(run_id, state["settings"], "study.json")
        self._client.set_terminated(run_id)
        return str(run_id)


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w.\- :/]", "_", name)


def _dataset_input(name: str, digest: str, uri: str, context: str, rows: int) -> DatasetInput:
    dataset = Dataset(name, digest, "local", json.dumps({"uri": uri}), profile=json.dumps({"num_rows": rows}))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


# --------------------------------------------------------------------------------------------------- runs that were kept


def read_kept(folder: Path) -> tuple[dict[str, Any], dict[str, list[Path]]]:
    """Read the folder of a run that MLflow lacks, which may come from elsewhere: the record, and the files by their kind.

    Raises:
        UserError: it is no such folder, it holds something else, such as a link, or a name in it would lead elsewhere.
    """
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder / RECORD}: no such file. Name folders in {paths.UNSENT_METRICS}.")
    own = [path for path in sorted(folder.rglob("*")) if not path.is_symlink()]
    files = {kind: [path for path in own if path.parent == folder / kind and path.is_file()] for kind in KINDS}
    known = {folder / RECORD, *(folder / kind for kind in KINDS), *files["artifacts"], *files["tables"]}.intersection(own)
    if strange := set(folder.rglob("*")) - known:
        raise UserError(f"{min(strange)}: no folder of a run has this. Name folders in {paths.UNSENT_METRICS}.")
    record = read_json(folder / RECORD, made_by="", keys=("experiment", "key", "study"))
    keys = [record["key"], (record["study"] or record)["key"]]  # they become parts of search expressions
    if not all(re.fullmatch(r"\w+", key) for key in keys) or not re.fullmatch(EXPERIMENT, record["experiment"]):
        raise UserError(f"{folder / RECORD}: not what a run of this project recorded")
    return record, files


def import_folders(folders: Iterable[Path], uri: str) -> Iterator[str]:
    """Write kept runs to MLflow, remove the folder of each one that was written, and yield a line on each.

    Raises:
        UserError: MLflow cannot be reached, or some runs could not be written; their folders are kept.
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
        try:
            record, files = read_kept(folder)
            writer = Writer(record, uri)
            writer.finish(files)
            shutil.rmtree(folder)
            yield f"{record['experiment']} {record['name']}: run {writer.run_id}"
        except Exception as error:
            problems.append(f"{folder} is kept: {describe(error)}")
    if problems:
        raise UserError("\n".join(problems))
