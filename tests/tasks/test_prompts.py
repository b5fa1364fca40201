"""Prompt templates are used byte for byte."""

from __future__ import annotations

from grpo.tasks.formats import QUESTION_ONLY, R1_ZERO
from grpo.tasks.keyword_inclusion import KEYWORD
from grpo.tasks.task import Format


def test_known_ends_and_stop_strings() -> None:
    assert (QUESTION_ONLY.template, KEYWORD.template[-1]) == ("{question}", ".")  # no line end is added
    assert R1_ZERO.template.endswith("User: {question}\nAssistant: <think>")
    assert (R1_ZERO.stop, QUESTION_ONLY.stop, KEYWORD.stop) == (("</answer>",), (), (".",))


def test_braces_are_nothing_special() -> None:
    question = r"What is $\frac{1}{2}$ of {x} %s {0}?"
    assert Format("{a} {question} {}").prompt(question) == "{a} " + question + " {}"
