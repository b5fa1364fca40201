"""Unevaluated arithmetic and copies from the question earn nothing, unless the task allows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.common.records import Problem
from grpo.grader.grader import is_equivalent
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.dataset import Dataset, LocalFiles
from grpo.tasks.graded import GradedTask
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn

# All are equal to the truth, as worked out by hand.
LEFT_TO_DO = [
    ("123*456", "56088"), ("2+2", "4"), ("(16-3-4)*2", "18"), (r"\sum_{k=1}^{10}k", "55"), (r"6 \cdot 7", "42"), ("6(7)", "42"),
    ("(6)(7)", "42"), ("x = 2+3", "5"), ("The answer is 2+2", "4"), (r"\frac{3+4}{2}", "7/2"), ("7-8", "-1"),
    ("2+2, 5", "4, 5"), ("(2+3, 4)", "(5, 4)"),
    (r"2\cdot 3\cdot 5", "30"), (r"2\cdot 5\pi", r"10\pi"), (r"2\sqrt2+4\sqrt2", r"6\sqrt2"), ("(2+i)^2", "3+4i"),
    (r"\sqrt{12}+\sqrt{27}", r"5\sqrt3"), (r"\sqrt6\sqrt{10}", r"2\sqrt{15}"), ("2x+3x", "5x"), (r"\frac{2}{1-i}", "1+i"),
    ("|3+4i|", "5"), (r"(6\cdot 7)^1", "42"),
]  # fmt: skip
DONE = [
    ("2^{10}", "1024"), (r"\frac{10}{4}", "2.5"), (r"\sqrt{16}", "4"), (r"2^3 \cdot 3^2", "72"), (r"1.5 \times 10^3", "1500"),
    ("-(-6)", "6"), (r"1\frac12", "3/2"), ("1 1/2", "1.5"), ("6 * 7 = 42", "42"), ("A = 3*4 = 12", "12"), ("5!", "120"),
    (r"\binom{5}{2}", "10"), ("10%", "0.1"), ("x = 5", "5"), (r"\sqrt2+1", r"1+\sqrt2"), ("x+1", "1+x"),
    ("1,000", "1000"), ("5 - 5c", "5(1-c)"), ("-5", "-5"), ("1+1/2", "1.5"), ("1e-1", "0.1"),
    (r"\lfloor 3.7 \rfloor", "3"), ("|-5|", "5"), (r"2(1+\sqrt3)", r"2+2\sqrt3"), (r"\sqrt{72}", r"6\sqrt2"),
    ("2^n+2^n", "2^{n+1}"), (r"(7\cdot 11)^2", r"7^2 \cdot 11^2"),
]  # fmt: skip
COPIED = [
    ("x^2-1", "(x-1)(x+1)", "Factor $x^2-1$."), (r"\sqrt{12}", r"2\sqrt{3}", r"Simplify \(\sqrt{12}\)."),
    ("10/4", "5/2", "Reduce 10/4."), ("2^{10}", "1024", "Compute $2^{10}$."), (r"\log_2 8", "3", r"Find $\log_2 8$."),
    ("5!", "120", "What is $5!$?"), (r"\binom{5}{2}", "10", r"Evaluate $\dbinom{5}{2}$."),
    ("2 < x < 5", "(2,5)", "Write $2<x<5$."),
    ("y-2x=1", "y=2x+1", "Solve $y - 2x = 1$ for $y$."), ("2 + 2x", "2(1+x)", "Write 2+2x as a product."),
]  # fmt: skip
OF_ITS_OWN = [
    ("1/2", "1/2", "Is 1/2 or 1/3 the larger?"), (r"\frac12", "0.5", r"Is $\frac{1}{2}$ the larger?"),
    ("5", "5", "What is 5 + 0?"),
    ("x=5", "5", "If $x=5$, what is $x$?"), (r"90^\circ", "90", r"The angle is $90^\circ$."),
    ("2x+1", "2x+1", "Which is $2x+1$?"),
    ("x^2-1", "(x-1)(x+1)", r"Simplify $\frac{x^2-1}{1}$."), ("2x+1", "1+2x", "Halve $2(2x+1)$."), ("-3", "-3", "from -3 to 4"),
    ("1 1/2", "1.5", "It takes 1 1/2 hours."), ("2^{10}", "1024", "Compute $2^{100}/2^{90}$."),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), LEFT_TO_DO)
def test_arithmetic_that_is_left_to_do_is_no_answer(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth)
    assert not counts_as_answer(answer, truth)
    assert question_only_reward_fn(rf"\boxed{{{answer}}}", truth)["reward"] == 0.0
    assert r1_zero_reward_fn(f"So. </think> <answer>{answer}</answer>", truth)["reward"] == 0.0


@pytest.mark.parametrize(("answer", "truth"), DONE)
def test_what_stands_for_itself_is_an_answer(answer: str, truth: str) -> None:
    assert question_only_reward_fn(rf"\boxed{{{answer}}}", truth)["reward"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "question", "right"), [*((*row, 0.0) for row in COPIED), *((*row, 1.0) for row in OF_ITS_OWN)]
)
def test_an_expression_of_the_question_is_no_answer(answer: str, truth: str, question: str, right: float) -> None:
    assert is_equivalent(answer, truth)
    assert GradedTask().verify([answer], [Problem("p", question, truth)]) == [right]


def test_a_task_can_want_them(tmp_path: Path) -> None:
    files = LocalFiles(train=str(tmp_path / "a.csv"), validation=str(tmp_path / "b.csv"))
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("question,answer\nWhat is 2+2?,4\n")
    problem = Problem("p", "What is 2+2?", "4")
    assert Dataset("question", "answer", files=files, unevaluated=True).verify(["2+2"], [problem]) == [1.0]
    assert Dataset("question", "answer", files=files).verify(["2+2", "4"], [problem] * 2) == [0.0, 1.0]
