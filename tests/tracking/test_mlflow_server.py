"""A tracking server that dies, and many writers at once."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_parts import Server, history, runs_at

from grpo.common.files import write_text
from grpo.tracking import mlflow_run
from grpo.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.nightly


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


def test_a_server_has_the_run_until_it_dies(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on; the next process writes to the server again."""
    monkeypatch.setattr(mlflow_run, "EVERY_SECONDS", 0.0)
    write_text(Path("note.txt"), "a note")
    server.start()
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
    assert (whole.data.params, whole.data.tags["stage"], whole.data.tags["mlflow.user"]) == (
        {"a": "1"},
        "toy@one",
        getpass.getuser(),
    )
    assert [artifact.path for artifact in client.list_artifacts(whole.info.run_id)] == ["note.txt"]
    for run in found.values():
        assert history(client, run, "x") == [(step, step / 3) for step in range(3)]


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
    written = dict(line.split() for line in done.stdout.splitlines())
    assert len(written) == count
    client, runs = runs_at(uri)
    for number, run_id in written.items():
        run = client.get_run(run_id)
        assert (run.data.params, run.info.status) == ({"number": number}, "FINISHED")
        for key in ("metric0", "metric19"):
            assert history(client, run, key) == [(step, float(step)) for step in range(50)]
    assert len(runs) == count
