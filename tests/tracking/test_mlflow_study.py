"""What of a study is in MLflow: parents and children, data, the machine, rollouts, TRL's names."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from mlflow.tracking import MlflowClient
from mlflow_parts import runs_at, unsent, uri_of

from grpo.common.files import dvc_hash, write_text
from grpo.common.metrics import TRL_NAMES
from grpo.study.schema import Study
from grpo.tracking import mlflow_study
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_state
from grpo.tracking.mlflow_writer import import_folders

REPOSITORY = Path(__file__).parents[2]
STATE = {"key": "k", "name": "study toy", "tags": {"study": "toy", "params_digest": "d"}, "settings": {"seeds": [0]}}


# ---------------------------------------------------------------------------------------------------- parents and children


def test_several_processes_make_one_parent_of_a_state(folder: Path) -> None:
    for number, state in enumerate((STATE, STATE, STATE | {"key": "other"})):
        MlflowRun("toy", f"e/{number}", {}, {"experiment": "e"}, state).finish()
    program = "import sys; from pathlib import Path; from grpo.tracking.mlflow_writer import import_folders as go;"
    program += " print(*go([Path(sys.argv[1])], sys.argv[2]))"
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen([*command, str(one), uri_of(folder)], stdout=subprocess.DEVNULL) for one in unsent()]
    assert [process.wait(timeout=120) for process in started] == [0] * 3
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


# ------------------------------------------------------------------------------------------------------ all of a run, twice


def finish_a_whole_run() -> None:
    """With all that a run of a study has, in the working folder."""
    train = write_lines("data/dataset/main/train.jsonl", [{"id": str(i), "question": "?"} for i in range(3)])
    validation = write_lines("data/dataset/main/validation.jsonl", [{"id": "v"}])
    run = MlflowRun("toy", "e/a-0", {"seed": 0}, {"experiment": "e"}, STATE)
    run.dataset(train, "digest-of-train", "training")
    run.dataset(validation, "digest-of-validation", "validation")
    for step in (1, 2):
        run.log({"train/reward": step / 4, "gradient_norm": 2.0}, step=step)
        run.log({"val/answer_reward": step / 8, "val/reward": step / 8}, step=step)
    rollouts: list[dict[str, Any]] = [{"step": 0, "response": "five"}, {"step": 2, "reward": 1.0}]
    run.table(write_lines("data/runs/e/a-0/rollouts.jsonl", rollouts))
    run.finish()


def write_lines(name: str, records: list[dict[str, Any]]) -> Path:
    write_text(Path(name), "".join(json.dumps(record) + "\n" for record in records))
    return Path(name)


@pytest.fixture
def sent_twice(folder: Path) -> tuple[MlflowClient, Any]:
    """A whole run, imported twice."""
    finish_a_whole_run()
    (left,) = unsent()
    copy = shutil.copytree(left, folder / "copy")
    assert len([*import_folders([left, copy], uri_of(folder))]) == 2
    client, runs = runs_at(uri_of(folder))
    (run,) = [run for run in runs if "study_key" not in run.data.tags]
    assert len(runs) == 2
    return client, run


def test_datasets_are_inputs(sent_twice: tuple[MlflowClient, Any]) -> None:
    found = {}
    for each in sent_twice[1].inputs.dataset_inputs:
        about, (tag,) = each.dataset, each.tags
        found[tag.value] = (about.name, about.digest, json.loads(about.profile), json.loads(about.source))
    expected = {
        split: (f"dataset/main/{name}", f"digest-of-{name}", {"num_rows": rows}, {"uri": f"data/dataset/main/{name}.jsonl"})
        for split, name, rows in (("training", "train", 3), ("validation", "validation", 1))
    }
    assert found == expected


def test_rollouts_are_a_table(sent_twice: tuple[MlflowClient, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLflow itself reads one."""
    client, run = sent_twice
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    import mlflow

    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        table = client.load_table(run.info.experiment_id, "rollouts.json")
    finally:
        mlflow.set_tracking_uri("")
    assert list(table) == ["step", "response", "reward"]
    assert table["step"].tolist() == [0, 2] and table["response"].tolist()[0] == "five" and table["reward"].tolist()[1] == 1.0


def test_metrics_are_there_under_trls_names_too(sent_twice: tuple[MlflowClient, Any]) -> None:
    client, run = sent_twice
    for own, other in (("train/reward", "reward"), ("gradient_norm", "grad_norm"), ("val/reward", "eval_reward")):
        first, second = (client.get_metric_history(run.info.run_id, key) for key in (own, other))
        assert len(first) == 2
        assert [(m.step, m.value, m.timestamp) for m in first] == [(m.step, m.value, m.timestamp) for m in second]


@pytest.mark.parametrize(("loss_type", "same"), [("grpo_clip", True), ("gspo", False), ("cispo", False), ("mine:loss", False)])
def test_clipped_tokens_have_trls_name_where_trl_counts_the_same(delivered: Path, loss_type: str, same: bool) -> None:
    run = MlflowRun("toy", "one", {"loss_type": loss_type}, {})
    run.log({"clip_fraction": 0.25}, step=1)
    run.finish()
    (found,) = [each.data.metrics for each in runs_at(uri_of(delivered))[1] if "clip_fraction" in each.data.metrics]
    assert found.get("clip_ratio/region_mean") == (0.25 if same else None)


def test_the_hash_is_dvcs(workdir: Path) -> None:
    for name in ("best/metadata.json", "best/model.safetensors"):
        write_text(Path("kept") / name, name)
    write_text(Path("kept/best-of-all.json"), "ä\r\n")  # sorted by DVC as a path: before or after best/
    write_text(Path("kept/a b.txt"), "")
    dvc = str(Path(sys.executable).with_name("dvc"))
    for command in (["init", "--no-scm", "-q"], ["add", "-q", "kept"]):
        subprocess.run([dvc, *command], check=True, env=os.environ | {"DVC_NO_ANALYTICS": "1"})
    assert f"md5: {dvc_hash(Path('kept'))}" in Path("kept.dvc").read_text()


# ---------------------------------------------------------------------------------------------------------- names and links


def test_the_page_has_the_names_of_trl() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", (REPOSITORY / "docs/tracking.md").read_text(), flags=re.M)
    assert dict(rows) == TRL_NAMES


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_artifacts_go_along_with_their_clone(delivered: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """MLflow keeps absolute places. Those of a copy are its own."""

    def run_with_artifact(name: str) -> None:
        (Path.cwd() / f"{name}.txt").write_text(name)
        run = MlflowRun("toy", name, {}, {}, STATE)
        run.artifact(Path.cwd() / f"{name}.txt")
        assert run.finish()

    def artifacts(folder: Path) -> dict[str, str]:
        client, runs = runs_at(uri_of(folder))
        children = [run for run in runs if run.info.run_name != "study toy"]
        assert all(run.info.artifact_uri.startswith((folder / "mlruns/toy").as_uri()) for run in runs)
        return {
            run.info.run_name: Path(client.download_artifacts(run.info.run_id, f"{run.info.run_name}.txt")).read_text()
            for run in children
        }

    home = delivered / "the clone's"
    home.mkdir()
    (delivered / "mlflow.db").rename(home / "mlflow.db")
    for folder, name in ((home, "first"), (delivered / "50% new", "second")):
        if folder != home:
            (home.rename if how == "moved" else partial(shutil.copytree, home))(folder)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(folder))
        run_with_artifact(name)
    assert artifacts(delivered / "50% new") == {"first": "first", "second": "second"}
    assert home.exists() == (how == "copied")
    assert how == "moved" or artifacts(home) == {"first": "first"}


def ui(**env: str) -> tuple[int, str, float]:
    """`make ui` where it cannot start: exit code, what it says, and its seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, REPOSITORY / "workflow/mlflow_ui.py"], env=os.environ | env, text=True, capture_output=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def test_the_ui_says_at_once_that_its_server_is_away(folder: Path) -> None:
    with socket.socket() as silent:  # connects, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for uri in (os.environ["MLFLOW_TRACKING_URI"], f"http://127.0.0.1:{silent.getsockname()[1]}"):
            code, said, seconds = ui(MLFLOW_TRACKING_URI=uri)
            assert code == 2 and said.startswith(f"error: MLflow at {uri} cannot be read: ")
            assert (
                "Check the server and MLFLOW_TRACKING_URI" in said and said.count("\n") <= 3 and seconds < 30
            )  # 10, and its imports


def test_the_ui_takes_a_free_port(folder: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = str(stranger.getsockname()[1])
        code, said, _ = ui(MLFLOW_TRACKING_URI=uri_of(folder), MLFLOW_PORT=taken)
        assert (
            code == 2
            and said == f"error: MLFLOW_PORT: another program uses port {taken}. Choose another: MLFLOW_PORT=5001 make ui\n"
        )
        assert ui(MLFLOW_TRACKING_URI=uri_of(folder), MLFLOW_PORT="http")[1].startswith("error: MLFLOW_PORT: http is not")
        free_port = runpy.run_path(str(REPOSITORY / "workflow/mlflow_ui.py"))["free_port"]
        free_port.__globals__["PORTS"] = [int(taken), 1]
        assert free_port(None) == 1


def test_links_open_the_training_view_of_each_study(delivered: Path) -> None:
    MlflowRun("toy", "e/a-0", {}, {}, STATE).finish()
    links = runpy.run_path(str(REPOSITORY / "workflow/mlflow_ui.py"))["links"](uri_of(delivered), "http://127.0.0.1:5000/")
    _, runs = runs_at(uri_of(delivered))
    page = f"http://127.0.0.1:5000/#/experiments/{runs[0].info.experiment_id}/runs?"
    assert len(links) == 2 and all(line.partition(": ")[2].startswith(page) for line in links)
    asked = parse_qs(links[0].partition("?")[2])
    assert asked == {"workflowType": ["machine_learning"], "orderByKey": ["tags.`mlflow.runName`"], "orderByAsc": ["true"]}
