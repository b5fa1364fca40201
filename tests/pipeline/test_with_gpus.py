"""workflow/with_gpus.py: who gets which GPU, and what is left of a command that is told to stop."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipeline_parts import ROOT, TRAINING, environment, processes
from waiting import wait_for

sys.path.insert(0, str(ROOT / "workflow"))

import with_gpus

WITH_GPUS = ROOT / "workflow" / "with_gpus.py"


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of locks, apart from that of other tests."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary / f"grpo-gpus-{os.getuid()}"


def start(folder: Path, count: int, *command: str, **extra: str) -> subprocess.Popen[str]:
    """Start with_gpus.py on a machine with the devices 0 and 1."""
    return subprocess.Popen(
        [sys.executable, str(WITH_GPUS), str(count), "--", *command], cwd=folder, text=True,
        env=environment(**{"CUDA_VISIBLE_DEVICES": "0,1", **extra}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until_released(name: str) -> list[str]:
    """A command that writes the devices it sees to NAME.devices, and ends when NAME.go exists."""
    return ["sh", "-c", f"echo $CUDA_VISIBLE_DEVICES > {name}.tmp; mv {name}.tmp {name}.devices; "
            f"while [ ! -e {name}.go ]; do sleep 0.05; done"]  # fmt: skip


def test_concurrent_commands_get_distinct_devices_and_the_third_waits(tmp_path: Path) -> None:
    first, second = (start(tmp_path, 1, *until_released(name)) for name in "ab")
    wait_for(lambda: len(list(tmp_path.glob("[ab].devices"))) == 2)
    assert {(tmp_path / f"{name}.devices").read_text().strip() for name in "ab"} == {"0", "1"}
    third = start(tmp_path, 2, *until_released("c"))
    (tmp_path / "a.go").touch()
    assert first.wait(30) == 0
    time.sleep(0.5)
    assert not (tmp_path / "c.devices").exists()  # it needs both
    (tmp_path / "b.go").touch()
    (tmp_path / "c.go").touch()
    assert second.wait(30) == third.wait(30) == 0
    assert (tmp_path / "c.devices").read_text().strip() == "0,1"


def test_more_devices_than_exist_are_refused_and_none_are_not_handed_out(tmp_path: Path, own_locks: Path) -> None:
    more, none = start(tmp_path, 3, "true"), start(tmp_path, 0, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 3")
    text = more.communicate(timeout=30)[0]
    assert "3 GPU(s) asked for, but this machine offers 2 (0, 1)" in text and "params.yaml" in text
    assert none.communicate(timeout=30)[0] == "0,1\n" and not own_locks.exists()
    assert (more.returncode, none.returncode) == (2, 3)
    killed, absent = start(tmp_path, 0, "sh", "-c", "kill -9 $$"), start(tmp_path, 0, "no-such-command")
    assert "with_gpus.py: " in absent.communicate(timeout=30)[0] and (killed.wait(30), absent.returncode) == (137, 2)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this name that lists two GPUs as `nvidia-smi --query-gpu=index,uuid --format=csv,noheader` does."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho No devices of another kind\necho 0, GPU-a\necho 1, GPU-b\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "offered"),
    [
        *(("", []), ("-1", []), ("1,-1,0", ["GPU-b"]), (" 0 , 1 ", ["GPU-a", "GPU-b"])),
        *(("7", ["7"]), ("GPU-b", ["GPU-b"]), (None, ["GPU-a", "GPU-b"])),
    ],
)
def test_visible_devices(visible: str | None, offered: list[str], nvidia_smi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(with_gpus.devices().values()) == offered


def test_two_clones_do_not_take_the_same_gpu(nvidia_smi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One names it by number, the other by UUID; a third, which has both GPUs to choose from, takes the other one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with with_gpus.hold(1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
        with pytest.raises(pytest.fail.Exception, match="it waits"), with_gpus.hold(1):
            pass
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with with_gpus.hold(1) as third:
            assert third == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as nvidia-smi numbers them


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_leaves_nothing_running_and_frees_its_devices(tmp_path: Path, signum: signal.Signals) -> None:
    # The grandchild would outlive its parent, as a training outlives a killed dvc.
    process = start(tmp_path, 2, "sh", "-c", "sleep 54321 & touch started; wait")
    wait_for((tmp_path / "started").exists)
    process.send_signal(signum)
    assert process.wait(30) == with_gpus.RESUME_ME
    wait_for(lambda: not processes(tmp_path))
    assert start(tmp_path, 2, "true").wait(30) == 0


def test_a_stage_that_the_system_killed_is_told_as_memory_that_ran_out(tmp_path: Path) -> None:
    dvc_says = "ERROR: failed to reproduce 'train': failed to run: grpo train, exited with -9"
    command = [sys.executable, str(WITH_GPUS), "0", "--log", "log", "--", "sh", "-c", f'echo "{dvc_says}"; exit 255']
    told = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True).stdout
    assert "failed with exit code 255" in told and "It was killed" in told and "memory" in told and "mem_mb" in told


@pytest.mark.parametrize(
    ("code", "log", "told"),
    [
        (0, "a\nwarning: b\n", "2 of 3 stages: train, 1:05, with warnings (see train.log)\n"),
        (0, "bar\rwarning: b\n", "2 of 3 stages: train, 1:05, with warnings (see train.log)\n"),
        (0, "no warning: b\n", "2 of 3 stages: train, 1:05\n"),
        (75, "\x1bx\ty\n", "train was told to stop after 1:05. The end of its log:\n  | \ufffdx\ty\nFull log: train.log\n"),
        (1, "\n".join(map(str, range(30))), "train failed with exit code 1 after 1:05. The end of its log:\n  | 10\n  | 11\n"),
        (255, "exited with 137\nand more\n", "It was killed"),
        (255, "exited with 1370\n", "  | exited with 1370\nFull log: train.log\n"),
    ],
)
def test_how_a_stage_ended_is_told_in_few_lines(
    code: int, log: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.log", "one.done", "two.done", "three.off"):
        Path(name).write_text(log)
    options = argparse.Namespace(log=Path("train.log"), stamp=Path("one.done"), stages=3)
    with_gpus.report(code, options, 64.6)
    said = capsys.readouterr().out
    assert told in said and (code or said == told) and ("It was killed" in said) == ("It was killed" in told)
    options.stamp = Path("three.off")
    with_gpus.report(code, options, 64.6)
    assert capsys.readouterr().out == (said if code else "")


@pytest.mark.parametrize(
    ("signum", "since_first", "in_slurm", "ends"),
    [
        *((signal.SIGTERM, None, True, True), (signal.SIGTERM, 0.99, False, False), (signal.SIGINT, 0.99, False, False)),
        *((signal.SIGTERM, 1.0, True, False), (signal.SIGTERM, 1.0, False, True), (signal.SIGINT, 1.0, True, True)),
    ],
)
def test_a_signal_asks_once_and_ends_it_the_second_time(
    signum: int, since_first: float | None, in_slurm: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_gpus, "time", SimpleNamespace(monotonic=lambda: 1.0))
    monkeypatch.setattr(with_gpus, "asked_at", [] if since_first is None else [1.0 - since_first])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if not in_slurm:
        monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(SystemExit, match=str(128 + signum)) if ends else nullcontext():
        with_gpus.stop(signum, None)


@pytest.mark.parametrize(("log", "interrupted"), [(None, True), ("it > x\n", True), ("Running\n> grpo train\n", False)])
def test_dvc_itself_is_interrupted_until_it_has_announced_its_command(
    tmp_path: Path, log: str | None, interrupted: bool
) -> None:
    (tmp_path / "log").write_text(log or "")
    process = subprocess.Popen(["sleep", "60"])
    with_gpus.tell_to_stop(process.pid, tmp_path / "log" if log else None)
    if not interrupted:
        process.kill()
    assert process.wait(30) == -(signal.SIGINT if interrupted else signal.SIGKILL)


# Stands in for dvc: SIGTERM would end it, SIGINT too, but while its command runs. This one, as `grpo train`, finishes its step.
DVC_STAND_IN = """
import pathlib, signal, subprocess, sys, time
print("> training", flush=True)
interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
code = subprocess.call([sys.executable, "-c", sys.argv[1]])
signal.signal(signal.SIGINT, interrupted)
pathlib.Path("storing").touch()
time.sleep(1)
sys.exit(1 if code else 0)
"""


def started_training(folder: Path, finishing: float, code: int, **extra: str) -> subprocess.Popen[str]:
    """with_gpus.py in a process group of its own, with a stand-in of dvc, whose command takes so long to finish its step."""
    command = [sys.executable, "-c", DVC_STAND_IN, TRAINING % (finishing, code)]
    process = subprocess.Popen(
        [sys.executable, str(WITH_GPUS), "0", "--log", "log", "--stamp", "stamp", "--", *command], cwd=folder,
        env=environment(**extra), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_for((folder / "started").exists)
    return process


@pytest.mark.slow
def test_sigterm_to_every_process_lets_the_step_be_finished(tmp_path: Path) -> None:
    process = started_training(tmp_path, 1.5, with_gpus.RESUME_ME)
    for each in processes(tmp_path):  # as Slurm does it
        each.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == with_gpus.RESUME_ME and "Told to stop, and stopped" in text and "Full log: log" in text
    assert (tmp_path / "saved").exists() and not (tmp_path / "stamp").exists()
    assert not processes(tmp_path)


@pytest.mark.slow
def test_dvc_is_not_interrupted_while_it_stores_results(tmp_path: Path) -> None:
    process = started_training(tmp_path, 0, 0)
    training = min(processes(tmp_path), key=lambda each: len(each.children(recursive=True)))
    training.send_signal(signal.SIGTERM)  # so that it ends
    wait_for((tmp_path / "storing").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and (tmp_path / "stamp").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_and_an_echo_of_the_first_does_not(tmp_path: Path, signum: signal.Signals) -> None:
    process = started_training(tmp_path, 54321, 0)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signum)
    time.sleep(with_gpus.SAME_REQUEST_SECONDS)
    assert process.poll() is None
    process.send_signal(signum)
    assert process.wait(5) == 128 + signum
    wait_for(lambda: not processes(tmp_path))
    assert not (tmp_path / "saved").exists() and not (tmp_path / "stamp").exists()


@pytest.mark.nightly
def test_slurms_second_sigterm_leaves_the_time_that_slurm_leaves(tmp_path: Path) -> None:
    process = started_training(tmp_path, with_gpus.SAME_REQUEST_SECONDS + 1.5, with_gpus.RESUME_ME, SLURM_JOB_ID="7")
    for pause in (with_gpus.SAME_REQUEST_SECONDS + 0.2, 0):
        process.send_signal(signal.SIGTERM)
        time.sleep(pause)
    assert process.wait(30) == with_gpus.RESUME_ME and (tmp_path / "saved").exists()


@pytest.mark.parametrize("how", ["another's", "open to others", "open to a group", "a link", "a link in it"])
def test_a_folder_of_locks_that_others_could_have_made_is_refused(tmp_path: Path, own_locks: Path, how: str) -> None:
    """A link in it would have made a file elsewhere."""
    made, theirs = tmp_path / "made", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if how == "a link":
        own_locks.symlink_to(theirs)
    else:
        own_locks.mkdir()
        own_locks.chmod({"open to others": 0o777, "open to a group": 0o710}.get(how, 0o700))
    (own_locks / "queue.lock").symlink_to(made)
    if how == "another's":
        if os.getuid():
            pytest.skip("only root can make a folder of another user")
        os.chown(own_locks, 65534, 65534)
    process = start(tmp_path, 1, "true")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and not made.exists()
    assert "is not a folder of yours alone" in said or how == "a link in it"
