"""MLflow runs: what is written while they go on, how they end, where MLflow cannot be written; and the study that they show."""

import getpass
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import mlflow
import numpy
import pytest
from mlflow import MlflowClient
from report_parts import run as made_up
from report_parts import store, study_of
from study_parts import ROOT, study_named
from waiting import wait_for

from grpo.common.errors import ToBeResumed, UserError
from grpo.common.files import files_digest, read_json, write_json, write_text
from grpo.common.yaml_file import parse_yaml
from grpo.reporting.mlflow_arms import record_arms
from grpo.study import paths
from grpo.study.config import HubModel, LocalModel
from grpo.study.effective import EffectiveRun, digest, effective_run
from grpo.study.schema import Study
from grpo.study.software import hardware, software
from grpo.tracking import mlflow_run, mlflow_study
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import flat, source_tags, study_state, study_tags
from grpo.tracking.mlflow_uri import NOWHERE, local_database, tracking_uri
from grpo.tracking.run_log import RunLog
from grpo.training import run as run_module


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def runs_at(uri: str) -> tuple[MlflowClient, list[Any]]:
    """A client, and the runs of the experiment `toy`."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("toy")
    return client, list(client.search_runs([experiment.experiment_id])) if experiment else []


def history(client: MlflowClient, run: Any, key: str) -> list[tuple[int, float]]:
    """(step, value), in their order."""
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """A tracking server on a port of its own."""

    def __init__(self, folder: Path):
        self.port, self._folder, self.log = free_port(), folder, folder / "server.log"
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = ["--backend-store-uri", "sqlite:///server.db", "--artifacts-destination", "artifacts"]
        command = [Path(sys.executable).with_name("mlflow"), "server", "--port", str(self.port), *store]
        # Each of its workers, four where nothing else is said, imports MLflow for itself.
        env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_WORKERS": "1"} | os.environ
        with self.log.open("ab") as log:
            how = {"cwd": self._folder, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
            self._process = subprocess.Popen(command, **how)
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        """End it with all its processes, at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database with MLflow's tables, whose making takes seconds."""
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def folder(workdir: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    """A working folder whose runs go to its database."""
    shutil.copy(empty_database, workdir / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(workdir))
    return workdir


@pytest.mark.parametrize("killed", [True, False])
def test_a_resumed_run_has_each_step_once(folder: Path, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """Also steps that were taken twice, and where one process resumes several times, as after a lost actor."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 0.0)

    def train(log: RunLog, *steps: int) -> None:
        for step in steps:
            with log.phase("rollout"), log.phase("training"):
                pass
            log.step(step, [{"loss": step / 2}, {"loss": step / 4}], {"train/reward": 0.5}, tokens=8)
            log.validation(step, 2 * step, {"answer_reward": step / 8})

    first = MlflowRun("toy", "one", {"a": 1}, {}, id_file=folder / "id")
    log = RunLog(folder, first)
    train(log, 1, 2)
    state = deepcopy(log.state())
    train(log, 3)
    if not killed:
        first.finish("KILLED")
    resumed = MlflowRun("toy", "one", {"a": 2, "b": 3}, {}, id_file=folder / "id")
    assert runs_at(uri_of(folder))[1][0].info.status == "RUNNING"
    for _ in range(2):
        log = RunLog(folder, resumed)
        log.restore(deepcopy(state))
        train(log, 3, 4)
    assert resumed.finish() == first.run_id
    client, (found,) = runs_at(uri_of(folder))
    assert (found.info.run_id, found.info.status, found.data.tags["resumed_after"]) == (first.run_id, "FINISHED", "2")
    assert found.data.params == {"a": "1", "b": "3"}  # MLflow changes no parameter
    losses = [(update, step / part) for step in (1, 2, 3, 4) for update, part in ((2 * step - 1, 2), (2 * step, 4))]
    assert history(client, found, "loss") == losses
    assert history(client, found, "val/answer_reward") == [(2 * step, step / 8) for step in (1, 2, 3, 4)]
    for key in ("time/step_s", "time/rollout_s", "time/training_s", "time/tokens_per_s"):
        assert [update for update, _ in history(client, found, key)] == [2, 4, 6, 8]


def test_a_run_that_mlflow_does_not_have_is_resumed_as_a_new_one(folder: Path) -> None:
    """As where the address of MLflow was changed meanwhile."""
    write_text(folder / "id", "0123456789abcdef")
    run_id = MlflowRun("toy", "one", {}, {}, id_file=folder / "id").finish()
    assert run_id == (folder / "id").read_text() == runs_at(uri_of(folder))[1][0].info.run_id


def a_run(study: Study, experiment: str) -> EffectiveRun:
    return effective_run(study, experiment, next(iter(study.experiments[experiment].arms)), 0, [])


IDENTITY: dict[str, Any] = {"train": "a", "validation": "b", "model": "c", "learner": {"device": "cpu", "processes": 1}}


def test_runs_of_different_studies_can_be_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "brave-try")
    monkeypatch.chdir(ROOT)
    studies = {name: study_named(name) for name in ("mini", "math-2xh100")}
    for study in studies.values():
        for experiment in ("grpo_async_offpolicy", "grpo_keyword_inclusion"):
            run_module._mlflow_run(study, a_run(study, experiment), IDENTITY, None, folder / study.study / experiment).finish()
    client = runs_at(uri_of(folder))[0]
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


def test_settings_arrive_however_many_they_are_and_whatever_their_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first metrics are written at once, and what is logged soon after them at the end."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 600.0)
    params = flat({"a": {"b": dict.fromkeys(map(str, range(150)), 1), "c": None}, "d": [1, {"e": 2}], "f": {}, "no\nname": 1})
    run = MlflowRun("toy", "many", params, dict.fromkeys(map(str, range(120)), 2) | {"no(tag)": 3})
    run.log({"no@name": 1.0, "good": 1.0}, step=0)
    run.log({"good": 2.0, "late": 3.0}, step=1)
    assert runs_at(uri_of(folder))[1][0].data.metrics == {"no_name": 1.0, "good": 1.0}
    data = runs_at(uri_of(folder))[0].get_run(run.finish()).data
    assert data.params == {f"a.b.{i}": "1" for i in range(150)} | {"a.c": "None", "d": "[1, {'e': 2}]", "no_name": "1"}
    assert {str(i): "2" for i in range(120)}.items() <= data.tags.items() and data.tags["no_tag_"] == "3"
    assert data.metrics == {"no_name": 1.0, "good": 2.0, "late": 3.0}


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
def data(folder: Path) -> Path:
    """The folder, with the problems that a run works with."""
    for split, rows in DATA.items():
        lines = (f'{{"id": "{split}/{row}", "question": "?", "ground_truth": "1"}}\n' for row in range(rows))
        write_text(paths.DATASETS / "main" / f"{split}.jsonl", "".join(lines))
    return folder


def test_a_run_that_is_taken_over_is_one_run_that_names_its_equal(data: Path, mini_study: Study) -> None:
    """It has no curves of its own, which would be counted as another training."""
    run = a_run(mini_study, "grpo_baselines")
    identity = IDENTITY | {"software": software(["numpy"]), "config": run.config.model_dump(), "seed": 0}
    for name, content in RESULTS.items():
        write_text(paths.RUNS / TWIN / name, content)
    write_json(paths.run_timing(TWIN), {"mlflow_run_id": "0123456789abcdef"})
    with run_module.recorded_run(mini_study, run, identity, TWIN) as outputs:
        run_module._take_over(run.name, TWIN, outputs)

    client = runs_at(uri_of(data))[0]
    (found,) = client.search_runs([client.get_experiment_by_name("mini").experiment_id], "tags.experiment = 'grpo_baselines'")
    assert found.data.metrics == {} and found.info.status == "FINISHED"
    tags = found.data.tags
    assert (tags["taken_over"], tags["same_as"], tags["same_as_run_id"]) == ("true", TWIN, "0123456789abcdef")
    assert tags["identity"] == digest(identity) and tags["study"] == "mini"
    read = [(of.dataset.name, of.dataset.digest, of.tags[0].value) for of in found.inputs.dataset_inputs]
    assert sorted(read) == [("data/dataset/main/train", "a", "training"), ("data/dataset/main/validation", "b", "validation")]
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["config.yaml"]
    # What was run with is in the run's folder, the machine apart from it.
    config, timing = parse_yaml(paths.RUNS / run.name / "config.yaml"), read_json(paths.run_timing(run.name), made_by="")
    assert config["software"] == software(["numpy"]) and "hardware" not in config and timing["hardware"] == hardware()
    assert (timing["mlflow_run_id"], timing["same_as"], timing["total_s"]) == (found.info.run_id, TWIN, 0.0)
    write_json(paths.run_timing(TWIN), {"mlflow_run_id": None})
    again = run_module._mlflow_run(mini_study, run, identity, TWIN, data / "id")
    assert (again.tags["same_as_run_id"], again.finish() is None, (data / "id").exists()) == ("not tracked", False, False)


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
        run_module.recorded_run(mini_study, run, identity, None) as outputs,
    ):
        states.append(outputs.state)
        write_text(outputs.state / "step-1/state.pt", "")
        write_text(outputs.state.with_name("of other settings") / "step-9/state.pt", "")
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
    assert states[0].with_name("of other settings").exists() == (not finished)
    digest_of_weights = files_digest(paths.CHECKPOINTS / run.name) if finished else None
    assert found.data.tags.get("checkpoint_digest") == digest_of_weights
    assert (states[0] / "step-1").exists() == (states[0] / run_module.MLFLOW_ID).exists() == (not finished)


def test_a_saved_state_is_one_configurations_and_one_codes(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(mini_study, "grpo_baselines")
    before = run_module._state_folder(run, IDENTITY)
    assert before.parent == paths.RUN_STATE / run.name and run_module._state_folder(run, dict(IDENTITY)) == before
    assert run_module._state_folder(run, IDENTITY | {"learner": {"device": "cpu", "processes": 3}}) == before
    other = run_module._state_folder(run, IDENTITY | {"train": "x"})
    monkeypatch.setattr(run_module, "code_of_rooms", lambda: {"grpo/training/step.py": "edited"})
    assert len({before, other, run_module._state_folder(run, IDENTITY)}) == 3


def test_tags_say_the_commit_and_whether_the_code_was_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)

    def tags() -> dict[str, str]:
        mlflow_study._source_tags.cache_clear()
        return source_tags()

    def git(*args: str) -> str:
        named = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *args]
        return subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()

    assert tags() == {"git_commit": "none", "git_changed": "unknown"}
    monkeypatch.setattr(sys, "argv", ["/somewhere/grpo/__main__.py", "run", "a b"])
    tags_of_run = mlflow_study.mlflow_source_tags()
    assert "mlflow.source.git.commit" not in tags_of_run and tags_of_run["mlflow.source.name"] == "grpo run 'a b'"
    git("init", "-q")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch, as if the folder were somebody else's
    assert tags() == {"git_commit": "none", "git_changed": "unknown"}
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


@pytest.fixture
def hangs_up() -> Iterator[str]:
    """Host and port of a server that answers nothing."""

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    connection.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("fault", ["no server", "no answer", "damaged", "removed"])
def test_a_failure_of_mlflow_costs_one_warning_and_little_time(
    fault: str, folder: Path, hangs_up: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After it, no run of the process tries again. MLflow alone would try for minutes."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 0.0)
    if fault == "damaged":
        (folder / "mlflow.db").write_bytes(b"no database" * 1000)
    elif fault != "removed":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{hangs_up if fault == 'no answer' else f'127.0.0.1:{free_port()}'}")
    began = time.monotonic()
    run = MlflowRun("toy", "one", {"a": 1}, {}, id_file=folder / "id")
    if fault == "removed":
        (folder / "mlflow.db").unlink()
    log = RunLog(folder, run)
    log.step(1, [{"loss": 0.5}], {}, tokens=8, elsewhere={"training_s": 1.0})
    run.tag(checkpoint_digest="abc")
    assert run.finish() == (run.run_id or None) and bool(run.run_id) == (fault == "removed")
    assert (folder / "history.csv").read_text() == "step,update,loss\n1,1,0.5\n"
    warning, began_again = capsys.readouterr().err, time.monotonic()
    assert began_again - began < 20  # of which MLflow's imports take some
    assert warning.count("warning: MLflow at ") == 1 and "goes on without MLflow" in warning and "history.csv" in warning
    assert MlflowRun("toy", "two", {}, {}).finish() is None and time.monotonic() - began_again < 0.5
    assert capsys.readouterr().err == ""


def test_nothing_is_tracked_where_the_address_is_none(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    run = MlflowRun("toy", "one", {}, {}, id_file=workdir / "id")
    run.log({"x": 1.0}, step=1)
    assert run.finish() is None and not [*workdir.iterdir()]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")  # the other address without a scheme
    assert tracking_uri() == "databricks" and local_database("databricks") is None
    assert local_database("sqlite:////a/b.db?timeout=9") == Path("/a/b.db")


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:pa5w0rd@{}",
        "http://me:pa5?w0rd@{}",
        "http://pa5w0rd@{}",
        "http://me:pa5@w0rd@{}",
        "http://me:pa5/w0rd@{}",
        "http://{}/#pa5w0rd",
        "postgresql://me:pa5w0rd@{}/db?password=pa5w0rd",
    ],
)
def test_a_password_is_written_nowhere(
    uri: str, folder: Path, hangs_up: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = uri.format(hangs_up)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(sys, "argv", ["grpo", "run", "--task", uri])
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        assert MlflowRun("toy", "one", {}, {}).finish() is None
    warning = capsys.readouterr().err
    assert warning.startswith("warning: MLflow at ")
    assert MlflowRun("toy", "one", {}, {}).finish()
    (found,) = runs_at(uri_of(folder))[1]
    for text in (warning, found.data.tags["mlflow.source.name"]):
        assert "pa5" not in text and "w0rd" not in text


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A tracking server that runs write to; the working folder is a new one."""
    (tmp_path / "server").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    server = Server(tmp_path / "server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    server.start()
    yield server
    server.kill()


@pytest.mark.nightly
def test_a_server_that_dies(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on; the next process writes to the server again."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 0.0)
    write_text(Path("note.txt"), "a note")
    first, killed = (MlflowRun("toy", name, {"a": 1}, {"stage": "toy@one"}) for name in ("whole", "killed"))
    first.artifact(Path("note.txt"))
    for step in range(3):
        first.log({"x": step / 3}, step=step)
        killed.log({"x": step / 3}, step=step)
    first.finish()
    server.kill()
    killed.log({"x": 1.0}, step=3)
    assert killed.finish() == killed.run_id and capsys.readouterr().err.count("warning: ") == 1
    server.start()
    client, runs = runs_at(server.uri)
    found = {run.info.run_name: run for run in runs}
    assert {name: run.info.status for name, run in found.items()} == {"whole": "FINISHED", "killed": "RUNNING"}
    whole = found["whole"]
    assert (whole.data.params, whole.data.tags["stage"]) == ({"a": "1"}, "toy@one")
    assert whole.data.tags["mlflow.user"] == getpass.getuser()
    assert [artifact.path for artifact in client.list_artifacts(whole.info.run_id)] == ["note.txt"]
    for run in found.values():
        assert history(client, run, "x") == [(step, step / 3) for step in range(3)]


def write_fifty_steps(number: int) -> str | None:
    run = MlflowRun("toy", str(number), {"number": number}, {})
    for step in range(50):
        run.log({f"metric{i}": float(step) for i in range(20)}, step=step)
    return run.finish()


@pytest.mark.nightly
def test_eight_processes_write_to_one_new_database(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All metrics of each are there afterwards, and no process had to wait for too long."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(workdir))
    with multiprocessing.get_context("fork").Pool(8) as pool:
        written = pool.map(write_fifty_steps, range(8))
    assert "warning" not in capfd.readouterr().err
    client, runs = runs_at(uri_of(workdir))
    assert len(runs) == len({*written}) == 8
    for number, run_id in enumerate(written):
        run = client.get_run(run_id)
        assert (run.data.params, run.info.status) == ({"number": str(number)}, "FINISHED")
        for key in ("metric0", "metric19"):
            assert history(client, run, key) == [(step, float(step)) for step in range(50)]


STATE = {"key": "k", "name": "study toy", "tags": {"study": "toy", "params_digest": "d"}, "settings": {"seeds": [0]}}


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
    local = mini_study.models | {"main": LocalModel(source="local", path="mine")}
    assert study_tags(mini_study.model_copy(update={"models": local}))["model"] == "mine"
    assert others[0]["settings"]["seeds"] == [7] and others[2]["name"].endswith(" + changes")


def trained(seed: int, rewards: list[float], updates: list[int], state: dict[str, Any] = STATE, arm: str = "a") -> str:
    """A finished run of an arm, in the working folder and in MLflow; its id there."""
    name = f"grpo_learning_rate/{arm}/{seed}"
    mlflow = MlflowRun("toy", name, {}, {"experiment": "grpo_learning_rate", "arm": arm, "study": "toy"}, state)
    store(made_up(arm, rewards, seed, validation={"update": updates}))
    run_id = mlflow.finish()
    assert run_id is not None
    timing = paths.run_timing(name)
    write_json(timing, json.loads(timing.read_text()) | {"mlflow_run_id": run_id})
    return run_id


def test_an_arm_is_a_run_with_the_band_of_its_seeds_above_them(folder: Path, mini_study: Study) -> None:
    """Written once; again after a seed was trained again. An arm with a seed that MLflow lacks is left out."""
    study = study_of(mini_study, grpo_learning_rate={"a": {}, "b": {}}).model_copy(update={"study": "toy"})
    ids = [trained(0, [0.1, 0.5, 0.7], [0, 8, 16]), trained(1, [0.1, 0.3], [0, 10])]  # the second stopped at step 8
    trained(0, [0.1, 0.5], [0, 8], arm="b")
    store(made_up("b", [0.1, 0.5], 1, validation={"update": [0, 8]}))
    for _ in range(2):
        record_arms(study)
    client, runs = runs_at(uri_of(folder))
    (arm,) = (run for run in runs if run.info.run_name == "grpo_learning_rate/a")
    band = {"mean": (0.1, 0.4, 0.5), "low": (0.1, 0.3, 0.3), "high": (0.1, 0.5, 0.7)}
    for key, values in band.items():
        assert history(client, arm, f"val/answer_reward_{key}") == [*zip((0, 9, 16), map(pytest.approx, values), strict=True)]
    assert (arm.info.status, arm.data.tags["experiment"], arm.data.tags["arm"]) == ("FINISHED", "grpo_learning_rate", "a")
    (parent,) = (run.info for run in runs if "study_key" in run.data.tags)
    assert (parent.run_name, parent.status) == ("study toy", "FINISHED")
    (settings,) = client.list_artifacts(parent.run_id)
    assert json.loads(Path(client.download_artifacts(parent.run_id, settings.path)).read_text()) == {"seeds": [0]}
    state = parent.run_id
    below = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in runs}
    assert [below[one] for one in ids] == [arm.info.run_id] * 2 and below[arm.info.run_id] == state
    assert Counter(below.values()) == {arm.info.run_id: 2, state: 2, None: 1} and len(runs) == 5

    ids[1] = trained(1, [0.1, 0.3, 0.9], [0, 8, 16], STATE | {"key": "other"})
    record_arms(study)
    client, runs = runs_at(uri_of(folder))
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in runs}
    (again,) = {parents[one] for one in ids}
    assert again != arm.info.run_id and parents[again] != state
    assert history(client, client.get_run(again), "val/answer_reward_high")[-1] == (16, pytest.approx(0.9))


def test_arms_need_no_mlflow(folder: Path, mini_study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is none, none is made; a damaged one is a warning."""
    (folder / "mlflow.db").unlink()
    record_arms(mini_study)
    assert not (folder / "mlflow.db").exists() and capsys.readouterr().err == ""
    (folder / "mlflow.db").write_text("no database")
    record_arms(mini_study)
    assert capsys.readouterr().err.startswith(f"warning: MLflow at {uri_of(folder)}: ")


def test_rollouts_are_a_table(folder: Path) -> None:
    """As MLflow itself reads one, beside the database."""
    run, rollouts = MlflowRun("toy", "e/a-0", {"seed": 0}, {}), Path("data/runs/e/a-0/rollouts.jsonl")
    records: list[dict[str, Any]] = [{"step": 0, "response": "five"}, {"step": 2, "reward": 1.0}]
    write_text(rollouts, "".join(json.dumps(record) + "\n" for record in records))
    run.table(rollouts)
    run.finish()

    client, (found,) = runs_at(uri_of(folder))
    assert found.info.artifact_uri.startswith((folder / "mlruns/toy").as_uri())
    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        table = client.load_table(found.info.experiment_id, "rollouts.json")
    finally:
        mlflow.set_tracking_uri("")
    assert list(table) == ["step", "response", "reward"]
    assert table["step"].tolist() == [0, 2] and table["response"].tolist()[0] == "five" and table["reward"].tolist()[1] == 1.0


def ui(**env: str) -> tuple[int, str]:
    """`make ui` where it cannot start: exit code and what it says."""
    done = subprocess.run(
        [sys.executable, ROOT / "workflow/mlflow_ui.py"], env=os.environ | env, text=True, capture_output=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_the_ui_takes_a_free_port_and_says_that_its_server_is_away(folder: Path) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    code, said = ui(MLFLOW_TRACKING_URI=uri)
    assert code == 2 and said.startswith(f"error: MLflow at {uri}: ")
    assert "Check the server and MLFLOW_TRACKING_URI" in said and said.count("\n") <= 3
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = str(stranger.getsockname()[1])
        code, said = ui(MLFLOW_TRACKING_URI=uri_of(folder), MLFLOW_PORT=taken)
        told = f"error: MLFLOW_PORT: another program uses port {taken}. Choose another: MLFLOW_PORT=5001 make ui\n"
        assert (code, said) == (2, told)
        assert ui(MLFLOW_TRACKING_URI=uri_of(folder), MLFLOW_PORT="http")[1].startswith("error: MLFLOW_PORT: http is not")
        of_ui = runpy.run_path(str(ROOT / "workflow/mlflow_ui.py"))["free_port"]
        of_ui.__globals__["PORTS"] = [int(taken), 1]
        assert of_ui(None) == 1


def test_links_open_the_training_view_of_each_study(folder: Path) -> None:
    MlflowRun("toy", "e/a-0", {}, {}, STATE).finish()
    links = runpy.run_path(str(ROOT / "workflow/mlflow_ui.py"))["links"](uri_of(folder), "http://127.0.0.1:5000/")
    _, runs = runs_at(uri_of(folder))
    page = f"http://127.0.0.1:5000/#/experiments/{runs[0].info.experiment_id}/runs?"
    assert len(links) == 2 and all(line.partition(": ")[2].startswith(page) for line in links)
    asked = parse_qs(links[0].partition("?")[2])
    assert asked == {"workflowType": ["machine_learning"], "orderByKey": ["tags.`mlflow.runName`"], "orderByAsc": ["true"]}


def test_the_ui_is_this_machines_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of MLflow's protections is off, and an experiment's name commands no terminal."""
    for name in ("SERVER_DISABLE_SECURITY_MIDDLEWARE", "SERVER_ALLOWED_HOSTS", "UVICORN_OPTS"):
        monkeypatch.setenv(f"MLFLOW_{name}", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(folder))
    MlflowClient(uri_of(folder)).create_experiment("evil \x1b]52;c;cHduZWQ=\x07")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execvp", lambda *_: started.append(dict(os.environ)))
    runpy.run_path(str(ROOT / "workflow/mlflow_ui.py"))["main"]()
    said = capsys.readouterr().out
    assert "evil \ufffd]52" in said and "\x1b" not in said
    kept = {"MLFLOW_BACKEND_STORE_URI", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION"}
    assert {name for name in started[0] if name.startswith("MLFLOW_")} == kept
