"""Prompt templates are used byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import grpo
from grpo.tasks.formats import QUESTION_ONLY, R1_ZERO
from grpo.tasks.keyword_inclusion import KEYWORD
from grpo.tasks.task import Format

FOLDER = Path(grpo.__file__).parent / "tasks/prompts"


@pytest.mark.parametrize(("name", "format"), [("r1_zero", R1_ZERO), ("question_only", QUESTION_ONLY), ("keyword", KEYWORD)])
def test_packaged_prompts_are_their_files(name: str, format: Format) -> None:
    assert format.template.encode() == (FOLDER / f"{name}.prompt").read_bytes()
    assert not format.template.endswith("\n")


def test_known_ends_and_stop_strings() -> None:
    assert QUESTION_ONLY.template == "{question}"
    assert R1_ZERO.template.endswith("User: {question}\nAssistant: <think>")
    assert (R1_ZERO.stop, QUESTION_ONLY.stop, KEYWORD.stop) == (("</answer>",), (), (".",))


def test_braces_are_nothing_special() -> None:
    question = r"What is $\frac{1}{2}$ of {x} %s {0}?"
    assert Format("{a} {question} {}").prompt(question) == "{a} " + question + " {}"
