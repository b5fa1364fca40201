r"""Text around a box counts as part of the answer, between answer tags and in a whole response."""

from __future__ import annotations

import time

import pytest

from grpo.grader.extract import boxed_answer, last_boxed, without_boxes
from grpo.grader.grader import cheap_verdict
from grpo.grader.normalise import normalise
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn

# Each text was read by hand: what it states as a whole is the truth on its right, or is not.
RIGHT = [
    (r"-\boxed{5}", "-5"), (r"\boxed{50}\%", "0.5"), (r"\$\boxed{5}", r"\$5"), (r"x=\boxed{5}", "5"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{-\boxed{5}}", "-5"), (r"\boxed{5}\text{ cm}", "0.05 m"), (r"\boxed{5} apples", "5"),
    (r"\frac{\boxed{1}}{2}", "1/2"),
    (r"\boxed{3}^2", "9"), (r"\sqrt{\boxed{5}}", r"\sqrt{5}"), (r"\boxed{5}^\circ", "5"), (r"\boxed{2} and \boxed{3}", "3, 2"),
    (r"\boxed{5}\text{ million}", "5000000"), (r"(\boxed{2}, \boxed{3})", "(2,3)"), (r"it is not 4 but \boxed{5}", "5"),
    (r"x < \boxed{5}", "x<5"), (r"so \boxed{5} is the answer.", "5"), (r"n = 2 + 3 = \boxed{5}", "5"), (r"**\boxed{5}**", "5"),
    (r"So $x \approx \boxed{3.14}$.", "3.14"), (r"Step 4: $\boxed{5}$ units in total", "5"), (r"-\boxed{x-1}", "1-x"),
    (r"$\textbf{\boxed{5}}$", "5"), (r"\boxed{5} | `code`", "5"), (r"\boxed{5}, which is not prime", "5"),
    (r"\boxed{3}! So cool", "3"), (r"The answer is $\boxed{5}$!", "5"), (r"$\boxed{3}!$", "6"), (r"5 or \boxed{6}", "5, 6"),
    (r"Wow! \boxed{6}!!", "6"), (r"\boxed{5}!", "5"),
]  # fmt: skip
WRONG = [
    (r"-\boxed{5}", "5"), (r"3\boxed{5}", "5"), (r"2\cdot\boxed{5}", "5"), (r"$\boxed{5}!$", "5"), (r"\boxed{5}^2", "5"),
    (r"\boxed{5}x", "5"), (r"\boxed{5} + 1", "5"), (r"3 - \boxed{5}", "5"), (r"\boxed{5}/2", "5"),
    (r"\frac{\boxed{5}}{2}", "5"),
    (r"\sqrt{\boxed{5}}", "5"), (r"x \ne \boxed{5}", "5"), (r"x != \boxed{5}", "5"), (r"x \not= \boxed{5}", "5"),
    (r"x < \boxed{5}", "5"), (r"not \boxed{5}", "5"), (r"The answer is not \boxed{5}", "5"), (r"It isn't \boxed{5}", "5"),
    (r"\text{not } \boxed{5}", "5"), (r"\boxed{5} is wrong", "5"), (r"\boxed{5} is not the answer", "5"), (r"\boxed{5}?", "5"),
    (r"\boxed{5}, wrong", "5"), (r"\boxed{5} or 6", "5"), (r"\boxed{5} or more", "5"), (r"\boxed{5} and \boxed{}", "5"),
    (r"\boxed{} and \boxed{5}", "5"), (r"\boxed{5} million", "5"), (r"\boxed{5}\%", "0.05%"), (r"\boxed{5}\text{ m}", "5 cm"),
    (r"\boxed{-\boxed{5}}", "5"), (r"\boxed{\boxed{5}+1}", "5"), (r"at least \boxed{5}", "5"), (r"minus \boxed{5}", "5"),
    (r"twice \boxed{5}", "5"), (r"\pm\boxed{5}", "5"), (r"\boxed{5}i", "5"), (r"|\boxed{-5}|", "-5"), (r"\boxed{5} and 6", "5"),
    (r"\boxed{5}\boxed{}", "5"), (r"\boxed{5} dozen", "5"), (r"cannot be \boxed{5}", "5"), (r"\boxed{5}\cdot 2", "5"),
    (r"\boxed{3}! So cool", "6"), (r"5 or \boxed{6}", "6"), (r"5 or \boxed{6}", "5"), (r"x = 1 or $x = \boxed{2}$", "2"),
    (r"perhaps \boxed{5}", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "truth", "reward"), [*((*row, 1.0) for row in RIGHT), *((*row, 0.0) for row in WRONG)])
def test_the_text_around_a_box_counts(text: str, truth: str, reward: float) -> None:
    assert question_only_reward_fn(f"First some steps.\n{text}", truth)["reward"] == reward
    assert r1_zero_reward_fn(f"Steps. </think> <answer>{text}</answer>", truth)["reward"] == reward


def test_contents_of_boxes() -> None:
    r"""MATH's answers are the boxes' contents, whatever unit follows; of nested boxes the outer one; tags are no formula."""
    assert last_boxed(r"so the length is $\boxed{5}\text{ cm}$.") == "5"
    assert boxed_answer(r"so the length is $\boxed{5}\text{ cm}$.") == "5 cm"
    assert last_boxed(r"\boxed{x + \boxed{5}}") == "x + 5"
    assert without_boxes(r"a \boxed{b \boxed{c}} d") == "a b c  d"
    for text in (r"<answer>4</answer> \boxed{2}", r"<b>\boxed{2}</b>", r"</think>\boxed{2}<br/>"):
        assert boxed_answer(text) == "2"


_READERS = {
    "boxed_answer": boxed_answer,
    "last_boxed": last_boxed,
    "without_boxes": without_boxes,
    "r1_zero": lambda text: r1_zero_reward_fn(f"</think> <answer>{text}\\boxed{{5}}{text}</answer>", "5"),
    "question_only": lambda text: question_only_reward_fn(f"{text}\\boxed{{5}}{text}", "5"),
    "cheap_verdict": lambda text: cheap_verdict(text, "5"),
    "counts_as_answer": lambda text: counts_as_answer(f"1+{text}", "5", text),
    "of a question": lambda text: counts_as_answer("1+4", "5", text),
    "normalise": normalise,
}


_PIECES = [*" `5a([}\\$=*", "a ", "<b>", "<answer>", "5, ", "5 or ", r"\boxed{", r"\boxed{5} ", "5}"]


@pytest.mark.parametrize("piece", _PIECES)
@pytest.mark.parametrize("reader", _READERS)
def test_long_runs_are_read_in_linear_time(reader: str, piece: str) -> None:
    """CPU time; a quadratic pattern takes a minute for 100,000 characters."""
    start = time.process_time()
    _READERS[reader]((piece * 100_000)[:100_000])
    assert time.process_time() - start < 5.0
