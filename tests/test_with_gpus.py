"""workflow/with_gpus.py: who gets which GPU, and what is left of a command that is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workflow_parts import ROOT, TRAINING, environment, processes, processes_in, wait_for

sys.path.insert(0, str(ROOT / "workflow"))

import with_gpus

WITH_GPUS = ROOT / "workflow" / "with_gpus.py"


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


def test_more_devices_than_exist_are_refused(tmp_path: Path) -> None:
    process = start(tmp_path, 3, "true")
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "3 GPU(s) asked for, but this machine offers 2 (0, 1)" in text and "params.yaml" in text


def test_under_slurm_and_without_gpus_nothing_is_handed_out(tmp_path: Path) -> None:
    under_slurm = start(tmp_path, 2, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="5")
    without = start(tmp_path, 0, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 3")
    assert under_slurm.communicate(timeout=30)[0] == "5\n"
    assert without.communicate(timeout=30)[0] == "0,1\n"
    assert (under_slurm.returncode, without.returncode) == (0, 3)
    assert not (tmp_path / ".stamps").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_leaves_nothing_running_and_frees_its_devices(tmp_path: Path, signum: signal.Signals) -> None:
    # The grandchild would outlive its parent, as a training outlives a killed dvc.
    process = start(tmp_path, 2, "sh", "-c", "sleep 54321 & touch started; wait")
    wait_for((tmp_path / "started").exists)
    process.send_signal(signum)
    assert process.wait(30) == with_gpus.RESUME_ME
    wait_for(lambda: not processes_in(tmp_path))
    assert start(tmp_path, 2, "true").wait(30) == 0


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
        [sys.executable, str(WITH_GPUS), "0", "--log", "log", "--stamp", "stamp", "--", *command], cwd=folder, text=True,
        env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_for((folder / "started").exists)
    return process


def test_sigterm_to_every_process_lets_the_step_be_finished(tmp_path: Path) -> None:
    process = started_training(tmp_path, 1.5, with_gpus.RESUME_ME)
    for each in processes(tmp_path):  # as Slurm does it
        each.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == with_gpus.RESUME_ME and "Told to stop" in text and "All of it: log" in text
    assert (tmp_path / "saved").exists() and not (tmp_path / "stamp").exists()
    assert not processes_in(tmp_path)


def test_what_was_told_to_stop_but_came_to_its_end_is_done(tmp_path: Path) -> None:
    process = started_training(tmp_path, 0, 0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0 and (tmp_path / "stamp").exists()


def test_dvc_is_not_interrupted_while_it_stores_results(tmp_path: Path) -> None:
    process = started_training(tmp_path, 0, 0)
    training = min(processes(tmp_path), key=lambda each: len(each.children(recursive=True)))
    training.send_signal(signal.SIGTERM)  # so that it ends
    wait_for((tmp_path / "storing").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and (tmp_path / "stamp").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_and_an_echo_of_the_first_does_not(tmp_path: Path, signum: signal.Signals) -> None:
    process = started_training(tmp_path, 54321, 0)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signum)
    time.sleep(with_gpus.SAME_WISH_SECONDS)
    assert process.poll() is None
    process.send_signal(signum)
    assert process.wait(5) == 128 + signum
    wait_for(lambda: not processes_in(tmp_path))
    assert not (tmp_path / "saved").exists() and not (tmp_path / "stamp").exists()


def test_slurms_second_sigterm_leaves_the_time_that_slurm_leaves(tmp_path: Path) -> None:
    process = started_training(tmp_path, with_gpus.SAME_WISH_SECONDS + 1.5, with_gpus.RESUME_ME, SLURM_JOB_ID="7")
    for pause in (with_gpus.SAME_WISH_SECONDS + 0.2, 0):
        process.send_signal(signal.SIGTERM)
        time.sleep(pause)
    assert process.wait(30) == with_gpus.RESUME_ME and (tmp_path / "saved").exists()
