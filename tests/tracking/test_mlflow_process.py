"""Runs' folders and the process that brings them to MLflow: one side is killed, or MLflow cannot be written."""

from __future__ import annotations

import fcntl
import getpass
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from filelock import FileLock

from grpo.common.errors import ToBeResumed, UserError
from grpo.common.files import read_json, write_json, write_text
from grpo.study import paths
from grpo.study.effective import EffectiveRun, digest, effective_run
from grpo.study.environment import hardware, software
from grpo.study.schema import Study, load_study, read_yaml
from grpo.study.sections import HubModel
from grpo.tracking import mlflow_client as tracking
from grpo.tracking.mlflow_client import MlflowRun, is_locked, lock_of_sender
from grpo.tracking.mlflow_study import flat
from grpo.tracking.mlflow_sync import Sent, sync
from grpo.tracking.run_log import RunLog
from grpo.training import run as run_module

REPOSITORY = Path(__file__).parents[2]

PROGRAM = """
import time
from grpo.tracking import mlflow_client as tracking
run = tracking.MlflowRun("toy", "first", {"a": 1}, {})
try:
    run.log({"x": 0.5}, step=1)
    print(tracking.sender(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    run.finish("FAILED")
"""


def runs_in_folder(folder: Path) -> list[Any]:
    """The runs in a folder's database."""
    if not (folder / "mlflow.db.lock").exists():
        return []
    with FileLock(folder / "mlflow.db.lock"):  # while it is held, the database's tables are being made
        if not (folder / "mlflow.db").exists():
            return []
        return list(runs_in(folder)[1])


def own(metrics: dict[str, float]) -> dict[str, float]:
    """A run's metrics, without those of the machine."""
    return {key: value for key, value in metrics.items() if not key.startswith("system/")}


def run_in(folder: Path) -> Any:
    """The only run in a folder's database, or None while there is none."""
    return next(iter(runs_in_folder(folder)), None)


def wait_for(condition: Callable[[], Any]) -> Any:
    """What ``condition`` gives once it is true, within two minutes."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)
    return found


def processes_of(sender: str) -> list[int]:
    """The ids of the processes that bring folders to MLflow under this name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"grpo.tracking.mlflow_sync\0{sender}\0".encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.slow
def test_a_run_that_is_cut_short_says_how_and_leaves_no_process(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as training:
        assert training.stdout is not None
        sender = training.stdout.readline().strip()
        wait_for(lambda: (run := run_in(tmp_path)) is not None and run.data.metrics)  # while it goes on
        os.killpg(training.pid, signal.SIGKILL)  # the whole group, to which the writer does not belong; Ctrl-C: see below
    run = wait_for(lambda: (run := run_in(tmp_path)) is not None and run.info.status != "RUNNING" and run)
    assert (run.info.status, own(run.data.metrics), run.data.params) == ("KILLED", {"x": 0.5}, {"a": "1"})
    wait_for(lambda: not processes_of(sender))
    assert list((tmp_path / paths.UNSENT_METRICS).iterdir()) == []


def test_a_sender_that_is_killed_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    run = MlflowRun("toy", "one", {}, {})
    run.log({"x": 1.0}, step=1)
    wait_for(lambda: (found := run_in(tmp_path)) is not None and found.data.metrics)
    for process in processes_of(tracking.sender()):
        os.kill(process, signal.SIGKILL)
    run.log({"x": 2.0}, step=2)
    run_id = run.finish()
    assert (capfd.readouterr().err, list(paths.UNSENT_METRICS.iterdir())) == ("", [])
    (found,) = runs_in_folder(tmp_path)
    assert (found.info.run_id, found.info.status) == (run_id, "FINISHED")
    assert history(runs_in(tmp_path)[0], found, "x") == [(1, 1.0), (2, 2.0)]


def test_a_run_killed_with_its_sender_is_marked_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a power cut."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        sender = training.stdout.readline().strip()
        wait_for(lambda: (run := run_in(tmp_path)) is not None and run.data.metrics)
        for process in processes_of(sender):
            os.kill(process, signal.SIGKILL)
        training.kill()
    assert run_in(tmp_path).info.status == "RUNNING" and len(list(paths.UNSENT_METRICS.iterdir())) == 1
    assert tracking.sender() == sender
    MlflowRun("toy", "next", {}, {}).finish()
    wait_for(lambda: list(paths.UNSENT_METRICS.iterdir()) == [])
    found = {run.info.run_name: (run.info.status, own(run.data.metrics)) for run in runs_in_folder(tmp_path)}
    assert found == {"first": ("KILLED", {"x": 0.5}), "next": ("FINISHED", {})}


def test_what_is_sent_again_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> None:
    """By one that knows nothing of what was sent before, at any moment of a run."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MlflowRun, "_start_sender", lambda self: False)
    run = MlflowRun("toy", "one", {"a": 1}, {"b": 2})
    seen = []
    for step in range(4):
        run.log({"x": step / 3, "y": math.nan, "z": math.inf}, step=step)
        run.tag(step=step)
        with (run.folder / "metrics.jsonl").open("ab") as half:
            half.write(b'{"time": 1')  # as of a line that is being written
            seen.append([sync(run.folder, uri, Sent()) for _ in range(2)])
            half.truncate(half.tell() - 10)
    (tmp_path / "note.txt").write_text("kept")
    run.artifact(tmp_path / "note.txt")
    assert run._describe(status="FINISHED", ended=123)
    seen.append([sync(run.folder, uri, Sent()) for _ in range(2)])
    assert seen == [*[[False, False]] * 4, [True, True]]
    client, (found,) = runs_in(tmp_path)
    assert (found.info.status, found.info.end_time, found.data.params) == ("FINISHED", 123, {"a": "1"})
    assert {"b": "2", "step": "3"}.items() <= found.data.tags.items()
    assert history(client, found, "x") == [(step, step / 3) for step in range(4)]
    assert (
        [step for step, _ in history(client, found, "y")] == [step for step, _ in history(client, found, "z")] == [0, 1, 2, 3]
    )
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["note.txt"]


@pytest.mark.slow
def test_runs_of_several_processes_share_one_that_writes(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    start = partial(
        subprocess.Popen, [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    with start() as first, start() as second:  # both find nobody who listens
        assert first.stdout is not None and second.stdout is not None
        (sender,) = {first.stdout.readline().strip(), second.stdout.readline().strip()}
        wait_for(lambda: [own(run.data.metrics) for run in runs_in_folder(tmp_path)] == [{"x": 0.5}] * 2)
        (process,) = processes_of(sender)
        first.kill()
        with start() as third:
            assert third.stdout is not None and third.stdout.readline().strip() == sender
            wait_for(lambda: len(runs_in_folder(tmp_path)) == 3)
            assert processes_of(sender) == [process]
            third.send_signal(signal.SIGINT)
        second.kill()
    wait_for(lambda: not processes_of(sender))
    assert sorted(run.info.status for run in runs_in_folder(tmp_path)) == ["FAILED", "KILLED", "KILLED"]


def test_a_database_that_is_removed_between_two_runs_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that writes lives on for some seconds, and has the removed file open."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "mlflow.db").unlink(missing_ok=True)
        assert MlflowRun("toy", name, {}, {}).finish() is not None
        with sqlite3.connect(tmp_path / "mlflow.db") as database:  # MLflow here would have the first one open
            assert database.execute("select name, status from runs").fetchall() == [(name, "FINISHED")]


def test_a_database_that_is_removed_in_mid_run_gets_all_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    run = MlflowRun("toy", "run", {"a": 1}, {})
    run.log({"x": 0.5}, step=0)
    wait_for(lambda: tracking.read_answer(run.folder)["run_id"])
    (tmp_path / "mlflow.db").unlink()
    run.log({"x": 1.5}, step=1)
    assert run.finish() is not None and "warning" not in capsys.readouterr().err and unsent() == []
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("select name, status from runs").fetchall() == [("run", "FINISHED")]
        assert database.execute("select step, value from metrics where key = 'x' order by step").fetchall() == [
            (0, 0.5),
            (1, 1.5),
        ]


def test_a_temporary_folder_that_is_emptied_starts_no_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd does it with what is older than ten days: the lock by which a new run knows the process must outlive it."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # asked for anew
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    first = MlflowRun("toy", "first", {}, {})
    wait_for(lambda: is_locked(lock_of_sender(tracking.sender())))
    shutil.rmtree(temporary)
    temporary.mkdir()
    second = MlflowRun("toy", "second", {}, {})
    assert second._process is None and is_locked(lock_of_sender(tracking.sender()))
    assert None not in (first.finish(), second.finish())


def test_a_clock_that_goes_back_shortens_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MlflowRun("toy", "run", {}, {})
    run.log({"x": 0.0}, step=0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    monkeypatch.setattr(tracking, "ANSWER_SECONDS", 0.0)
    time.sleep(0.1)
    run.log({"x": 1.0}, step=1)
    run.finish()
    about = json.loads((run.folder / "run.json").read_bytes())
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().split("\n") if line]
    assert 100 <= about["ended"] - about["started"] < 60_000
    assert about["started"] <= rows[0]["time"] <= rows[1]["time"] - 100 <= about["ended"]


def test_two_runs_at_once_are_kept_apart(delivered: Path) -> None:
    first, second = MlflowRun("toy", "first", {}, {}), MlflowRun("toy", "second", {}, {})
    first.log({"x": 1.0}, step=0)
    second.log({"x": 2.0}, step=0)
    ids = [second.finish(), first.finish()]
    client = client_of(delivered)
    assert [client.get_run(run_id).data.metrics["x"] for run_id in ids if run_id] == [2.0, 1.0]


# ---------------------------------------------------------------------------------------------------- where the database is


def test_in_an_experiment_of_dvc_runs_go_to_the_workspaces_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_experiments.py` has it with DVC itself."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for copy in ("workspace/.dvc/tmp/exps/tmp1", "workspace/.dvc/tmp/exps/standalone/tmp2"):
        (tmp_path / copy).mkdir(parents=True)

    def database(folder: str, root: str | None) -> str:
        monkeypatch.chdir(tmp_path / folder)
        with monkeypatch.context() as patch:
            if root is not None:
                patch.setenv("DVC_ROOT", str(tmp_path / root))
            return tracking.tracking_uri().removeprefix(f"sqlite:///{tmp_path}/")

    for copy in ("workspace/.dvc/tmp/exps/tmp1", "workspace/.dvc/tmp/exps/standalone/tmp2"):
        assert database(copy, "workspace") == "workspace/mlflow.db"
        assert database(copy, None) == f"{copy}/mlflow.db"  # DVC does not run it: it is a project like any other
    assert database("workspace", "workspace") == database("workspace", None) == "workspace/mlflow.db"
    assert database("workspace", "elsewhere") == "workspace/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert tracking.tracking_uri() == "http://server:5000"


# ------------------------------------------------------------------------------------------------------ which run it was


def a_run(study: Study, experiment: str) -> EffectiveRun:
    return effective_run(study, experiment, next(iter(study.experiments[experiment].arms)), 0, [])


IDENTITY: dict[str, Any] = {"train": "a", "validation": "b", "model": "c", "learner": {"device": "cpu", "processes": 1}}


def test_runs_of_different_studies_can_be_told_apart(delivered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "brave-try")
    monkeypatch.chdir(REPOSITORY)
    studies = {name: load_study(REPOSITORY / f"studies/{name}.yaml") for name in ("mini", "math-2xh100")}
    for study in studies.values():
        for experiment in ("grpo_async_offpolicy", "grpo_keyword_inclusion"):
            run_module._mlflow_run(study, a_run(study, experiment), IDENTITY, None).finish()
    client = client_of(delivered)
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
    expected = {
        "models.main.repo": hub.repo,
        "engine.name": "vllm",
        "learner.device": "cuda:1",
        "tasks.main.use": "math",
        "seed": "0",
    }
    expected |= {"evaluation.max_tokens": "1024", "learning_rate": "1e-05", "asynchronous.max_policy_lag": "0"}
    assert expected.items() <= params.items()
    assert (tags["taken_over"], "same_as" in tags) == ("false", False)
    # What MLflow's own columns show, and what the run was made with.
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (tags["mlflow.source.git.commit"], tags["git_commit"]) == (commit, commit)
    assert "mlflow.user" not in tags and getpass.getuser() != large.info.user_id  # a local file names nobody
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert tracking.mlflow_source_tags()["mlflow.user"] == getpass.getuser()
    assert (
        tags["mlflow.source.name"].split()[0] == Path(sys.argv[0]).name.replace("__main__.py", "grpo")
        and tags["dvc_experiment"] == "brave-try"
    )
    assert tags["software.numpy"] == numpy.__version__ and tags["hardware.cores"] == str(os.cpu_count())
    # The keyword task has a model of its own.
    of_words = client.search_runs(everywhere, "tags.experiment = 'grpo_keyword_inclusion'")
    assert {(run.data.tags["study"], run.data.tags["task"], run.data.tags["model"]) for run in of_words} == {
        (name, "keyword", "model@keyword") for name in studies
    }
    assert all("models.keyword.vocab_size" in run.data.params and "tasks.main.use" not in run.data.params for run in of_words)


def test_more_settings_than_mlflow_takes_at_once_arrive(delivered: Path) -> None:
    params = flat({"a": {"b": dict.fromkeys(map(str, range(150)), 1), "c": None}, "d": [1, {"e": 2}], "f": {}})
    run_id = MlflowRun("toy", "many", params, dict.fromkeys(map(str, range(120)), 2)).finish()
    data = client_of(delivered).get_run(run_id).data
    rest = {"a.c": "None", "d": "[1, {'e': 2}]"}
    assert data.params == {f"a.b.{i}": "1" for i in range(150)} | rest
    assert {str(i): "2" for i in range(120)}.items() <= data.tags.items()


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

    client = client_of(data)
    (found,) = client.search_runs([client.get_experiment_by_name("mini").experiment_id], "tags.experiment = 'grpo_baselines'")
    assert found.data.metrics == {} and found.info.status == "FINISHED"
    tags = found.data.tags
    assert (tags["taken_over"], tags["same_as"], tags["same_as_run_id"]) == ("true", TWIN, "0123456789abcdef")
    assert tags["identity"] == digest(identity) and tags["study"] == "mini"
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["config.yaml"]
    # The results are those of its equal; what was run with is in the run's folder, the machine apart from it.
    assert {name: (paths.RUNS / run.name / name).read_text() for name in RESULTS} == RESULTS
    config = read_yaml(paths.RUNS / run.name / "config.yaml")
    assert config["software"] == software(["numpy"]) and "hardware" not in config
    timing = read_json(paths.run_timing(run.name), made_by="")
    assert (timing["mlflow_run_id"], timing["same_as"], timing["total_s"]) == (found.info.run_id, TWIN, 0.0)
    assert timing["hardware"] == hardware()


def test_an_equal_run_that_was_not_tracked_is_named_without_an_id(mini_study: Study, folder: Path) -> None:
    write_json(paths.run_timing(TWIN), {"mlflow_run_id": None})
    assert run_module._mlflow_id(TWIN) == "not tracked"


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
    client = client_of(data)
    (found,) = client.search_runs([client.get_experiment_by_name("mini").experiment_id], "tags.experiment = 'grpo_baselines'")
    assert (found.info.status, found.data.tags["taken_over"]) == (status, "false")
    kept = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert kept == (set() if error else {"config.yaml", "metrics.json", "outcomes.jsonl", "rollouts.json"})
    finished = error is None
    assert (paths.RUNS / run.name).exists() == (paths.run_timing(run.name)).exists() == finished
    assert (states[0] / "step-1").exists() == (not finished)


def test_a_saved_state_is_one_configurations_and_one_codes(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(mini_study, "grpo_baselines")
    before = run_module._state_folder(run, IDENTITY)
    assert before.parent == paths.RUN_STATE / run.name and run_module._state_folder(run, dict(IDENTITY)) == before
    assert run_module._state_folder(run, IDENTITY | {"learner": {"device": "cpu", "processes": 3}}) == before
    other = run_module._state_folder(run, IDENTITY | {"train": "x"})
    monkeypatch.setattr(run_module, "code_of_runs", lambda: {"grpo/training/step.py": "edited"})
    assert len({before, other, run_module._state_folder(run, IDENTITY)}) == 3


def test_a_run_that_is_taken_up_holds_the_whole_history(delivered: Path) -> None:
    """In MLflow it is a new run, with all that the one before it had recorded, each at its update."""
    logs = [RunLog(delivered, MlflowRun("toy", name, {}, {})) for name in ("killed", "resumed")]
    for step in (1, 2):
        with logs[0].phase("rollout"), logs[0].phase("training"):
            pass
        logs[0].step(step, [{"loss": step / 2}, {"loss": step / 4}], {"train/reward": 0.5}, tokens=8)
        logs[0].validation(step, 2 * step, {"answer_reward": step / 8})
    logs[1].restore(logs[0].state())
    ids = [log.mlflow.finish(status) for log, status in zip(logs, ("KILLED", "FINISHED"), strict=True)]
    client = client_of(delivered)
    killed, resumed = (client.get_run(run_id) for run_id in ids)
    assert history(client, killed, "loss") == [(1, 0.5), (2, 0.25), (3, 1.0), (4, 0.5)]
    assert history(client, killed, "val/answer_reward") == [(2, 0.125), (4, 0.25)]
    assert [update for update, _ in history(client, killed, "time/step_s")] == [2, 4]
    assert {"time/rollout_s", "time/training_s", "time/tokens_per_s"} <= killed.data.metrics.keys()
    assert killed.data.metrics.keys() == resumed.data.metrics.keys()
    for key in killed.data.metrics:
        assert history(client, resumed, key) == history(client, killed, key), key
    assert resumed.data.tags["resumed_after"] == "2" and "resumed_after" not in killed.data.tags


def test_tags_say_the_commit_and_whether_the_code_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)

    def tags() -> dict[str, str]:
        tracking._source_tags.cache_clear()
        return tracking.source_tags()

    def git(*args: str) -> str:
        named = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *args]
        return subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()

    assert tags() == {"git_commit": "none", "git_changed": "unknown"}
    assert "mlflow.source.git.commit" not in tracking.mlflow_source_tags()
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


def client_of(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


@pytest.fixture
def mlflow_import(
    monkeypatch: pytest.MonkeyPatch, grpo: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[int, str, str]]:
    """``grpo mlflow_import`` into the folder's database or another place: exit code, stdout, stderr."""

    def run(*files: Path, uri: str = "") -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", uri or f"sqlite:///{Path.cwd()}/mlflow.db")
            return grpo("mlflow_import", *map(str, files))

    return run


def unsent() -> list[Path]:
    """The folders that are left."""
    return sorted(paths.UNSENT_METRICS.glob("*"))


def runs_in(folder: Path) -> tuple[Any, list[Any]]:
    """A client of the folder's database, and the runs there."""
    client = client_of(folder)
    experiment = client.get_experiment_by_name("toy")
    return client, client.search_runs([experiment.experiment_id]) if experiment else []


def history(client: Any, run: Any, key: str) -> list[tuple[int, float]]:
    """(step, value), in their order."""
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))


def test_a_run_without_its_server_goes_on_and_is_imported_as_if_nothing_had_been(
    folder: Path, mlflow_import: Callable[..., tuple[int, str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time() * 1000
    run = MlflowRun("toy", "a name/with a slash", {"a": 1}, {"stage": "toy@x"})
    for step in range(1200):  # more than one call of MLflow takes
        run.log({"third": step / 3, "gap": math.nan if step == 7 else 1.0}, step=step)
    note, gone = folder / "note.txt", folder / "gone.txt"
    for file in (note, gone):
        file.write_text("kept")
        run.artifact(file)
    run.tag(checkpoint_digest="abc")
    waited = time.monotonic()
    assert run.finish("FAILED") is None
    assert time.monotonic() - waited < 30
    ended = time.time() * 1000

    (left,) = unsent()
    warning = capsys.readouterr().err
    assert "MLflow at http://127.0.0.1:" in warning and "could not be written: ConnectionRefusedError" in warning
    assert f"grpo mlflow_import {left.absolute()}\n" in warning
    gone.unlink()
    copy = shutil.copytree(left, folder / "copy")

    code, out, _ = mlflow_import()
    client, (found,) = runs_in(folder)
    assert code == 0
    assert out.splitlines() == [
        f"toy a name/with a slash: run {found.info.run_id}, 2400 metrics",
        f"  {gone} was left out, as it is no longer there",
    ]
    assert unsent() == []

    mlflow_import(copy)  # as if the first import had been cut off before it removed the folder
    client, (again,) = runs_in(folder)
    assert again.info.run_id == found.info.run_id
    assert (found.info.run_name, found.info.status, found.data.params) == ("a name/with a slash", "FAILED", {"a": "1"})
    assert began <= found.info.start_time <= found.info.end_time <= ended
    assert {"stage": "toy@x", "checkpoint_digest": "abc"}.items() <= found.data.tags.items()
    assert history(client, found, "third") == [(step, step / 3) for step in range(1200)]
    gaps = history(client, found, "gap")
    assert len(gaps) == 1200 and [step for step, value in gaps if math.isnan(value)] == [7]
    assert all(began - 1 <= metric.timestamp <= ended for metric in client.get_metric_history(found.info.run_id, "third"))
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["note.txt"]


def test_an_import_that_fails_keeps_the_folders(folder: Path, mlflow_import: Callable[..., tuple[int, str, str]]) -> None:
    MlflowRun("toy", "one", {}, {}).finish()
    kept = unsent()
    code, out, err = mlflow_import(uri=os.environ["MLFLOW_TRACKING_URI"])
    assert (code, out, unsent()) == (2, "", kept)
    assert err.startswith("error: MLflow at http://127.0.0.1:") and f"{kept[0]} is kept" in err

    code, _, err = mlflow_import(folder / "nowhere")
    assert code == 2 and f"{folder / 'nowhere'}: no folder of a run" in err

    for locked in ("metrics.jsonl", "lock"):  # as by a run that is not over, and by another process that sends it
        with (kept[0] / locked).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            code, out, _ = mlflow_import()
            assert (code, unsent()) == (0, kept) and "left alone" in out

    assert mlflow_import()[0] == 0
    assert mlflow_import()[:2] == (0, "nothing to import: data/state/mlflow is empty\n")


@pytest.mark.parametrize(("started", "ended"), [(1_699_999_999_000, 1_700_000_000_000), (1_700_000_000_003,) * 2])
def test_damaged_folders_are_imported_as_far_as_they_can_be_read(
    started: int, ended: int, folder: Path, mlflow_import: Callable[..., tuple[int, str, str]]
) -> None:
    run = MlflowRun("toy", "cut", {"a": 1}, {})
    for step in range(3):
        run.log({"x": float(step)}, step=step)
    run.finish()
    (left,) = unsent()
    os.truncate(left / "metrics.jsonl", (left / "metrics.jsonl").stat().st_size - 25)  # in the last line
    os.utime(left / "metrics.jsonl", (1.7e9, 1.7e9))
    about = read_json(left / "run.json", made_by="")
    write_json(left / "run.json", about | {"status": None, "started": started, "ended": None})
    headless = shutil.copytree(left, left.with_name("headless"))
    os.truncate(headless / "run.json", 40)

    code, out, err = mlflow_import()
    client, (found,) = runs_in(folder)
    assert out.splitlines() == [f"toy cut: run {found.info.run_id}, 2 metrics", "  1 damaged lines were left out"]
    assert (found.info.status, found.info.start_time, found.info.end_time) == ("KILLED", started, ended)
    assert history(client, found, "x") == [(0, 0.0), (1, 1.0)]
    assert code == 2 and "headless is kept: run.json, which says what run it is, is damaged" in err
    assert unsent() == [headless]


def test_what_mlflow_refuses_does_not_keep_the_rest_from_it(delivered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MlflowRun("toy", "one", {}, {"no\nname": 1, "fine": 2})
    run.log({"no@name": 1.0, "good": 1.0}, step=0)
    run.tag(after="it")
    run.log({"good": 2.0, "no@name": 1.0}, step=1)
    run_id = run.finish()
    warning = capsys.readouterr().err
    assert "MLflow refused metrics no@name: " in warning and str(unsent()[0].absolute()) in warning
    client, (found,) = runs_in(delivered)
    assert (found.info.run_id, found.info.status, found.data.tags["after"]) == (run_id, "FINISHED", "it")
    assert history(client, found, "good") == [(0, 1.0), (1, 2.0)] and set(found.data.metrics) == {"good"}


def test_a_full_disk_costs_messages_and_nothing_else(folder: Path, mlflow_import: Callable[..., tuple[int, str, str]]) -> None:
    program = """
from grpo.tracking.mlflow_client import MlflowRun
run = MlflowRun("toy", "full", {}, {})
for step in range(100):
    run.log({f"metric{i}": 1.0 for i in range(10)}, step=step)
print(run.finish())
"""
    limited = f"ulimit -f 8; exec {sys.executable} -B -c '{program}'"  # no file may be larger than 8 KiB
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "None\n"
    assert "messages could not be kept on disk: OSError" in done.stderr and "Connection refused" in done.stderr
    code, out, _ = mlflow_import()
    client, (found,) = runs_in(folder)
    steps = [step for step, _ in history(client, found, "metric9")]
    assert (code, out.splitlines()[1:]) == (0, ["  1 damaged lines were left out"])
    assert 3 < len(steps) < 50 and steps == list(range(len(steps)))


def test_a_folder_that_cannot_be_written_costs_the_record_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data").touch()
    run = MlflowRun("toy", "one", {}, {})
    run.log({"x": 1.0}, step=0)
    assert run.finish() is None
    warning = capsys.readouterr().err
    assert "could not be written: 2 messages could not be kept on disk: " in warning and "mlflow_import" not in warning


def test_a_run_that_is_killed_without_its_server_is_imported_as_killed(
    folder: Path, mlflow_import: Callable[..., tuple[int, str, str]]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as training:
        assert training.stdout is not None
        sender = training.stdout.readline().strip()
        (process,) = wait_for(lambda: processes_of(sender))
        wait_for(lambda: is_locked(lock_of_sender(sender)))
        os.kill(process, signal.SIGTERM)  # the end of a Slurm job reaches all processes; this one has to outlive the other
        killed = time.time() * 1000
        os.killpg(training.pid, signal.SIGKILL)
    wait_for(lambda: not processes_of(sender))
    assert tracking.read_answer(unsent()[0])["over"]
    mlflow_import()
    _, (found,) = runs_in(folder)
    assert found.info.status == "KILLED" and found.info.start_time <= found.info.end_time <= killed
    assert (own(found.data.metrics), found.data.params) == ({"x": 0.5}, {"a": "1"})


@pytest.mark.slow
def test_many_runs_of_a_process_wait_for_a_silent_server_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:  # once its queue is full, the kernel answers no one
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        runs = [MlflowRun("toy", str(number), {}, {}) for number in range(9)]
        assert [run.finish() for run in runs] == [None] * 9
        # 5 s at the first start, 5 s at the first end, and the process's own start, which takes long on a busy machine.
        assert time.monotonic() - began < 60
        for filler in fillers:
            filler.close()
    assert len(unsent()) == 9


def test_a_password_is_written_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{server.getsockname()[1]}")
        assert MlflowRun("toy", "one", {}, {}).finish() is None
        server.shutdown(socket.SHUT_RDWR)
    warning = capsys.readouterr().err
    assert (
        "MLflow at http://me:***@127.0.0.1:" in warning and "http://me:***@127.0.0.1:" in warning.partition("could not be")[2]
    )
    texts = [file.read_text() for file in (*unsent()[0].iterdir(), lock_of_sender(tracking.sender()).with_suffix(".log"))]
    assert "secret" not in warning and not any("secret" in text for text in texts)
