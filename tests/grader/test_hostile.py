"""Hostile responses earn nothing, within a short time."""

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile import CASES, Hostile

from grpo.grader.process import grade_batch, is_equal
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn

MOST_SECONDS = 1.0
TRIES = 3  # the machine may be busy with something else: the fastest of these counts


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    is_equal("x+1", "1+x")  # neither imports nor the start of the grading process are what is timed
    is_equal(r"\int_0^1 x dx", r"\frac12")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A call that hangs fails its test; where even a signal cannot end it, pytest says where it hangs and exits."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("ran for over 20 s"))
    signal.setitimer(signal.ITIMER_REAL, 20)
    faulthandler.dump_traceback_later(90, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _fastest(call: Callable[[], float], most_seconds: float = MOST_SECONDS) -> tuple[float, float]:
    """What ``call`` returned at most, and its least seconds; called again only where it was too slow."""
    seconds, reward = float("inf"), 0.0
    for _ in range(TRIES):
        start = time.monotonic()
        reward = max(reward, call())
        seconds = min(seconds, time.monotonic() - start)
        if seconds < most_seconds:
            break
    return reward, seconds


def _in_tags(answer: str) -> str:
    return f"so that is it </think> <answer>{answer}</answer>"


def _calls(case: Hostile) -> dict[str, Callable[[], float]]:
    if case.kind == "r1_zero":
        return {"r1_zero": lambda: r1_zero_reward_fn(case.text, case.truth)["answer_reward"]}
    if case.kind == "question_only":
        return {"question_only": lambda: question_only_reward_fn(case.text, case.truth)["answer_reward"]}
    return {
        "is_equal": lambda: float(is_equal(case.text, case.truth).equal),
        "in tags": lambda: r1_zero_reward_fn(_in_tags(case.text), case.truth)["answer_reward"],
        "in a box": lambda: question_only_reward_fn(rf"so it is \boxed{{{case.text}}}.", case.truth)["answer_reward"],
    }


@pytest.mark.parametrize("case", CASES, ids=[ascii(case.text)[1:60] for case in CASES])
def test_hostile_responses_earn_nothing_and_soon(case: Hostile, caplog: pytest.LogCaptureFixture) -> None:
    for where, call in _calls(case).items():
        reward, seconds = _fastest(call)
        assert reward == 0.0, f"{where}: {case.text[:200]!r} was taken for {case.truth[:200]!r}"
        assert seconds < MOST_SECONDS, f"{where}: {seconds:.2f} s for {case.text[:200]!r} against {case.truth[:200]!r}"
    assert not caplog.records, f"{case.text[:200]!r} shows a defect of the grader, which logged it"


def test_hostile_answers_do_no_harm_to_those_beside_them() -> None:
    honest = [(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("2x^2+4x", "2x(x+2)"), ("7", "7"), (r"\sqrt{8}", r"2\sqrt{2}")]
    hostile = [(case.text, case.truth) for case in CASES if case.kind == "answer"]
    pairs = []
    for number, pair in enumerate(hostile):
        pairs += [pair, honest[number % len(honest)]]
    verdicts = grade_batch(pairs)
    assert not any(verdict.equal for verdict in verdicts[::2])
    assert all(verdict.equal and not verdict.timed_out for verdict in verdicts[1::2])


@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path('FILE').touch()", "open('FILE','w')", "exec(\"open('FILE','w')\")",
        "Symbol(open('FILE','w').name)", "sympify(\"open('FILE','w')\")", "x if open('FILE','w') else x",
        r"\text{__import__('pathlib').Path('FILE').touch()}", r"x_{open('FILE','w')}", "[open('FILE','w') for i in [1]]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("truth", ["5", "x+1", "(1,2)", r"\frac{\sqrt{2}}{2}"])
def test_code_is_never_run(code: str, truth: str, tmp_path: Path) -> None:
    file = tmp_path / "f"
    text = code.replace("FILE", str(file))
    for answer in (text, text.replace("_", r"\_"), f"x+{text}"):
        assert not is_equal(answer, truth).equal
        assert r1_zero_reward_fn(_in_tags(answer), truth)["answer_reward"] == 0.0
    assert not file.exists()
