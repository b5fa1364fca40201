"""Real grading processes: an answer that hangs, crashes or is killed affects no other answer."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_for

from grpo.grader.process import Grade, GraderProcess, default_process

RIGHT, WRONG, TIMED_OUT = Grade(True), Grade(False), Grade(False, timed_out=True)

# What the worker runs in place of the grader. An answer is equal if it is the truth, unless it names a misdeed.
MISDEEDS = """
import ctypes, os, sys, time

kept = []

def grade(answer, truth):
    name, _, argument = answer.partition(":")
    if name == "burn":
        end = time.process_time() + float(argument)
        while time.process_time() < end:
            pass
    elif name == "sleep":
        time.sleep(float(argument))
    elif name == "memory":
        return len([bytes(1 << 26) for _ in range(64)]) == 64  # 4 GiB, not one page of which is touched
    elif name == "keep":
        kept.append(bytes(int(argument) << 20))
        return len(kept) == 1
    elif name == "exit":
        os._exit(3)
    elif name == "crash":
        ctypes.string_at(0)
    elif name == "raise":
        raise ValueError
    elif name == "quit":
        sys.exit()
    elif name == "recurse":
        return grade(answer, truth)
    elif name == "report":
        with open(argument, "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(60)
    return answer == truth or truth == "any"
"""

Make = Callable[..., GraderProcess]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Processes that commit misdeeds; the module lies where only sys.path of this process leads."""
    (tmp_path / "misdeeds.py").write_text(MISDEEDS)
    monkeypatch.syspath_prepend(tmp_path)
    graders: list[GraderProcess] = []

    def make_one(function: str = "misdeeds:grade", **options: Any) -> GraderProcess:
        graders.append(GraderProcess(function, **options))
        return graders[-1]

    yield make_one
    for grader in graders:
        grader.end()


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet has, too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def workers(pid: int | None = None) -> list[int]:
    """The grading processes of a process."""
    return [
        child.pid
        for child in psutil.Process(pid).children()
        if not gone(child.pid) and {"misdeeds:grade", "operator:eq"} & set(child.cmdline())
    ]


@pytest.mark.parametrize("text", ["\ud800", "\x00\n\r\u2028", '"}]\\', "9" * 3_000_000])
def test_any_string_reaches_the_worker_unchanged(make: Make, text: str) -> None:
    assert make().verdicts([(text, text), (text, text + " ")]) == [RIGHT, WRONG]


def test_the_grader_itself_is_what_the_process_runs() -> None:
    pairs = [(r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{3}", r"\sqrt{2}"), ("2x+x^2", "x(x+2)")]
    assert default_process().verdicts(pairs) == [RIGHT, WRONG, RIGHT]


def test_the_limit_counts_computing_not_waiting(make: Make) -> None:
    grader = make(time_limit_s=0.1)
    assert grader.verdict("sleep:0.5", "any") == RIGHT
    assert grader.verdicts([("burn:0.06", "any")] * 5) == [RIGHT] * 5  # each by itself
    start = time.monotonic()
    assert grader.verdict("sleep:60", "any") == TIMED_OUT
    assert 1.0 <= time.monotonic() - start < 10.0


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("memory", WRONG), ("raise", WRONG), ("quit", WRONG), ("recurse", WRONG), ("exit", TIMED_OUT), ("crash", TIMED_OUT),
        ("burn:60", TIMED_OUT),
    ],
)  # fmt: skip
def test_a_misdeed_harms_its_own_answer_only(make: Make, answer: str, verdict: Grade) -> None:
    pairs = [("1", "1"), ("2", "-1"), (answer, "any"), (answer, "any"), ("3", "3"), ("4", "-1")]
    assert make(time_limit_s=0.2).verdicts(pairs) == [RIGHT, WRONG, verdict, verdict, RIGHT, WRONG]


def test_a_worker_that_keeps_much_memory_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # "keep" is right only in a worker that keeps nothing yet.
    monkeypatch.setattr("grpo.grader.process.MEMORY_LIMIT_MB", 100)
    assert make().verdicts([("keep:60", "")] * 3) == [RIGHT] * 3
    assert make().verdicts([("keep:1", "")] * 3) == [RIGHT, WRONG, WRONG]


def test_the_worker_is_cut_off_from_the_terminal(make: Make) -> None:
    make().verdict("1", "1")
    (worker,) = workers()
    assert {Path(f"/proc/{worker}/fd/{number}").readlink() for number in range(3)} == {Path(os.devnull)}
    assert os.getsid(worker) == worker
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{worker}/status").read_text().splitlines())
    assert int(status["SigIgn"], 16) >> (signal.SIGINT - 1) & 1
    assert re.search(r"Max core file size +0 ", Path(f"/proc/{worker}/limits").read_text())


def test_a_killed_idle_worker_is_replaced_unnoticed(make: Make) -> None:
    grader = make()
    assert grader.verdict("1", "1") == RIGHT
    (worker,) = workers()
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: gone(worker), 10)
    assert grader.verdicts([("2", "2"), ("3", "4"), ("exit", "any"), ("3", "3")]) == [RIGHT, WRONG, TIMED_OUT, RIGHT]
    assert len(workers()) == 1


GRADING = """
import sys
sys.path.insert(0, sys.argv[1])
from grpo.grader.process import GraderProcess
GraderProcess("misdeeds:grade", time_limit_s=float(sys.argv[3])).verdicts([(f"report:{sys.argv[2]}", "any")] * 8)
"""


@pytest.mark.usefixtures("make")  # for the module
@pytest.mark.parametrize(("sent", "limit_s"), [(signal.SIGKILL, 0.2), (signal.SIGINT, 50)])
def test_nothing_is_left_when_the_parent_ends(tmp_path: Path, sent: signal.Signals, limit_s: float) -> None:
    """By Ctrl-C a batch ends at once. Where the parent is killed, the worker ends at its own limit at the latest."""
    report = tmp_path / "pid"
    command = [sys.executable, "-c", GRADING, str(tmp_path), str(report), str(limit_s)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(report.exists, 10)
    (worker,) = workers(parent.pid)
    time.sleep(0.1)
    parent.send_signal(sent)
    _, said = parent.communicate(timeout=5)
    assert ("KeyboardInterrupt" in said) == (sent == signal.SIGINT)
    wait_for(lambda: gone(worker), 10 * limit_s + 1 if sent == signal.SIGKILL else 5.0)


@pytest.mark.parametrize("pause_s", [0.0, 0.3])  # the late reply is to come while the next waits for its own, or before
def test_an_interrupted_answer_is_not_taken_for_the_next(make: Make, pause_s: float) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    grader = make()
    assert grader.verdict("1", "1") == RIGHT
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            grader.verdict("sleep:0.3", "any")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    time.sleep(pause_s)
    assert grader.verdict("1", "2") == WRONG


@pytest.mark.parametrize("function", ["no_such_module:grade", "misdeeds:no_such_function"])
def test_a_failed_start_says_why(make: Make, function: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)could not be started: .*Error: .*no_such"):
        make(function).verdict("1", "1")


def test_many_threads_at_once_share_the_worker(make: Make) -> None:
    grader = make()
    pairs = [(str(i), str(i % 50)) for i in range(100)]

    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda _: grader.verdicts(pairs), range(8)))
    assert results == [[RIGHT] * 50 + [WRONG] * 50] * 8
    assert len(workers()) == 1


def test_a_forked_child_has_a_process_of_its_own() -> None:
    # In a fresh interpreter, because this one may have threads that a fork would break.
    script = """
import os
from grpo.grader.process import GraderProcess, Grade
grader = GraderProcess("operator:eq", time_limit_s=20)
assert grader.verdict("1", "1").equal
grader._lock.acquire()  # as another thread might at the time of the fork
child = os.fork()
if child == 0:
    right = grader.verdict("1", "1") == Grade(True) and grader.verdict("1", "2") == Grade(False)
    grader.end()
    os._exit(0 if right else 1)
grader._lock.release()
verdicts = [grader.verdict(str(i), "5").equal for i in range(10)]
assert verdicts.count(True) == 1, verdicts
_, status = os.waitpid(child, 0)
assert status == 0, status
assert grader.verdict("1", "1").equal
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
