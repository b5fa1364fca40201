"""Processes that the fork server makes: what they get, what becomes of them, and when there is no server."""

from __future__ import annotations

import atexit
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fork_server_parts import SHOW, fork, wait_for
from workflow_parts import ROOT

sys.path.insert(0, str(ROOT / "workflow"))

import fork_server

WAIT = "import time; print('here', flush=True); time.sleep(600)"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("study: mini\n")
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "wait.py").write_text(WAIT)
    process = fork_server.start()
    wait_for(fork_server.SOCKET.exists)
    yield process
    atexit.unregister(fork_server.stop)
    fork_server.stop(process)
    assert not fork_server.SOCKET.exists()


def test_a_forked_process_is_like_one_that_was_started(server: subprocess.Popen[bytes]) -> None:
    process, log = fork("show", "3", "four")
    assert process.wait() == 3
    shown = json.loads(log.read_text())
    assert shown["arguments"] == ["show.py", "3", "four"]
    assert (shown["cwd"], shown["group"], shown["input"]) == (str(Path.cwd()), process.pid, "")
    assert shown["env"] == {"ONLY": "this"}


def test_processes_have_the_libraries_and_not_the_projects_code(server: subprocess.Popen[bytes]) -> None:
    def modules() -> set[str]:
        process, log = fork("show", "0")
        assert process.wait() == 0
        return set(json.loads(log.read_text())["modules"])

    wait_for(lambda: {"dvc", "torch", "vl_convert"} <= modules())
    assert not {"grpo", "peft"} & modules()


def test_only_its_user_may_ask(server: subprocess.Popen[bytes]) -> None:
    assert stat.S_IMODE(fork_server.SOCKET.stat().st_mode) & 0o077 == 0


def test_its_end_by_a_signal_is_told_and_others_go_on(server: subprocess.Popen[bytes]) -> None:
    (first, log), (second, _) = fork("wait"), fork("show", "0", group=os.getpgrp())
    assert second.wait() == 0
    assert json.loads(Path("show.log").read_text())["group"] == os.getpgrp()
    wait_for(log.read_text)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL


def test_it_does_not_outlive_its_client(server: subprocess.Popen[bytes]) -> None:
    process, log = fork("wait")
    wait_for(log.read_text)
    child = psutil.Process(process.pid)
    del process
    child.wait(20)


def test_nor_the_server_itself(server: subprocess.Popen[bytes]) -> None:
    process, log = fork("wait")
    wait_for(log.read_text)
    child = psutil.Process(process.pid)
    server.kill()
    assert process.wait() == -signal.SIGKILL
    child.wait(20)


def test_the_server_ends_with_its_last_process(server: subprocess.Popen[bytes]) -> None:
    process, log = fork("wait")
    wait_for(log.read_text)
    assert server.stdin is not None
    server.stdin.close()
    time.sleep(0.2)
    assert server.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 1
    assert "KeyboardInterrupt" in log.read_text()
    assert server.wait(20) == 0


@pytest.mark.parametrize("signum", fork_server.SIGNALS)
def test_what_comes_to_all_processes_ends_none_of_the_others(server: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    process, log = fork("wait")
    wait_for(log.read_text)
    server.send_signal(signum)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert server.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 1


def test_without_a_server_a_stage_is_started_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text(SHOW)
    command = [
        sys.executable,
        ROOT / "workflow/with_gpus.py",
        "0",
        "--fork",
        "--log",
        "log",
        "--",
        sys.executable,
        "show.py",
        "5",
    ]
    assert subprocess.run(command, check=False).returncode == 5
    shown = json.loads((tmp_path / "log").read_text())
    assert shown["arguments"] == ["show.py", "5"]
    assert "torch" not in shown["modules"]
