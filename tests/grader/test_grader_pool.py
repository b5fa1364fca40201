"""Real grading processes: an answer that hangs, crashes or is killed affects no other answer."""

from __future__ import annotations

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

from grpo.grader.pool import GraderPool, Verdict, default_pool

RIGHT, WRONG, TIMED_OUT = Verdict(True), Verdict(False), Verdict(False, timed_out=True)

# What the workers run in place of the grader. An answer is equal if it is the truth, unless it names a misdeed.
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
        time.sleep(60 if truth == "wait" and os.path.getsize(argument) < 10 else 0)
        return True
    return answer == truth or truth == "any"
"""

MakePool = Callable[..., GraderPool]


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """Pools whose workers commit misdeeds; the module lies where only sys.path of this process leads."""
    (tmp_path / "misdeeds.py").write_text(MISDEEDS)
    monkeypatch.syspath_prepend(tmp_path)
    pools: list[GraderPool] = []

    def make(workers: int = 2, function: str = "misdeeds:grade", **options: Any) -> GraderPool:
        pools.append(GraderPool(workers, function=function, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.end_processes()


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if not gone(child.pid)]


def gone(*pids: int) -> bool:
    """Whether the processes have ended; one that nobody has waited for yet has, too."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def grading_processes(pid: int) -> tuple[int, list[int]]:
    """The one zygote below process ``pid``, and its workers."""

    def zygotes() -> list[int]:
        return [child for child in children(pid) if "misdeeds:grade" in psutil.Process(child).cmdline()]

    wait_for(lambda: len(zygotes()) == 1, 10)
    (zygote,) = zygotes()
    return zygote, children(zygote)


# -------------------------------------------------------------------------------------------------------------- verdicts


def test_verdicts_keep_the_order(make_pool: MakePool) -> None:
    pairs = [(str(i), str(i if i % 3 else -1)) for i in range(500)]
    assert make_pool().verdicts(pairs) == [RIGHT if i % 3 else WRONG for i in range(500)]


@pytest.mark.parametrize("text", ["\ud800", "\x00\n\r\u2028", '"}]\\', "9" * 3_000_000])
def test_any_string_reaches_the_worker_unchanged(make_pool: MakePool, text: str) -> None:
    assert make_pool(1).verdicts([(text, text), (text, text + " ")]) == [RIGHT, WRONG]


def test_the_grader_itself_is_what_a_pool_runs() -> None:
    pairs = [(r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{3}", r"\sqrt{2}"), ("2x+x^2", "x(x+2)")]
    assert default_pool().verdicts(pairs) == [RIGHT, WRONG, RIGHT]


# --------------------------------------------------------------------------------------------------------------- misdeeds


def test_a_hanging_answer_is_over_within_a_second(make_pool: MakePool) -> None:
    # The limit is in CPU time. What 0.8 s of that take on the clock, on this machine and right now, a yardstick tells.
    script = "import time\nstart = time.monotonic()\nwhile time.process_time() < 0.8: pass\nprint(time.monotonic() - start)"
    grader = make_pool(1)
    assert grader.verdict("1", "1") == RIGHT
    for _ in range(3):
        _, (worker,) = grading_processes(os.getpid())
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as yardstick:
            start = time.monotonic()
            assert grader.verdict("burn:60", "any") == TIMED_OUT
            killed = time.monotonic() - start
            wait_for(lambda gone_worker=worker: gone(gone_worker), 1.0)
            start = time.monotonic()
            assert grader.verdict("1", "1") == RIGHT
            replaced = time.monotonic() - start
            assert yardstick.stdout is not None
            quickest = float(yardstick.stdout.read())
        if killed < quickest + 0.2 and replaced < 0.2:
            break
    assert 0.8 <= killed < quickest + 0.2
    assert replaced < 0.2


def test_the_limit_counts_computing_not_waiting(make_pool: MakePool) -> None:
    grader = make_pool(1, time_limit_s=0.1)
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
def test_a_misdeed_harms_its_own_answer_only(make_pool: MakePool, answer: str, verdict: Verdict) -> None:
    pairs = [(str(i), str(i)) for i in range(40)]
    pairs[7] = pairs[8] = (answer, "any")
    expected = [RIGHT] * 40
    expected[7] = expected[8] = verdict
    assert make_pool(time_limit_s=0.2).verdicts(pairs) == expected


def test_a_worker_that_keeps_much_memory_is_replaced(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    # "keep" is right only in a worker that keeps nothing yet.
    monkeypatch.setattr("grpo.grader.pool.MEMORY_LIMIT_MB", 100)
    assert make_pool(1).verdicts([("keep:60", "")] * 3) == [RIGHT] * 3
    assert make_pool(1).verdicts([("keep:1", "")] * 3) == [RIGHT, WRONG, WRONG]


def test_workers_are_cut_off_from_the_terminal(make_pool: MakePool) -> None:
    grader = make_pool(1)
    grader.verdict("1", "1")
    zygote, (worker,) = grading_processes(os.getpid())
    for pid in (zygote, worker):
        assert {Path(f"/proc/{pid}/fd/{number}").readlink() for number in range(3)} == {Path(os.devnull)}
        assert os.getsid(pid) == zygote
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["SigIgn"], 16) >> (signal.SIGINT - 1) & 1
        assert status["Threads"] == "1"
    assert re.search(r"Max core file size +0 ", Path(f"/proc/{worker}/limits").read_text())


# ------------------------------------------------------------------------------------------------------------------ kills


def test_killed_idle_workers_and_zygotes_are_replaced_unnoticed(make_pool: MakePool) -> None:
    grader = make_pool(1)
    assert grader.verdict("1", "1") == RIGHT
    zygote, (worker,) = grading_processes(os.getpid())
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: children(zygote) == [], 10)
    assert grader.verdict("2", "2") == RIGHT
    os.kill(zygote, signal.SIGKILL)
    assert grader.verdicts([("3", "3"), ("3", "4"), ("exit", "any"), ("3", "3")]) == [RIGHT, WRONG, TIMED_OUT, RIGHT]
    assert grading_processes(os.getpid())[0] != zygote


def grading_in_another_process(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A process whose two workers are at work, and its zygote and workers."""
    report = folder / "pid"
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from grpo.grader.pool import GraderPool\n"
        "waiting = [(f'report:{sys.argv[2]}', 'wait'), *[('burn:60', 'any')] * 7]\n"
        "GraderPool(2, time_limit_s=50, function='misdeeds:grade').verdicts(waiting)"
    )
    command = [sys.executable, "-c", script, str(folder), str(report)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(report.exists, 10)
    wait_for(lambda: len(grading_processes(parent.pid)[1]) == 2, 10)  # the second is at work a moment later
    zygote, workers = grading_processes(parent.pid)
    return parent, [zygote, *workers]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_behind_when_the_parent_is_killed_or_interrupted(
    make_pool: MakePool, tmp_path: Path, sent: signal.Signals
) -> None:
    """By Ctrl-C a batch ends at once."""
    make_pool()  # for the module
    parent, processes = grading_in_another_process(tmp_path)
    time.sleep(0.1)
    parent.send_signal(sent)
    _, said = parent.communicate(timeout=5)
    assert ("KeyboardInterrupt" in said) == (sent == signal.SIGINT)
    wait_for(lambda: gone(*processes), 5.0)


def test_an_interrupted_answer_is_not_taken_for_the_next(make_pool: MakePool) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    grader = make_pool(1)
    assert grader.verdict("1", "1") == RIGHT
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            grader.verdict("sleep:0.3", "any")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.3)
    assert grader.verdict("1", "2") == WRONG


@pytest.mark.parametrize("function", ["no_such_module:grade", "misdeeds:no_such_function"])
def test_a_failed_start_says_why(make_pool: MakePool, function: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)could be started: .*Error: .*no_such"):
        make_pool(1, function).verdict("1", "1")


# ------------------------------------------------------------------------------------------------------- who may call it


def test_many_threads_at_once_share_the_workers(make_pool: MakePool) -> None:
    grader = make_pool(2)
    pairs = [(str(i), str(i % 50)) for i in range(100)]

    def grade_all(thread: int) -> list[Verdict]:
        return grader.verdicts(pairs) if thread % 2 else [grader.verdict(*pair) for pair in pairs]

    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(grade_all, range(8)))
    assert results == [[RIGHT] * 50 + [WRONG] * 50] * 8
    assert len(grading_processes(os.getpid())[1]) == 2


def test_one_thread_starts_one_worker(make_pool: MakePool) -> None:
    grader = make_pool(4)
    assert [grader.verdict(str(i), "1") for i in range(6)].count(RIGHT) == 1
    assert len(grading_processes(os.getpid())[1]) == 1


def test_a_forked_child_has_processes_of_its_own() -> None:
    # In a fresh interpreter, because this one may have threads that a fork would break.
    script = """
import os, threading
from grpo.grader.pool import GraderPool, Verdict, _POOLS
pool = GraderPool(1, time_limit_s=20, function="operator:eq")
assert pool.verdict("1", "1").equal
held = pool._lock.acquire()  # as another thread might at the time of the fork
child = os.fork()
if child == 0:
    right = pool.verdict("1", "1") == Verdict(True) and pool.verdict("1", "2") == Verdict(False)
    pool.end_processes()
    os._exit(0 if right else 1)
pool._lock.release()
verdicts = [pool.verdict(str(i), "5").equal for i in range(10)]
assert verdicts.count(True) == 1, verdicts
_, status = os.waitpid(child, 0)
assert status == 0, status
assert pool.verdict("1", "1").equal
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
