"""Many writers at once, and tracking servers that come, go, and are made by `make mlflow-server`."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from mlflow_parts import Server, free_port, history, runs_at, unsent
from study_parts import ROOT, Grpo

from grpo.tracking import mlflow_run
from grpo.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A tracking server, not yet started, that runs write to; the working folder is a new one."""
    (tmp_path / "server").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    store = ["--backend-store-uri", "sqlite:///server.db", "--artifacts-destination", "artifacts"]
    mlflow = str(Path(sys.executable).with_name("mlflow"))
    server = Server(tmp_path / "server", [mlflow, "server", "--port", "PORT", *store])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    yield server
    server.kill()


def the_run(uri: str) -> tuple[Any, Any]:
    """A client, and the only run of the experiment `toy`."""
    client, (run,) = runs_at(uri)
    return client, run


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
            assert the_run(server.uri)[1].data.metrics == {"x": 2 / 3}
            server.kill()
    if back_in_time:
        server.start()
    run_id = run.finish()
    assert capsys.readouterr().err.count("warning: ") == 1 and len(unsent()) == (not back_in_time)
    if not back_in_time:
        server.start()
        assert mlflow_import(uri=server.uri) == (0, f"toy one: run {run_id}\n", "")
    assert unsent() == []
    client, found = the_run(server.uri)
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
    run = MlflowRun(sys.argv[2], number, {"number": number}, {})
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


def write_at_once(uri: str, count: int, experiment: str = "toy") -> None:
    """Runs in processes of their own; all metrics of each are there afterwards, and no process had to wait for too long."""
    program = [sys.executable, "-c", WRITERS, str(count), experiment]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert unsent() == []
    written = dict(line.split() for line in done.stdout.splitlines())
    assert len(written) == count
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    for number, run_id in written.items():
        run = client.get_run(run_id)
        assert (run.data.params, run.info.status) == ({"number": number}, "FINISHED")
        for key in ("metric0", "metric19"):
            assert history(client, run, key) == [(step, float(step)) for step in range(50)]
    assert len(client.search_runs([client.get_experiment_by_name(experiment).experiment_id])) == count


def test_eight_processes_write_to_one_new_database(workdir: Path) -> None:
    write_at_once(f"sqlite:///{workdir}/mlflow.db", 8)


# --------------------------------------------------------------------------------------------------------- make mlflow-server


@pytest.fixture
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """`make mlflow-server` in a new folder, with the tests' environment and more; the working folder is another."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "workflow/mlflow_server.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    make = ["make", "--old-file", f"{sys.prefix}/.installed", f"VENV={sys.prefix}", "mlflow-server"]
    with ExitStack() as stack:

        def start(**environment: str) -> Server:
            server = Server(tmp_path, make, {"MLFLOW_PORT": "PORT", **environment})
            stack.callback(server.kill)
            server.start()
            return server

        yield start


def listens_on(port: int) -> set[str]:
    """The addresses on which this machine's programs take connections at a port."""
    found = psutil.net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def write_one_run(uri: str) -> str:
    Path("note.txt").write_text("kept")
    run = MlflowRun("toy", "one", {"a": 1}, {})
    run.log({"x": 0.5}, step=3)
    run.artifact(Path("note.txt"))
    run_id = run.finish()
    assert run_id is not None
    _, found = the_run(uri)
    assert (found.info.run_id, found.data.metrics, found.data.params) == (run_id, {"x": 0.5}, {"a": "1"})
    return run_id


def test_make_mlflow_server_serves_other_machines(
    tmp_path: Path, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(MLFLOW_HOST="0.0.0.0")
    assert listens_on(server.port) == {"0.0.0.0"}
    uri = f"http://{socket.gethostname()}:{server.port}"  # as other nodes call it
    assert f"export MLFLOW_TRACKING_URI={uri}" in server.log.read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run_id = write_one_run(uri)
    assert sqlite3.connect(tmp_path / "mlflow.db").execute("SELECT run_uuid FROM runs").fetchall() == [(run_id,)]
    assert [path.read_text() for path in (tmp_path / "mlruns/server").rglob("note.txt")] == ["kept"]


def test_make_mlflow_server_with_a_password_answers_only_who_knows_it(
    tmp_path: Path, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "open 100% sesame"
    server = make_server(MLFLOW_PASSWORD=secret)
    assert secret not in server.log.read_text()
    assert [(tmp_path / "mlruns" / name).stat().st_mode & 0o077 for name in ("auth.ini", "auth.db")] == [0, 0]
    question = f"{server.uri}/api/2.0/mlflow/experiments/search?max_results=1"
    for user in ({}, {"auth": ("admin", "open 100% simsim")}):
        assert requests.get(question, timeout=30, **user).status_code == 401
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", secret)
    write_one_run(server.uri)
    assert listens_on(server.port) == {"127.0.0.1"}


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The URI of a new PostgreSQL database, run by another user where the tests run as root, which PostgreSQL refuses."""
    found = shutil.which("initdb") or next(iter(sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")))), None)
    if found is None:
        pytest.skip("PostgreSQL's initdb is not installed (Debian: postgresql)")
    root = os.geteuid() == 0
    user = next((u.pw_name for u in pwd.getpwall() if u.pw_name in {"postgres", "nobody"}), None) if root else None
    if root and user is None:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")
    folder = Path(tempfile.mkdtemp())  # pytest's own are closed to other users
    if user is not None:
        shutil.chown(folder, user)
    port, programs = free_port(), Path(found).parent
    server = [str(programs / "pg_ctl"), "-D", f"{folder}/data", "-w"]
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
    try:
        initdb = [found, "-D", f"{folder}/data", "-U", "study", "-A", "trust"]
        subprocess.run(initdb, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*server, "-l", f"{folder}/log", "-o", options, "start"], user=user, cwd=folder, check=True)
        yield f"postgresql://study@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*server, "-m", "immediate", "stop"], user=user, cwd=folder, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_make_mlflow_server_keeps_runs_in_postgresql(
    tmp_path: Path, postgresql: str, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(MLFLOW_BACKEND=postgresql, MLFLOW_WORKERS="2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    run_id = write_one_run(server.uri)
    import psycopg2

    with psycopg2.connect(postgresql) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT run_uuid, key, value, step FROM metrics")
        assert cursor.fetchall() == [(run_id, "x", 0.5, 3)]
    assert not (tmp_path / "mlflow.db").exists()
    write_at_once(server.uri, 4, "new")
