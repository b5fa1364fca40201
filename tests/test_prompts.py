"""Prompt templates are used byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import grpo
from grpo.common.errors import UserError
from grpo.tasks.formats import format_prompt, load_prompt

FOLDER = Path(grpo.__file__).parent / "tasks/prompts"


@pytest.mark.parametrize("name", ["r1_zero", "question_only"])
def test_packaged_prompts_are_their_files(name: str) -> None:
    template = load_prompt(name)
    assert template.encode() == (FOLDER / f"{name}.prompt").read_bytes()
    assert not template.endswith("\n")
    assert load_prompt(str(FOLDER / f"{name}.prompt")) == template


def test_known_ends() -> None:
    assert load_prompt("question_only") == "{question}"
    assert load_prompt("r1_zero").endswith("User: {question}\nAssistant: <think>")


def test_line_ends_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.prompt"
    file.write_bytes(b"Q: {question}\r\nA:\n")
    assert load_prompt(str(file)) == "Q: {question}\r\nA:\n"


def test_braces_are_nothing_special() -> None:
    question = r"What is $\frac{1}{2}$ of {x} %s {0}?"
    assert format_prompt("{a} {question} {}", question) == "{a} " + question + " {}"


def test_missing_prompt_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"nonesuch: no such prompt file.*question_only, r1_zero"):
        load_prompt("nonesuch")


def test_prompt_without_a_place_for_the_question(tmp_path: Path) -> None:
    file = tmp_path / "broken.prompt"
    file.write_text("Question: {}")
    with pytest.raises(UserError, match=r"broken\.prompt: does not contain \{question\}"):
        load_prompt(str(file))


def test_prompt_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "latin.prompt"
    file.write_bytes(b"\xe9 {question}")
    with pytest.raises(UserError, match="not UTF-8"):
        load_prompt(str(file))
