"""What `snakemake --profile local` shows: in a terminal (a pseudo-terminal here) and elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from mount_parts import can_mount, tmpfs
from tqdm import tqdm
from workflow_parts import ROOT, TRAINING, call, environment, new_repo, processes_in, wait_for

sys.path.insert(0, str(ROOT / "workflow"))

import with_gpus
from progress import Stage, clock, time_left

# An arm of two seeds that draws a bar as a training does, one that equals another, a stage that fails, and one that needs it.
DVC_YAML = """
stages:
  train:
    foreach: [grpo_x-low, grpo_x-high]
    do:
      cmd: python run.py ${item}
      outs: ["data/runs/${item}"]
  broken:
    cmd: echo it is the cheese && exit 3
    outs: [broken.txt]
  last:
    cmd: touch last.txt
    deps: [broken.txt]
    outs: [last.txt]
"""
RUN = """
import json, pathlib, sys, time
from tqdm import tqdm
name = sys.argv[1]
with tqdm(total=30, desc=name, unit="step", mininterval=0.1) as bar:
    for step in range(3 if name == "grpo_x-low" else 0):
        bar.update(5)
        bar.set_postfix_str(f"validation answer reward {step / 10:.3f}")
        time.sleep(1)
for seed, reward in enumerate({"grpo_x-low": [0.25, 0.75], "grpo_x-high": [0.7]}[name]):
    for kind, file, content in (
        ("runs", "metrics.json", {"val/answer_reward": reward}),
        ("timing", "timing.json", {"same_as": "grpo_w/high/0" if name == "grpo_x-high" else ""}),
    ):
        path = pathlib.Path("data", kind, name, str(seed), file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
"""


def new_study(repo: Path) -> Path:
    """The toy study in a new repository."""
    new_repo(repo)
    (repo / "dvc.yaml").write_text(DVC_YAML)
    (repo / "run.py").write_text(RUN)
    return repo


class Terminal:
    """A command in a terminal of its own, 120 columns wide, which it controls as a shell's terminal is controlled."""

    def __init__(self, repo: Path, *command: str):
        self.master, slave = os.openpty()
        termios.tcsetwinsize(slave, (40, 120))
        self.settings = termios.tcgetattr(slave)
        self.raw = b""
        env = environment(DVC_SITE_CACHE_DIR=str(repo / ".dvc" / "site"), TERM="xterm-256color")
        self.process = subprocess.Popen(command, cwd=repo, env=env, preexec_fn=lambda: os.login_tty(slave), pass_fds=[slave])
        self.slave = slave
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while chunk := os.read(self.master, 65536):
                self.raw += chunk

    @property
    def text(self) -> str:
        """All that was ever shown, without colours and the movements of the cursor."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.raw.decode(errors="replace")).replace("\r", "")

    def key(self, key: str) -> None:
        os.write(self.master, key.encode())

    def end(self) -> int:
        """Wait for the command; the terminal must then be as it was, its cursor visible. Returns the exit code."""
        code = self.process.wait(60)
        settings = termios.tcgetattr(self.slave)
        os.close(self.slave)
        self.reader.join()
        os.close(self.master)
        assert settings == self.settings and self.raw.rfind(b"\x1b[?25h") >= self.raw.rfind(b"\x1b[?25l")
        return code


def test_a_terminal_shows_running_finished_and_failed_stages(tmp_path: Path) -> None:
    shown = Terminal(new_study(tmp_path / "repo"), "snakemake", "--profile", "local", "--cores", "3")
    assert shown.end() == 1
    text = shown.text
    assert re.search(
        r"running +step +reward +time +left\n(.*\n)*?train@grpo_x-low +\d+/30 +0\.\d00 +\d+:\d\d +\d\d:\d\d", text
    ), text
    assert re.search(r"\d of 4 stages, \d+:\d\d, about \d+:\d\d left", text)
    assert re.search(r"\d of 4: train@grpo_x-low, \d+:\d\d, reward 0\.500\n", text)
    assert re.search(r"\d of 4: train@grpo_x-high, \d+:\d\d, reward 0\.700, taken over from grpo_w/high/0\n", text)
    assert re.search(r"broken failed after \d+:\d\d\..*\nThe end of its log:\n(  \| .*\n)*  \| it is the cheese\n", text)
    assert "Full log: logs/broken.log\n" in text
    assert text.rstrip().splitlines()[-1].startswith("2 of 4 stages in ")
    assert "1 failed, broken (logs/broken.log). The same command continues from here." in text
    assert "rule grpo_x" not in text and "CalledProcessError" not in text


@pytest.mark.skipif(not can_mount(), reason="mounting is not allowed")
def test_a_full_cache_is_named_with_its_remedy(tmp_path: Path) -> None:
    repo = new_study(tmp_path / "repo")
    (repo / "dvc.yaml").write_text("stages: {big: {cmd: head -c 3000000 /dev/zero > big.bin, outs: [big.bin]}}\n")
    cache = repo / ".dvc/cache"
    cache.mkdir()
    with tmpfs(cache, 1):
        text = call(repo, "snakemake", "--profile", "local", ok=False)
    assert (
        f"{cache}: DVC could not store the results, as the disk of its cache is full." in text
        and "Then run the same command again" in text
    )
    assert "1 stages in " in call(repo, "snakemake", "--profile", "local")


def test_warnings_of_stages_that_succeed_are_shown_at_the_end(tmp_path: Path) -> None:
    repo = new_study(tmp_path / "repo")
    (repo / "say.py").write_text(
        "import pathlib, sys\nname = sys.argv[1]\npathlib.Path(name).write_text(name)\n"
        "print('step 1\\rwarning: MLflow at x is away\\n  Kept for', name, file=sys.stderr)\n"
    )
    (repo / "dvc.yaml").write_text(
        'stages: {warned: {foreach: [a, b], do: {cmd: "python say.py ${item}", outs: ["${item}"]}}, '
        'quiet: {cmd: "echo no warning: here; mkdir -p reports; touch reports/index.html", outs: [reports/index.html]}}\n'
    )
    text = call(repo, "snakemake", "--profile", "local", "--cores", "1")
    profiles, *stages, first, second, third, last = text.splitlines()
    assert profiles.startswith("Using profiles local and ") and len(stages) == 3  # nothing else where there is no terminal
    assert all(re.fullmatch(r"\d of 3: (warned@[ab]|quiet), \d+:\d\d", line) for line in stages), text
    assert re.fullmatch("warned@[ab]: warning: MLflow at x is away", first) and re.fullmatch("  Kept for [ab]", second)
    assert third == "  and 1 more like it, in logs/" and text.count("warning") == 1
    assert last.startswith("3 stages in ") and last.endswith("The report is reports/index.html.")


def test_ctrl_c_lets_the_step_be_finished_and_leaves_the_terminal_in_order(tmp_path: Path) -> None:
    repo = new_study(tmp_path / "repo")
    (repo / "run.py").write_text(TRAINING % (0.5, with_gpus.RESUME_ME))
    shown = Terminal(repo, "snakemake", "--profile", "local", "train_grpo_x_low")
    wait_for(lambda: (repo / "started").exists() and "train@grpo_x-low" in shown.text)
    shown.key("\x03")
    assert shown.end() == 1 and (repo / "saved").exists()
    assert "Told to stop: running stages finish their step" in shown.text
    assert "train@grpo_x-low: Told to stop, and stopped. The same command continues" in shown.text
    assert "0 of 1 stages in " in shown.text and ", 0 failed. The same command continues" in shown.text
    assert not processes_in(repo)
    assert not any(json.loads((repo / ".dvc/tmp/rwlock").read_text()).values())  # nor a lock of DVC


def test_without_a_terminal_it_is_said_once_that_stages_were_told_to_stop(tmp_path: Path) -> None:
    repo = new_study(tmp_path / "repo")
    (repo / "run.py").write_text(TRAINING % (3, with_gpus.RESUME_ME))
    command = ("snakemake", "--profile", "local", "train_grpo_x_low")
    with (repo / "shown").open("w") as file:
        process = subprocess.Popen(
            command, cwd=repo, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    wait_for(lambda: (repo / "started").exists())
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    text = (repo / "shown").read_text()
    assert text.count("Told to stop: running stages finish their step") == 1, text
    assert process.returncode == 1 and (repo / "saved").exists()


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True], ids=["to all", "to Snakemake alone, then to all"])
def test_a_second_ctrl_c_ends_all_running_stages_at_once(tmp_path: Path, alone: bool) -> None:
    repo = new_study(tmp_path / "repo")
    (repo / "run.py").write_text(TRAINING.replace('"started"', '"started" + sys.argv[1]') % (60, with_gpus.RESUME_ME))
    shown = Terminal(repo, "snakemake", "--profile", "local", "--cores", "2", "train_grpo_x_low", "train_grpo_x_high")
    wait_for(lambda: len(list(repo.glob("startedgrpo_x-*"))) == 2)
    shown.key("\x03")
    wait_for(lambda: "a second Ctrl-C ends them now" in shown.text)
    time.sleep(with_gpus.SAME_REQUEST_SECONDS + 0.2)
    told_again = time.monotonic()
    if alone:  # Snakemake ends first, and waits for the others
        os.kill(shown.process.pid, signal.SIGINT)
        wait_for(lambda: "0 of 2 stages in " in shown.text)
    shown.key("\x03")
    assert shown.end() != 0 and time.monotonic() - told_again < 50  # of the 60 s that they would take
    assert not (repo / "saved").exists() and not processes_in(repo)
    assert "0 of 2 stages in " in shown.text


def test_with_nothing_to_do_make_repro_does_not_start_snakemake(tmp_path: Path) -> None:
    repo = new_study(tmp_path / "repo")
    (repo / "dvc.yaml").write_text("stages: {one: {cmd: touch one.txt, outs: [one.txt]}}\n")
    call(repo, "dvc", "repro")
    (repo / "snakemake").write_text("#!/bin/sh\ntouch called\n")
    (repo / "snakemake").chmod(0o755)
    command = ("env", f"PATH={repo}:{os.environ['PATH']}", sys.executable, "workflow/repro.py")
    assert "All stages are up to date" in call(repo, *command) and not (repo / "called").exists()
    (repo / "one.txt").unlink()
    call(repo, *command)
    assert (repo / "called").exists()


def test_progress_is_the_last_bar_that_tqdm_drew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stage = Stage("train@grpo_x-low", log, started=time.time() - 1)
    assert stage.progress() == {"step": "waits"}
    with log.open("w") as file, tqdm(total=30, desc="grpo_x/low/0", unit="step", file=file, mininterval=0) as bar:
        print("Running stage 'train@grpo_x-low':\n> grpo train", file=file, flush=True)
        assert stage.progress().get("step") in ("0/30", None)
        bar.update(12)
        bar.set_postfix_str("validation answer reward 0.431")
        file.flush()
        at = stage.progress()
        assert at["step"] == "12/30" and at["reward"] == "0.431" and re.fullmatch(r"0\d+:\d\d", at["left"] or "")
    stage.started = time.time() + 1  # the log is that of an earlier attempt
    assert stage.progress() == {"step": "waits"}


def test_time_left_by_hand(tmp_path: Path) -> None:
    """Two at a time; the last time each took 10 s, this time the first takes twice as long."""
    a, b, c, d = stages = [Stage(name, tmp_path, former=10.0) for name in "abcd"]
    assert time_left(stages, began=0.0, now=0.0) == 40  # how many run side by side is not known yet
    a.seconds, b.started = 20.0, 15.0
    # In 20 s 20 + 5 were done, 1.25 at a time. Of b 5 s are left, of c and d 10 each.
    assert time_left(stages, began=0.0, now=20.0) == (5 + 10 + 10) / 1.25
    c.failed = True
    d.former = None  # new: as those that were done
    assert time_left(stages, began=0.0, now=20.0) == (5 + 20) / 1.25
    a.former, a.seconds = None, None
    assert time_left(stages, began=0.0, now=20.0) is None
    assert [clock(s) for s in (5.4, 60, 3723)] == ["0:05", "1:00", "1:02:03"]
