"""The grader and the reward functions against verdicts by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
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

VERDICTS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("verdicts.yaml"))


def test_cheap_verdicts_import_no_computer_algebra() -> None:
    script = (
        "import sys; from grpo.grader.grader import cheap_verdict\n"
        "assert cheap_verdict('1/2', '0.5') and cheap_verdict('2x^2+4x', '2x(x+2)') and cheap_verdict('x>3', '(3,oo)')\n"
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
