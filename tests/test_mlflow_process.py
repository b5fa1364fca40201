"""The process that writes to MLflow: what becomes of runs when one side is killed or interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from grpo import tracking
from grpo.tracking import MlflowRun

PROGRAM = """
import time
from grpo import tracking
run = tracking.MlflowRun("toy", "first", {"a": 1}, {})
try:
    run.log({"x": 0.5}, step=1)
    run._flush()
    print(tracking._writer()._process.pid, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    run.finish("FAILED")
"""


def run_in(folder: Path) -> Any:
    """The only run in a folder's database, or None while there is none."""
    from mlflow.tracking import MlflowClient

    if not (folder / "mlflow.db.lock").exists():
        return None
    with FileLock(folder / "mlflow.db.lock"):  # while it is held, the database's tables are being made
        if not (folder / "mlflow.db").exists():
            return None
        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("toy")
    runs = client.search_runs([experiment.experiment_id]) if experiment else []
    return runs[0] if runs else None


def wait_for(condition: Callable[[], Any]) -> Any:
    """What ``condition`` gives once it is true, within 30 seconds."""
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)
    return found


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, "KILLED"), (signal.SIGINT, "FAILED")])
def test_a_run_that_is_cut_short_says_how_and_leaves_no_process(number: int, status: str, tmp_path: Path) -> None:
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
        writer = int(training.stdout.readline())
        wait_for(lambda: (run := run_in(tmp_path)) is not None and run.data.metrics)
        os.killpg(training.pid, number)  # as Ctrl-C does: the whole group, to which the writer does not belong
    run = wait_for(lambda: (run := run_in(tmp_path)) is not None and run.info.status != "RUNNING" and run)
    assert (run.info.status, run.data.metrics, run.data.params) == (status, {"x": 0.5}, {"a": "1"})
    wait_for(lambda: not is_alive(writer))


def test_a_writer_that_dies_costs_its_runs_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    lost = MlflowRun("toy", "lost", {}, {})
    tracking._writer()._process.kill()
    tracking._writer()._process.wait()
    lost.log({"x": 1.0}, step=1)
    assert lost.finish() is None
    assert "could not be written: the process that writes to it has ended" in capfd.readouterr().err
    kept = MlflowRun("toy", "kept", {}, {})
    kept.log({"x": 2.0}, step=1)
    run_id = kept.finish()
    assert run_id is not None
    run = run_in(tmp_path)
    assert (run.info.run_id, run.data.metrics) == (run_id, {"x": 2.0})


def test_two_runs_at_once_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    first, second = MlflowRun("toy", "first", {}, {}), MlflowRun("toy", "second", {}, {})
    first.log({"x": 1.0}, step=0)
    second.log({"x": 2.0}, step=0)
    ids = [second.finish(), first.finish()]
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert [client.get_run(run_id).data.metrics["x"] for run_id in ids if run_id] == [2.0, 1.0]
