"""MLflow runs: what is written while they go on, how they end there, and what happens where MLflow cannot be written."""

from __future__ import annotations

import getpass
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, nullcontext, suppress
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
from mlflow_parts import history, runs_at, unsent, uri_of
from study_parts import ROOT, Grpo, study_named

from grpo.common.errors import ToBeResumed, UserError
from grpo.common.files import read_json, write_json, write_text
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths
from grpo.study.effective import EffectiveRun, digest, effective_run
from grpo.study.schema import Study
from grpo.study.settings import HubModel
from grpo.study.software import hardware, software
from grpo.tracking import mlflow_run, mlflow_study, mlflow_uri
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import flat, source_tags
from grpo.tracking.run_log import RunLog
from grpo.training import run as run_module

PROGRAM = """
import time
from pathlib import Path
from grpo.tracking import mlflow_run
mlflow_run.EVERY_SECONDS = 0.0
run = mlflow_run.MlflowRun("toy", "one", {"a": 1}, {}, key_file=Path("state/key"))
for step in range(5):
    run.log({"x": step / 3}, step=step)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("reached", [True, False])
def test_a_killed_run_goes_on_in_the_same_run(folder: Path, monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    """Whether or not MLflow had heard of it."""
    uri = uri_of(folder)
    place = {"MLFLOW_TRACKING_URI": uri if reached else os.environ["MLFLOW_TRACKING_URI"]}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, env=os.environ | place) as training:
        assert training.stdout is not None and training.stdout.readline()
        training.kill()
    before = [(run.info.run_id, run.info.status) for run in runs_at(uri)[1]]
    assert [status for _, status in before] == ["RUNNING"] * reached and unsent() == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    resumed = MlflowRun("toy", "one", {"a": 1}, {"resumed_after": 3}, key_file=Path("state/key"))
    for step in range(8):
        resumed.log({"x": step / 3}, step=step)
    run_id = resumed.finish()
    client, (found,) = runs_at(uri)
    assert found.info.run_id == run_id and (not reached or before == [(run_id, "RUNNING")])
    assert (found.info.status, found.data.params, found.data.tags["resumed_after"]) == ("FINISHED", {"a": "1"}, "3")
    assert history(client, found, "x") == [(step, step / 3) for step in range(8)]


def test_a_resumed_run_has_each_step_once(delivered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also steps that were taken twice, and where one process resumes several times, as after a lost actor."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 0.0)

    def train(log: RunLog, *steps: int) -> None:
        for step in steps:
            with log.phase("rollout"), log.phase("training"):
                pass
            log.step(step, [{"loss": step / 2}, {"loss": step / 4}], {"train/reward": 0.5}, tokens=8)
            log.validation(step, 2 * step, {"answer_reward": step / 8})

    killed = RunLog(delivered, MlflowRun("toy", "one", {}, {}, key_file=delivered / "key"))
    train(killed, 1, 2)
    state = deepcopy(killed.state())
    train(killed, 3)
    resumed = MlflowRun("toy", "one", {}, {}, key_file=delivered / "key")
    for _ in range(2):
        log = RunLog(delivered, resumed)
        log.restore(deepcopy(state))
        train(log, 3, 4)
    run_id = resumed.finish()
    client, (found,) = runs_at(uri_of(delivered))
    assert (found.info.run_id, found.info.status, found.data.tags["resumed_after"]) == (run_id, "FINISHED", "2")
    losses = [(update, step / part) for step in (1, 2, 3, 4) for update, part in ((2 * step - 1, 2), (2 * step, 4))]
    assert history(client, found, "loss") == losses
    assert history(client, found, "val/answer_reward") == [(2 * step, step / 8) for step in (1, 2, 3, 4)]
    for key in ("time/step_s", "time/rollout_s", "time/training_s", "time/tokens_per_s"):
        assert [update for update, _ in history(client, found, key)] == [2, 4, 6, 8]


REMOVED = """
from pathlib import Path
from grpo.tracking import mlflow_run
mlflow_run.EVERY_SECONDS = 0.0
run = mlflow_run.MlflowRun("toy", "first", {"a": 1}, {})
run.log({"x": 0.5}, step=0)
Path("mlflow.db").unlink()
run.log({"x": 1.5}, step=1)
run.finish()
"""


def test_a_database_that_is_removed_in_mid_run_is_made_anew_with_all_of_the_run(delivered: Path, mlflow_import: Grpo) -> None:
    done = subprocess.run([sys.executable, "-c", REMOVED], capture_output=True, text=True, check=True)
    assert done.stderr.count("warning: ") == 1 and "no such table" in done.stderr
    assert mlflow_import()[0] == 0 and unsent() == []
    client, (found,) = runs_at(uri_of(delivered))
    assert (found.info.status, history(client, found, "x")) == ("FINISHED", [(0, 0.5), (1, 1.5)])


# ------------------------------------------------------------------------------------------------------ which run it was


def a_run(study: Study, experiment: str) -> EffectiveRun:
    return effective_run(study, experiment, next(iter(study.experiments[experiment].arms)), 0, [])


IDENTITY: dict[str, Any] = {"train": "a", "validation": "b", "model": "c", "learner": {"device": "cpu", "processes": 1}}


def test_runs_of_different_studies_can_be_told_apart(delivered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "brave-try")
    monkeypatch.chdir(ROOT)
    studies = {name: study_named(name) for name in ("mini", "math-2xh100")}
    for study in studies.values():
        for experiment in ("grpo_async_offpolicy", "grpo_keyword_inclusion"):
            run_module._mlflow_run(
                study, a_run(study, experiment), IDENTITY, None, delivered / study.study / experiment
            ).finish()
    client = runs_at(uri_of(delivered))[0]
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]

    def found(where: str) -> Any:
        (run,) = client.search_runs(everywhere, f"tags.experiment = 'grpo_async_offpolicy' and {where}")
        return run

    mini = found("tags.task = 'arithmetic' and tags.model_source = 'pretrain' and tags.engine = 'transformers'")
    assert (mini.data.tags["study"], mini.data.tags["learner_device"], mini.data.tags["model"]) == ("mini", "cpu", "model@main")
    large = found("tags.study = 'math-2xh100' and tags.engine = 'vllm' and tags.learner_dtype = 'bfloat16'")
    tags, params = large.data.tags, large.data.params
    hub = studies["math-2xh100"].models["main"]
    assert isinstance(hub, HubModel)
    assert (tags["task"], tags["model"], tags["engine_device"]) == ("math", f"{hub.repo}@{hub.revision}", "cuda:0")
    expected = {"models.main.repo": hub.repo, "engine.name": "vllm", "learner.device": "cuda:1", "tasks.main.use": "math"}
    expected |= {"seed": "0", "evaluation.max_tokens": "1024", "learning_rate": "1e-05", "asynchronous.max_policy_lag": "0"}
    assert expected.items() <= params.items()
    assert (tags["taken_over"], "same_as" in tags) == ("false", False)
    # What MLflow's own columns show, and what the run was made with.
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (tags["mlflow.source.git.commit"], tags["git_commit"], tags["dvc_experiment"]) == (commit, commit, "brave-try")
    assert "mlflow.user" not in tags and getpass.getuser() != large.info.user_id  # a local file names nobody
    assert tags["software.numpy"] == numpy.__version__ and tags["hardware.cores"] == str(os.cpu_count())
    # The keyword task has a model of its own.
    of_words = client.search_runs(everywhere, "tags.experiment = 'grpo_keyword_inclusion'")
    assert {(run.data.tags["task"], run.data.tags["model"]) for run in of_words} == {("keyword", "model@keyword")}
    assert all("models.keyword.vocab_size" in run.data.params and "tasks.main.use" not in run.data.params for run in of_words)


def test_settings_arrive_however_many_they_are_and_whatever_their_names(delivered: Path) -> None:
    params = flat({"a": {"b": dict.fromkeys(map(str, range(150)), 1), "c": None}, "d": [1, {"e": 2}], "f": {}, "no\nname": 1})
    run = MlflowRun("toy", "many", params, dict.fromkeys(map(str, range(120)), 2) | {"no(tag)": 3})
    run.log({"no@name": 1.0, "good": 1.0}, step=0)
    data = runs_at(uri_of(delivered))[0].get_run(run.finish()).data
    assert data.params == {f"a.b.{i}": "1" for i in range(150)} | {"a.c": "None", "d": "[1, {'e': 2}]", "no_name": "1"}
    assert {str(i): "2" for i in range(120)}.items() <= data.tags.items() and data.tags["no_tag_"] == "3"
    assert data.metrics == {"no_name": 1.0, "good": 1.0}


TWIN = "grpo_learning_rate/3e-4/0"
DATA = {"train": 3, "validation": 2}
RESULTS = {
    "history.csv": "step,update,loss,gradient_norm\n1,1,0.5,1.0\n",
    "validation.csv": "step,update,val/answer_reward\n0,0,0.25\n1,1,0.5\n",
    "metrics.json": '{"val/answer_reward": 0.5}',
    "outcomes.jsonl": '{"step": 1, "answer_reward": [1, 0]}\n',
    "rollouts.jsonl": "{}\n",
}


@pytest.fixture
def data(delivered: Path) -> Path:
    """The folder, with the problems that a run works with."""
    for split, rows in DATA.items():
        lines = (f'{{"id": "{split}/{row}", "question": "?", "ground_truth": "1"}}\n' for row in range(rows))
        write_text(paths.DATASETS / "main" / f"{split}.jsonl", "".join(lines))
    return delivered


def test_a_run_that_is_taken_over_is_one_run_that_names_its_equal(data: Path, mini_study: Study) -> None:
    """It has no curves of its own, which would be counted as another training."""
    run = a_run(mini_study, "grpo_baselines")
    identity = IDENTITY | {"software": software(["numpy"]), "config": run.config.model_dump(), "seed": 0}
    for name, content in RESULTS.items():
        write_text(paths.RUNS / TWIN / name, content)
    write_json(paths.run_timing(TWIN), {"mlflow_run_id": "0123456789abcdef"})
    with run_module.recorded(mini_study, run, identity, TWIN) as outputs:
        run_module._take_over(run.name, TWIN, outputs)

    client = runs_at(uri_of(data))[0]
    (found,) = client.search_runs([client.get_experiment_by_name("mini").experiment_id], "tags.experiment = 'grpo_baselines'")
    assert found.data.metrics == {} and found.info.status == "FINISHED"
    tags = found.data.tags
    assert (tags["taken_over"], tags["same_as"], tags["same_as_run_id"]) == ("true", TWIN, "0123456789abcdef")
    assert tags["identity"] == digest(identity) and tags["study"] == "mini"
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["config.yaml"]
    # The results are those of its equal; what was run with is in the run's folder, the machine apart from it.
    assert {name: (paths.RUNS / run.name / name).read_text() for name in RESULTS} == RESULTS
    config = parse_yaml(paths.RUNS / run.name / "config.yaml")
    assert config["software"] == software(["numpy"]) and "hardware" not in config
    timing = read_json(paths.run_timing(run.name), made_by="")
    assert (timing["mlflow_run_id"], timing["same_as"], timing["total_s"]) == (found.info.run_id, TWIN, 0.0)
    assert timing["hardware"] == hardware()


@pytest.mark.parametrize(
    ("error", "status"), [(ToBeResumed("stopped"), "KILLED"), (UserError("a mistake"), "FAILED"), (None, "FINISHED")]
)
def test_a_run_ends_in_mlflow_as_it_ended(error: Exception | None, status: str, data: Path, mini_study: Study) -> None:
    """And its saved state is there until its results are."""
    run = a_run(mini_study, "grpo_baselines")
    states: list[Path] = []

    identity = IDENTITY | {"software": {}, "config": run.config.model_dump(), "seed": 0}
    with (
        pytest.raises(type(error)) if error else nullcontext(),
        run_module.recorded(mini_study, run, identity, None) as outputs,
    ):
        states.append(outputs.state)
        write_text(outputs.state / "step-1/state.pt", "")
        for name, content in RESULTS.items():
            write_text(outputs.results / name, content)
        if error is not None:
            raise error
        outputs.timing["total_s"] = 1.5
    client = runs_at(uri_of(data))[0]
    (found,) = client.search_runs([client.get_experiment_by_name("mini").experiment_id], "tags.experiment = 'grpo_baselines'")
    assert (found.info.status, found.data.tags["taken_over"]) == (status, "false")
    kept = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert kept == (set() if error else {"config.yaml", "metrics.json", "outcomes.jsonl", "rollouts.json"})
    finished = error is None
    assert (paths.RUNS / run.name).exists() == (paths.run_timing(run.name)).exists() == finished
    assert (states[0] / "step-1").exists() == (states[0] / run_module.MLFLOW_KEY).exists() == (not finished)


def test_a_saved_state_is_one_configurations_and_one_codes(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(mini_study, "grpo_baselines")
    before = run_module._state_folder(run, IDENTITY)
    assert before.parent == paths.RUN_STATE / run.name and run_module._state_folder(run, dict(IDENTITY)) == before
    assert run_module._state_folder(run, IDENTITY | {"learner": {"device": "cpu", "processes": 3}}) == before
    other = run_module._state_folder(run, IDENTITY | {"train": "x"})
    monkeypatch.setattr(run_module, "code_of_rooms", lambda: {"grpo/training/step.py": "edited"})
    assert len({before, other, run_module._state_folder(run, IDENTITY)}) == 3


def test_tags_say_the_commit_and_whether_the_code_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)

    def tags() -> dict[str, str]:
        mlflow_study._source_tags.cache_clear()
        return source_tags()

    def git(*args: str) -> str:
        named = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *args]
        return subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()

    assert tags() == {"git_commit": "none", "git_changed": "unknown"}
    assert "mlflow.source.git.commit" not in mlflow_study.mlflow_source_tags()
    git("init", "-q")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch, as if the folder were somebody else's
    assert tags() == {"git_commit": "none", "git_changed": "unknown"}
    assert "git config --global --add safe.directory" in capsys.readouterr().err
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    deciding = ("grpo/study/paths.py", "params.yaml", "dvc.yaml", "constraints.txt")
    for name in (*deciding, "README.md"):
        write_text(tmp_path / name, "before")
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert tags() == {"git_commit": commit, "git_changed": "false"}
    write_text(tmp_path / "README.md", "decides nothing")
    write_text(tmp_path / "notes.txt", "not tracked")
    assert tags() == {"git_commit": commit, "git_changed": "false"}
    (tmp_path / "quickstart").mkdir()
    for name in deciding:
        write_text(tmp_path / name, "after")
        assert tags() == {"git_commit": commit, "git_changed": "true"}, name
        monkeypatch.chdir("quickstart")  # where `grpo quickstart` works
        assert tags() == {"git_commit": commit, "git_changed": "true"}, name
        monkeypatch.chdir(tmp_path)
        git("checkout", "-q", name)


# ------------------------------------------------------------------------------------------------ MLflow cannot be written


def test_a_run_without_its_server_goes_on_and_is_imported_as_if_nothing_had_been(
    folder: Path, mlflow_import: Grpo, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time() * 1000
    run = MlflowRun("toy", "a name/with a slash", {"a": 1}, {"stage": "toy@x"})
    for step in range(1200):  # more than one call of MLflow takes
        run.log({"third": step / 3, "gap": {7: math.nan, 8: math.inf}.get(step, 1.0)}, step=step)
    (folder / "note.txt").write_text("kept")
    run.artifact(folder / "note.txt")
    run.tag(checkpoint_digest="abc")
    assert run.finish("FAILED") is None
    ended = time.time() * 1000
    (folder / "note.txt").unlink()  # its copy is imported
    warning = capsys.readouterr().err
    assert "MLflow at http://127.0.0.1:" in warning and "Connection refused" in warning
    assert f"grpo mlflow_import {folder}/data/state/mlflow/*\n" in warning and len(unsent()) == 1

    code, out, told = mlflow_import()
    client, (found,) = runs_at(uri_of(folder))
    assert (code, out, told) == (0, f"toy a name/with a slash: run {found.info.run_id}\n", "")
    assert unsent() == []
    assert (found.info.run_name, found.info.status, found.data.params) == ("a name/with a slash", "FAILED", {"a": "1"})
    assert began - 1 <= found.info.start_time <= found.info.end_time <= ended + 1
    assert {"stage": "toy@x", "checkpoint_digest": "abc"}.items() <= found.data.tags.items()
    assert history(client, found, "third") == [(step, step / 3) for step in range(1200)]
    gaps = history(client, found, "gap")
    assert len(gaps) == 1200 and [step for step, value in gaps if math.isnan(value)] == [7] and gaps[8][1] > 1e308
    assert all(began - 1 <= metric.timestamp <= ended for metric in client.get_metric_history(found.info.run_id, "third"))
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["note.txt"]


def test_an_import_that_fails_keeps_the_folders(folder: Path, mlflow_import: Grpo) -> None:
    MlflowRun("toy", "one", {}, {}).finish()
    kept = unsent()
    code, out, err = mlflow_import(uri=os.environ["MLFLOW_TRACKING_URI"])
    assert (code, out, unsent()) == (2, "", kept)
    assert err.startswith("error: MLflow at http://127.0.0.1:") and "All folders are kept" in err
    cut = shutil.copytree(kept[0], folder / "cut")
    os.truncate(cut / "run.json", 40)
    code, out, err = mlflow_import(folder / "nowhere", cut, *kept)
    assert code == 2 and out.startswith("toy one: run ") and unsent() == []
    assert f"{folder / 'nowhere/run.json'}: no such file. Name folders in data/state/mlflow." in err
    assert f"{cut} is kept: " in err and "damaged" in err and cut.exists()
    assert mlflow_import()[:2] == (0, "nothing to import: data/state/mlflow is empty\n")


@pytest.mark.parametrize("fault", ["damaged", "locked", "refused by a server", "a silent server"])
def test_a_database_that_cannot_be_opened_costs_one_warning_and_little_time(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mlflow_import: Grpo
) -> None:
    """One attempt at the beginning and one at the end. MLflow alone would wait 100 s for each."""
    bad = folder / "bad/mlflow.db"
    bad.parent.mkdir()
    uri = f"sqlite:///{bad}"
    monkeypatch.setattr(mlflow_uri, "LOCKED_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with ExitStack() as stack:
        if fault == "damaged":
            bad.write_bytes(b"no database" * 1000)
        elif fault == "locked":
            shutil.copy(folder / "mlflow.db", bad)
            stack.enter_context(closing(sqlite3.connect(bad))).execute("BEGIN EXCLUSIVE")
        else:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            uri = f"http://127.0.0.1:{server.getsockname()[1]}"
            if fault == "refused by a server":
                answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
                threading.Thread(target=answer_all, args=(server, answer), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        began = time.monotonic()
        run = MlflowRun("toy", "one", {"a": 1}, {})
        for step in range(3):
            run.log({"x": float(step)}, step=step)
        assert run.finish() is None
        assert time.monotonic() - began < 10
        warning = capsys.readouterr().err
    assert warning.count("warning: ") == 1 and f"grpo mlflow_import {run.folder.parent}/*" in warning
    assert mlflow_import()[0] == 0 and unsent() == []
    client, (found,) = runs_at(uri_of(folder))
    assert history(client, found, "x") == [(0, 0.0), (1, 1.0), (2, 2.0)] and found.info.status == "FINISHED"


def answer_all(server: socket.socket, answer: bytes = b"", asked: list[float] | None = None) -> None:
    """Answer each request with this, or hang up; note when each came."""
    with suppress(OSError):
        while True:
            with server.accept()[0] as connection:
                if asked is not None:
                    asked.append(time.monotonic())
                if answer:
                    connection.recv(65536)
                    connection.sendall(answer)


def test_a_server_that_is_away_is_asked_ever_more_rarely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(mlflow_run, "PAUSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_all, args=(server, b"", asked), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        run = MlflowRun("toy", "one", {}, {})
        for step in range(300):
            run.log({"x": 0.0}, step=step)
            time.sleep(0.01)
        server.shutdown(socket.SHUT_RDWR)
    pauses = [after - before for before, after in pairwise(asked)]
    assert len(pauses) >= 3 and all(pause >= 0.2 * 2**n for n, pause in enumerate(pauses))


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:pa5w0rd@{}",
        "http://me:pa5?w0rd@{}",
        "http://pa5w0rd@{}",
        "http://me:pa5@w0rd@{}",
        "http://me:pa5/w0rd@{}",
        "http://me:pa5 w0rd@{}",
        "http://{}/#pa5w0rd",
        "postgresql://me:pa5w0rd@{}/db?password=pa5w0rd",
    ],
)
def test_a_password_is_written_nowhere(
    uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mlflow_import: Grpo
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_all, args=(server,), daemon=True).start()
        uri = uri.format(f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setattr(sys, "argv", ["grpo", "run", "--task", uri])
        assert MlflowRun("toy", "one", {}, {}).finish() is None
        warning = capsys.readouterr().err
        told = mlflow_import(uri=uri)[2]
        server.shutdown(socket.SHUT_RDWR)
    assert warning.startswith("warning: MLflow at ") and told.startswith("error: MLflow at")
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".db"]
    for text in (warning, told, *(file.read_text() for file in files)):
        assert "pa5" not in text and "w0rd" not in text
    assert any(file.name == "run.json" for file in files)


# ----------------------------------------------------------------------------------------------------- folders from elsewhere


@pytest.mark.parametrize(
    "odd",
    [
        {"experiment": "../../outside"},
        {"key": "x' OR '1' = '1"},
        {"study": {"key": "' OR '", "name": "n", "tags": {}, "settings": {}}},
        "artifacts/link",
        "artifacts",
        "thesis.txt",
    ],
    ids=str,
)
def test_a_folder_from_elsewhere_sends_and_removes_no_other_file(
    odd: dict[str, Any] | str, folder: Path, mlflow_import: Grpo
) -> None:
    """Nor does it write elsewhere."""
    outside = folder / "outside"
    write_text(outside / "secret.txt", "mine")
    run = MlflowRun("toy", "one", {}, {})
    run.finish()
    if isinstance(odd, dict):
        write_json(run.folder / "run.json", read_json(run.folder / "run.json", made_by="") | odd)
    elif odd == "thesis.txt":
        write_text(run.folder / odd, "mine")
    else:
        with suppress(FileNotFoundError):
            (run.folder / odd).rmdir()
        (run.folder / odd).symlink_to(outside if odd == "artifacts" else outside / "secret.txt")
    before = {path for path in folder.rglob("*") if "locks" not in path.parts}
    code, _, err = mlflow_import(run.folder)
    assert code == 2 and err.startswith("error: ")
    assert {path for path in folder.rglob("*") if "locks" not in path.parts} == before and runs_at(uri_of(folder))[1] == []
