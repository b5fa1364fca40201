"""The grader and the reward functions against verdicts by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from grpo.common.errors import UserError
from grpo.grader.extract import last_boxed
from grpo.grader.grader import cheap_verdict, check_ground_truth, full_verdict, is_equivalent
from grpo.grader.symbolic import too_complex
from grpo.tasks.rewards import r1_zero_reward_fn

ZERO = {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
FORM_ONLY = {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
FULL = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}

VERDICTS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("verdicts.yaml"))


@pytest.mark.parametrize(("answer", "truth"), VERDICTS["equal"])
def test_equal_answers_are_accepted(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), VERDICTS["different"])
def test_different_answers_are_refused(answer: str, truth: str) -> None:
    assert not is_equivalent(answer, truth)


def test_cheap_verdicts_import_no_computer_algebra() -> None:
    script = (
        "import sys; from grpo.grader.grader import cheap_verdict\n"
        f"assert all(cheap_verdict(a, t) for a, t in {VERDICTS['equal']!r})\n"
        "assert 'sympy' not in sys.modules and 'math_verify' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_only_computer_algebra_reads_is_left_open() -> None:
    assert cheap_verdict(r"\sec^{-1}(2)", r"\frac{\pi}{3}") is None
    assert full_verdict(r"\sec^{-1}(2)", r"\frac{\pi}{3}")
    assert not full_verdict(r"\max(5,4)", "5")


def test_integers_take_under_20_microseconds() -> None:
    calls = 2000
    best = min(timeit.repeat(lambda: is_equivalent("1234", "1235"), number=calls, repeat=5))
    assert best / calls < 20e-6


PIECES = [
    r"\frac", "{", "}", "(", ")", "[", "]", ",", "1", "23", "x", "^", "_", "-", "=", "\\", r"\text{", "or ", "and ", " ", ".",
    r"\sqrt", "!", "%", "$", r"\left", r"\cup", r"\pm", r"\{", "\x00", "\n", "①", "²", "<", "units", r"\circ", r"\$", "\ud800",
    "9^9", r"\begin{pmatrix}", "&",
]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    answer=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    truth=st.sampled_from(["5", "(1,2)", "x^2+1", "1,2"]),
)
def test_no_string_makes_the_grader_raise(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth) in (True, False)
    assert is_equivalent(truth, answer) in (True, False)


@pytest.mark.parametrize("piece", [" ", r"\$", r"\,", "(", r"\text{", "1,", "a1", r"\pm ", "=", "\n", "^{"])
def test_long_repetitions_end_quickly(piece: str) -> None:
    is_equivalent("x+1", "1+x")  # the import is not what is timed
    start = time.monotonic()
    assert not is_equivalent(piece * (1990 // len(piece)), "5")
    assert not is_equivalent(piece * (290 // len(piece)), "x^2+1")
    assert time.monotonic() - start < 3.0


HOSTILE = [
    "9^{9^9}", "9^9^9^9", "((5!)!)!", "2^{2^{100}}", "((x+1)^{99})^{99}", r"\sqrt{" * 100 + "2" + "}" * 100,
    "(" * 500 + "5" + ")" * 500,
    r"\sum_{n=1}^{2000} \sum_{k=1}^{2000} k", r"\prod_{n=1}^{2000} n^n", r"e^{e^{e^{e^e}}}", r"\binom{3000}{1500}^{3000}",
    "1" * 1999,
    r"\sin(10^{10^5})", "1,000," * 330, "²" * 1900, "½" * 1900, r"\text{ and }" * 150, "The answer is " * 100 + "6",
    r"\pm " * 400 + "1",
    ",".join(f"x+{i}" for i in range(300)), "(x+1)^{200}(x-1)^{200}(x+2)^{200}", "[[" * 900, r"\overline{" * 200,
    "f(" * 25 + "x" + ")" * 25,
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_cost_milliseconds(answer: str) -> None:
    truths = ["5", "x^2+1", "(1,2)", r"\sqrt{2}", r"[0,\infty)"]
    cheap_verdict(r"\pi", r"\sqrt{2}")  # the import is not what is timed
    start = time.process_time()
    verdicts = [cheap_verdict(answer, truth) for truth in truths]
    assert time.process_time() - start < 0.25 * len(truths)
    assert True not in verdicts


def test_deeply_nested_lists_are_not_compared() -> None:
    def nested(levels: int, end: str) -> str:
        return "(1," * levels + end + ")" * levels

    assert is_equivalent(nested(3, "2"), nested(3, "2.0"))
    assert not is_equivalent(nested(300, "2"), nested(300, "2.0"))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}", "100000!", "2^{99999}", "((x+1)^{99})^{99}", "(" * 20 + "x" + ")" * 20, "x+" * 200, r"\sum_{n=1}^{9} n",
        "1" * 60,
    ],
)  # fmt: skip
def test_the_gate_keeps_hostile_expressions_from_the_parser(text: str) -> None:
    assert too_complex(text)


def test_symbolic_comparison_works_outside_the_main_thread() -> None:
    results: list[bool] = []
    pairs = [(r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{3}", r"\sqrt{2}")]
    thread = threading.Thread(target=lambda: results.extend(is_equivalent(a, t) for a, t in pairs))
    thread.start()
    thread.join()
    assert results == [True, False]


@pytest.mark.parametrize("truth", VERDICTS["unusable_truths"])
def test_unusable_ground_truths_are_refused(truth: str) -> None:
    with pytest.raises(UserError):
        check_ground_truth(truth)


@pytest.mark.parametrize("truth", VERDICTS["usual_truths"])
def test_usual_ground_truths_are_accepted(truth: str) -> None:
    check_ground_truth(truth)
    assert is_equivalent(truth, truth)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"), (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"), (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed 5$.", "5"), (r"\boxed{}", ""), ("none", None), (r"\boxed", None),
        (r"\boxed{1} and \boxed{2", None), (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, 3"),
        (r"\boxed{1}\text{ and }\boxed{\frac{1}{2}}.", r"1, \frac{1}{2}"), (r"\boxed{2} and \boxed{2}", "2"),
        (r"\boxed{1} so \boxed{2}", "2"), (r"\boxed{1}\boxed{2}", "2"),
        (r"\boxed{0}, so \boxed{1} and \boxed{2}", "1, 2"), (r"\boxedfoo{1}", None),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)  # fmt: skip
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_no_alternatives_are_a_mistake() -> None:
    with pytest.raises(UserError, match="empty list"):
        r1_zero_reward_fn("</think> <answer>5</answer>", [])


def test_a_whole_number_given_as_a_float_is_that_number() -> None:
    assert r1_zero_reward_fn("</think> <answer>5_{10}</answer>", 5.0)["reward"] == 1.0  # "5.0" would not be
