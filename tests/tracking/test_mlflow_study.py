"""What of a study is in MLflow: parents and children, data, rollouts; and `make ui`."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow_parts import free_port, runs_at, uri_of

from grpo.common.files import write_text
from grpo.study.schema import Study
from grpo.tracking import mlflow_study
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_state

REPOSITORY = Path(__file__).parents[2]
STATE = {"key": "k", "name": "study toy", "tags": {"study": "toy", "params_digest": "d"}, "settings": {"seeds": [0]}}


# ---------------------------------------------------------------------------------------------------- parents and children


def test_runs_of_a_state_have_one_parent(folder: Path) -> None:
    for number, state in enumerate((STATE, STATE, STATE | {"key": "other"})):
        MlflowRun("toy", f"e/{number}", {}, {"experiment": "e"}, state).finish()
    client, runs = runs_at(uri_of(folder))
    parents = {run.data.tags["study_key"]: run for run in runs if "study_key" in run.data.tags}
    assert len(runs) == 5 and parents.keys() == {"k", "other"}
    children = Counter(run.data.tags["mlflow.parentRunId"] for run in runs if "study_key" not in run.data.tags)
    assert children == {parents["k"].info.run_id: 2, parents["other"].info.run_id: 1}
    parent = parents["k"].info
    assert (parent.run_name, parent.status) == ("study toy", "FINISHED")
    (settings,) = client.list_artifacts(parent.run_id)
    assert json.loads(Path(client.download_artifacts(parent.run_id, settings.path)).read_text()) == {"seeds": [0]}


def test_a_state_is_the_values_and_the_commit(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"git_commit": "a" * 40, "git_changed": "false"}
    monkeypatch.setattr(mlflow_study, "source_tags", lambda: source)
    first = study_state(mini_study)
    assert study_state(mini_study.model_copy()) == first
    assert first["name"] == f"study mini {first['tags']['params_digest'][:6]} at commit aaaaaaaa"
    others = [study_state(mini_study.model_copy(update={"seeds": [7]}))]
    for changed in ({"git_commit": "b" * 40}, {"git_changed": "true"}):
        monkeypatch.setattr(mlflow_study, "source_tags", lambda changed=changed: source | changed)
        others.append(study_state(mini_study))
    assert len({first["key"], *(other["key"] for other in others)}) == 4
    assert others[0]["settings"]["seeds"] == [7] and others[2]["name"].endswith(" + changes")


# ------------------------------------------------------------------------------------------------------ data and rollouts


def write_lines(name: str, records: list[dict[str, Any]]) -> Path:
    write_text(Path(name), "".join(json.dumps(record) + "\n" for record in records))
    return Path(name)


def test_datasets_are_inputs_and_rollouts_a_table(folder: Path) -> None:
    """As MLflow itself reads one, beside the database. A resumed run has the datasets once."""
    train = write_lines("data/dataset/main/train.jsonl", [{"id": str(i), "question": "?"} for i in range(3)])
    validation = write_lines("data/dataset/main/validation.jsonl", [{"id": "v"}])
    for _ in range(2):
        run = MlflowRun("toy", "e/a-0", {"seed": 0}, {}, id_file=folder / "id")
        run.dataset(train, "digest-of-train", "training")
        run.dataset(validation, "digest-of-validation", "validation")
    rollouts: list[dict[str, Any]] = [{"step": 0, "response": "five"}, {"step": 2, "reward": 1.0}]
    run.table(write_lines("data/runs/e/a-0/rollouts.jsonl", rollouts))
    run.finish()

    client, (found,) = runs_at(uri_of(folder))
    inputs = {}
    for each in found.inputs.dataset_inputs:
        about, (tag,) = each.dataset, each.tags
        inputs[tag.value] = (about.name, about.digest, json.loads(about.profile), json.loads(about.source))
    assert len(found.inputs.dataset_inputs) == 2
    assert inputs == {
        split: (f"dataset/main/{name}", f"digest-of-{name}", {"num_rows": rows}, {"uri": f"data/dataset/main/{name}.jsonl"})
        for split, name, rows in (("training", "train", 3), ("validation", "validation", 1))
    }
    assert found.info.artifact_uri.startswith((folder / "mlruns/toy").as_uri())
    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        table = client.load_table(found.info.experiment_id, "rollouts.json")
    finally:
        mlflow.set_tracking_uri("")
    assert list(table) == ["step", "response", "reward"]
    assert table["step"].tolist() == [0, 2] and table["response"].tolist()[0] == "five" and table["reward"].tolist()[1] == 1.0


# ------------------------------------------------------------------------------------------------------------ `make ui`


def ui(**env: str) -> tuple[int, str]:
    """`make ui` where it cannot start: exit code and what it says."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "workflow/mlflow_ui.py"], env=os.environ | env, text=True, capture_output=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_the_ui_says_that_its_server_is_away(folder: Path) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    code, said = ui(MLFLOW_TRACKING_URI=uri)
    assert code == 2 and said.startswith(f"error: MLflow at {uri}: ")
    assert "Check the server and MLFLOW_TRACKING_URI" in said and said.count("\n") <= 3


def test_the_ui_takes_a_free_port(folder: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = str(stranger.getsockname()[1])
        code, said = ui(MLFLOW_TRACKING_URI=uri_of(folder), MLFLOW_PORT=taken)
        assert (
            code == 2
            and said == f"error: MLFLOW_PORT: another program uses port {taken}. Choose another: MLFLOW_PORT=5001 make ui\n"
        )
        assert ui(MLFLOW_TRACKING_URI=uri_of(folder), MLFLOW_PORT="http")[1].startswith("error: MLFLOW_PORT: http is not")
        free_port = runpy.run_path(str(REPOSITORY / "workflow/mlflow_ui.py"))["free_port"]
        free_port.__globals__["PORTS"] = [int(taken), 1]
        assert free_port(None) == 1


def test_links_open_the_training_view_of_each_study(folder: Path) -> None:
    MlflowRun("toy", "e/a-0", {}, {}, STATE).finish()
    links = runpy.run_path(str(REPOSITORY / "workflow/mlflow_ui.py"))["links"](uri_of(folder), "http://127.0.0.1:5000/")
    _, runs = runs_at(uri_of(folder))
    page = f"http://127.0.0.1:5000/#/experiments/{runs[0].info.experiment_id}/runs?"
    assert len(links) == 2 and all(line.partition(": ")[2].startswith(page) for line in links)
    asked = parse_qs(links[0].partition("?")[2])
    assert asked == {"workflowType": ["machine_learning"], "orderByKey": ["tags.`mlflow.runName`"], "orderByAsc": ["true"]}


def test_the_ui_is_this_machines_whatever_is_set_for_a_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of MLflow's protections is off, and an experiment's name commands no terminal."""
    for name in ("SERVER_DISABLE_SECURITY_MIDDLEWARE", "SERVER_ALLOWED_HOSTS", "UVICORN_OPTS"):
        monkeypatch.setenv(f"MLFLOW_{name}", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(folder))
    MlflowClient(uri_of(folder)).create_experiment("evil \x1b]52;c;cHduZWQ=\x07")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execvp", lambda *_: started.append(dict(os.environ)))
    runpy.run_path(str(REPOSITORY / "workflow/mlflow_ui.py"))["main"]()
    said = capsys.readouterr().out
    assert "evil \ufffd]52" in said and "\x1b" not in said
    assert {name for name in started[0] if name.startswith("MLFLOW_")} == {
        *("MLFLOW_BACKEND_STORE_URI", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION")
    }
