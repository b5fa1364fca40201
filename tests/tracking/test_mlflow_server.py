"""Many writers at once, and a tracking server that comes and goes."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_parts import Server, history, runs_at, unsent
from study_parts import Grpo

from grpo.tracking import mlflow_run
from grpo.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A tracking server, not yet started, that runs write to; the working folder is a new one."""
    (tmp_path / "server").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    server = Server(tmp_path / "server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    yield server
    server.kill()


# ---------------------------------------------------------------------------------------------------- servers that are away


@pytest.mark.parametrize("back_in_time", [True, False])
def test_a_server_that_dies_has_all_of_the_run_once_it_is_back(
    back_in_time: bool,
    server: Server,
    mlflow_import: Grpo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If that is before the run ends, nothing is left to do; else the rest is imported."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 0.0)
    server.start()
    run = MlflowRun("toy", "one", {"a": 1}, {"stage": "toy@one"})
    for step in range(9):
        run.log({"x": step / 3}, step=step)
        if step == 2:
            assert [found.data.metrics for found in runs_at(server.uri)[1]] == [{"x": 2 / 3}]
            server.kill()
    if back_in_time:
        server.start()
    run_id = run.finish()
    assert capsys.readouterr().err.count("warning: ") == 1 and len(unsent()) == (not back_in_time)
    if not back_in_time:
        server.start()
        assert mlflow_import(uri=server.uri) == (0, f"toy one: run {run_id}\n", "")
    assert unsent() == []
    client, (found,) = runs_at(server.uri)
    assert (found.info.run_id, found.info.status, found.data.params) == (run_id, "FINISHED", {"a": "1"})
    assert found.data.tags["mlflow.user"] == getpass.getuser()
    assert history(client, found, "x") == [(step, step / 3) for step in range(9)]


# --------------------------------------------------------------------------------------------------------------- many writers

# Imports once; its children write.
WRITERS = """
import os, sys
import mlflow.store.tracking.sqlalchemy_store
from grpo.tracking.mlflow_run import MlflowRun

def write(number):
    run = MlflowRun("toy", number, {"number": number}, {})
    for step in range(50):
        run.log({f"metric{i}": float(step) for i in range(20)}, step=step)
    print(number, run.finish(), flush=True)

children = []
for number in range(int(sys.argv[1])):
    if not (child := os.fork()):
        write(str(number))
        os._exit(0)
    children.append(child)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


def test_eight_processes_write_to_one_new_database(workdir: Path) -> None:
    """All metrics of each are there afterwards, and no process had to wait for too long."""
    uri, count = f"sqlite:///{workdir}/mlflow.db", 8
    program = [sys.executable, "-c", WRITERS, str(count)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert unsent() == []
    written = dict(line.split() for line in done.stdout.splitlines())
    assert len(written) == count
    client, runs = runs_at(uri)
    for number, run_id in written.items():
        run = client.get_run(run_id)
        assert (run.data.params, run.info.status) == ({"number": number}, "FINISHED")
        for key in ("metric0", "metric19"):
            assert history(client, run, key) == [(step, float(step)) for step in range(50)]
    assert len(runs) == count
