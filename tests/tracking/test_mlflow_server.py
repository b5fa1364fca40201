"""Many writers at once, and tracking servers that come, go, and are made by `make mlflow-server`."""

from __future__ import annotations

import math
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from grpo.cli import main
from grpo.study import paths
from grpo.tracking.mlflow_client import MlflowRun
from grpo.tracking.mlflow_sync import ROUND_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 120  # within which a server is there, on a busy machine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(condition: Callable[[], Any]) -> Any:
    """What ``condition`` gives once it is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.2)
    return found


class Server:
    """A tracking server on a port of its own, that can be killed and started again."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str] | None = None, port: int | None = None):
        self.port = port or free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self._command = folder, command
        # Each of its workers, four where nothing else is said, imports MLflow for itself.
        fewer = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_WORKERS": "1"}
        self._environment = {**fewer, **os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / f"server-{self.port}.log"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [part.replace("PORT", str(self.port)) for part in self._command],
                cwd=self._folder,
                env={key: value.replace("PORT", str(self.port)) for key, value in self._environment.items()},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """End it with all its processes, at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


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
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    return client, run


def history(client: Any, run_id: str, key: str) -> list[tuple[int, float]]:
    """(step, value), in their order."""
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, key))


def unsent() -> list[Path]:
    """The folders that are left."""
    return sorted(paths.UNSENT_METRICS.glob("*"))


def mlflow_import(monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of ``grpo mlflow_import``."""
    monkeypatch.setattr(sys, "argv", ["grpo", "mlflow_import"])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def start_and_lose(server: Server) -> MlflowRun:
    """A run whose server dies after its first metrics."""
    server.start()
    run = MlflowRun("toy", "one", {"a": 1}, {"stage": "toy@one"})
    for step in range(3):
        run.log({"x": step / 3}, step=step)
    wait_for(lambda: _has_metrics(server))
    server.kill()
    for step in range(3, 6):
        run.log({"x": step / 3}, step=step)
    time.sleep(3 * ROUND_SECONDS)  # it is tried, in vain
    for step in range(6, 9):
        run.log({"x": step / 3}, step=step)
    return run


def _has_metrics(server: Server) -> bool:
    try:
        return bool(the_run(server.uri)[1].data.metrics)
    except (AttributeError, ValueError):  # no experiment, or no run in it
        return False


# ---------------------------------------------------------------------------------------------------- servers that are away


def test_a_server_that_starts_after_the_run_gets_all_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time() * 1000
    run = MlflowRun("toy", "one", {"a": 1, "b": None}, {"stage": "toy@one"})
    logged = []
    for step in range(4):
        run.log({"x": step / 3, "y": math.inf if step == 2 else -1e-300}, step=step)
        logged.append(time.time() * 1000)
        time.sleep(0.05)
    note = Path("note.txt")
    note.write_text("kept")
    run.artifact(note)
    run.tag(checkpoint_digest="abc")
    assert run.finish() is None
    ended = time.time() * 1000
    assert f"MLflow at {server.uri} could not be written" in capsys.readouterr().err

    server.start()
    assert mlflow_import(monkeypatch) == 0
    client, found = the_run(server.uri)
    assert capsys.readouterr().out == f"toy one: run {found.info.run_id}, 8 metrics\n"
    assert unsent() == []
    assert (found.info.run_name, found.info.status, found.data.params) == ("one", "FINISHED", {"a": "1", "b": "None"})
    assert {"stage": "toy@one", "checkpoint_digest": "abc"}.items() <= found.data.tags.items()
    assert began - 1 <= found.info.start_time <= logged[0] and logged[-1] <= found.info.end_time <= ended
    assert history(client, found.info.run_id, "x") == [(step, step / 3) for step in range(4)]
    assert [value for _, value in history(client, found.info.run_id, "y")] == [-1e-300, -1e-300, sys.float_info.max, -1e-300]
    times = sorted(metric.timestamp for metric in client.get_metric_history(found.info.run_id, "x"))
    assert all(abs(ours - theirs) < 40 for ours, theirs in zip(logged, times, strict=True))
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["note.txt"]
    assert [file.read_text() for file in (server._folder / "artifacts").rglob("note.txt")] == ["kept"]


def test_a_server_that_dies_and_stays_away_gets_the_rest_later(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_and_lose(server)
    run_id = run.finish()
    (left,) = unsent()
    assert f"grpo mlflow_import {left.absolute()}" in capsys.readouterr().err

    shutil.copytree(left, "twin")
    server.start()
    assert mlflow_import(monkeypatch) == 0
    shutil.copytree("twin", left)
    assert mlflow_import(monkeypatch) == 0  # twice, which doubles nothing
    assert unsent() == []
    client, found = the_run(server.uri)
    assert (found.info.run_id, found.info.status, found.data.params) == (run_id, "FINISHED", {"a": "1"})
    assert history(client, found.info.run_id, "x") == [(step, step / 3) for step in range(9)]


def test_the_rest_of_a_run_goes_nowhere_else(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = start_and_lose(server).finish()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert mlflow_import(monkeypatch) == 2
    assert len(unsent()) == 1
    error = capsys.readouterr().err
    assert f"it continues run {run_id}, which {server.uri} has and sqlite:///{Path.cwd()}/mlflow.db has not" in error


def test_a_server_that_dies_and_comes_back_leaves_nothing_to_do(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run = start_and_lose(server)
    server.start()
    run_id = run.finish()
    assert "warning" not in capsys.readouterr().err
    assert unsent() == []
    client, found = the_run(server.uri)
    assert (found.info.run_id, found.info.status) == (run_id, "FINISHED")
    assert history(client, found.info.run_id, "x") == [(step, step / 3) for step in range(9)]


# --------------------------------------------------------------------------------------------------------------- many writers

WRITER = """
import sys
from grpo.tracking.mlflow_client import MlflowRun
run = MlflowRun(sys.argv[2], sys.argv[1], {"number": sys.argv[1]}, {})
for step in range(50):
    run.log({f"metric{i}": float(step) for i in range(20)}, step=step)
print(run.finish())
"""


def write_at_once(uri: str, count: int, experiment: str = "toy") -> None:
    """Runs in processes of their own; all metrics of each are there afterwards, and no process had to wait for too long."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(number), experiment],
            # As jobs of Slurm, each of which has a process of its own that writes.
            env={**os.environ, "MLFLOW_TRACKING_URI": uri, "SLURM_JOB_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    ended = [writer.communicate(timeout=400) for writer in writers]
    assert not any("warning" in errors for _, errors in ended)
    assert unsent() == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    for number, (output, _) in enumerate(ended):
        run = client.get_run(output.split()[-1])
        assert (run.data.params, run.info.status) == ({"number": str(number)}, "FINISHED")
        for key in ("metric0", "metric19"):
            assert history(client, run.info.run_id, key) == [(step, float(step)) for step in range(50)]
    assert len(client.search_runs([client.get_experiment_by_name(experiment).experiment_id])) == count


def test_eight_processes_write_to_one_new_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_at_once(f"sqlite:///{tmp_path}/mlflow.db", 8)


def test_a_database_that_is_locked_for_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert MlflowRun("toy", "first", {}, {}).finish() is not None
    run = MlflowRun("toy", "second", {}, {})
    other = sqlite3.connect("mlflow.db", check_same_thread=False, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    threading.Timer(30, lambda: other.execute("COMMIT")).start()  # longer than MLflow's own 20 s
    began = time.monotonic()
    run.log({"x": 1.0}, step=0)
    assert run.finish() is not None
    assert time.monotonic() - began > 25
    assert "warning" not in capsys.readouterr().err
    other.close()


# --------------------------------------------------------------------------------------------------------- make mlflow-server


@pytest.fixture
def makefile(tmp_path: Path) -> list[str]:
    """`make mlflow-server` in a new folder, with the environment the tests run in."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "workflow").mkdir()
    shutil.copy(ROOT / "workflow/mlflow_server.py", tmp_path / "workflow")
    return ["make", "--old-file", f"{sys.prefix}/.installed", f"VENV={sys.prefix}", "mlflow-server"]


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


def test_make_mlflow_server_serves_other_machines(tmp_path: Path, makefile: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, makefile, {"MLFLOW_PORT": "PORT", "MLFLOW_HOST": "0.0.0.0"})
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    try:
        server.start()
        assert listens_on(server.port) == {"0.0.0.0"}
        uri = f"http://{socket.gethostname()}:{server.port}"  # as other nodes call it
        assert f"export MLFLOW_TRACKING_URI={uri}" in server.log.read_text()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run_id = write_one_run(uri)
        assert sqlite3.connect(tmp_path / "mlflow.db").execute("SELECT run_uuid FROM runs").fetchall() == [(run_id,)]
        assert [path.read_text() for path in (tmp_path / "mlruns/server").rglob("note.txt")] == ["kept"]
    finally:
        server.kill()


def test_make_mlflow_server_with_a_password_answers_only_who_knows_it(
    tmp_path: Path, makefile: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "open 100% sesame"
    server = Server(tmp_path, makefile, {"MLFLOW_PORT": "PORT", "MLFLOW_PASSWORD": secret})
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    try:
        server.start()
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
    finally:
        server.kill()


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
    tmp_path: Path, makefile: list[str], postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, makefile, {"MLFLOW_PORT": "PORT", "MLFLOW_BACKEND": postgresql, "MLFLOW_WORKERS": "2"})
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    try:
        server.start()
        run_id = write_one_run(server.uri)
        import psycopg2

        with psycopg2.connect(postgresql) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT run_uuid, key, value, step FROM metrics")
            assert cursor.fetchall() == [(run_id, "x", 0.5, 3)]
        assert not (tmp_path / "mlflow.db").exists()
        write_at_once(server.uri, 4, "new")
    finally:
        server.kill()
