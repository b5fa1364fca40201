"""The Ray cluster that a study's asynchronous runs share: when there is one, who is told of it, and how it ends."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from fork_server_parts import SHOW, fork, wait_for
from workflow_parts import ROOT

sys.path.insert(0, str(ROOT / "workflow"))

import fork_server
import ray_cluster

ACTORS = """
import grpo.training.asynchronous, os, ray, sys, time, torch
ray.init(address=os.environ["RAY_ADDRESS"])
class Actor:
    def sum(self):
        return float(torch.ones(3).sum())
actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(3)]
print(ray.get([actor.sum.remote() for actor in actors]), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    experiments = {"lags": {"arms": {"one": {"asynchronous": {"max_policy_lag": 1}}}}, "plain": {"arms": {"one": {}}}}
    resources = {"asynchronous": {"cpus": 2}}
    Path("params.yaml").write_text(json.dumps({"threads": 1, "experiments": experiments, "resources": resources}))
    Path(".stamps").mkdir()
    names = ("lags@one-0", "lags@one-1", "plain@one-0", "page")
    Path(".stamps/plan.json").write_text(json.dumps([{"stage": name, "stamp": f".stamps/{name}.done"} for name in names]))
    return tmp_path


def test_there_is_one_where_an_asynchronous_run_is_to_come(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".stamps/lags@one-0.done").touch()
    assert ray_cluster.is_wanted()
    with monkeypatch.context() as env:
        env.setenv("RAY_ADDRESS", "elsewhere:6379")
        assert not ray_cluster.is_wanted()
    Path(".stamps/lags@one-1.done").touch()
    assert not ray_cluster.is_wanted()
    params = json.loads(Path("params.yaml").read_text())
    Path("params.yaml").write_text(json.dumps(params | {"grpo": {"asynchronous": {"max_policy_lag": 1}}}))
    assert ray_cluster.is_wanted(), "the study's own method is asynchronous, and the plain experiment has not run"


def test_it_starts_where_the_folder_for_temporary_files_has_a_long_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As batch systems have it, where Ray's sockets would have names longer than the kernel's 107 characters."""
    temporary = project / "of-the-batch-system" / "job-1234567-of-some-user"
    temporary.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    cluster = ray_cluster.Cluster()
    try:
        wait_for(lambda: cluster.environment() or cluster._process.poll() is not None, 120)
        assert cluster.environment()
    finally:
        cluster._process.send_signal(ray_cluster.END)
        cluster._process.wait()


@pytest.fixture
def server(project: Path) -> Iterator[Popen[bytes]]:
    Path("show.py").write_text(SHOW)
    Path("actors.py").write_text(ACTORS)
    process = fork_server.start()
    wait_for(fork_server.SOCKET.exists)
    yield process
    atexit.unregister(fork_server.stop)
    fork_server.stop(process)


def address() -> str | None:
    process, log = fork("show", "0")
    assert process.wait() == 0
    found: str | None = json.loads(log.read_text())["env"].get("RAY_ADDRESS")
    return found


@pytest.mark.slow
def test_it_serves_one_run_after_another_and_ends_with_the_server(server: Popen[bytes]) -> None:
    wait_for(address, 120)
    of_ray = psutil.Process(server.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in of_ray)

    def actors() -> list[psutil.Process]:
        found = []
        for each in psutil.Process(server.pid).children(recursive=True):
            with suppress(psutil.Error):  # it is just ending
                found += [each] * ("Actor" in "".join(each.cmdline()))
        return found

    killed, log = fork("actors", "600", env=dict(os.environ))
    wait_for(lambda: "[3.0, 3.0, 3.0]" in log.read_text())
    assert len(actors()) == 3
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: not actors())
    process, log = fork("actors", "0", env=dict(os.environ))
    assert process.wait() == 0, log.read_text()
    assert "[3.0, 3.0, 3.0]" in log.read_text()

    server.kill()
    assert not psutil.wait_procs(of_ray, timeout=60)[1]


@pytest.mark.slow
def test_when_it_has_died_runs_are_not_told_of_it(server: Popen[bytes]) -> None:
    wait_for(address, 120)
    (cluster,) = (process for process in psutil.Process(server.pid).children() if "ray_cluster" in " ".join(process.cmdline()))
    of_ray = cluster.children(recursive=True)
    cluster.send_signal(ray_cluster.END)
    wait_for(lambda: address() is None)
    assert not psutil.wait_procs(of_ray, timeout=60)[1]
