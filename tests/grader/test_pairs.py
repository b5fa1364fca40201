"""Labelled pairs (the YAML files here), graded in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hostile import CASES
from ruamel.yaml import YAML

from grpo.grader.grader import cheap_verdict, check_ground_truth
from grpo.grader.process import grade_batch


class Pair(NamedTuple):
    category: str
    answer: str
    truth: str
    equal: bool


_FILES = ("pairs.yaml", "written.yaml", "mathematics.yaml", "everyday.yaml", "kinds.yaml", "responses.yaml")
GROUPS: list[tuple[str, dict[str, list[list[str]]]]] = [
    group for file in _FILES for group in YAML(typ="safe", pure=True).load(Path(__file__).with_name(file)).items()
]
PAIRS = [
    Pair(category, answer, truth, label == "equal")
    for category, group in GROUPS
    for label, pairs in group.items()
    for answer, truth in pairs
]


def name_of(pair: Pair) -> str:
    sign = "==" if pair.equal else "!="
    return f"{pair.category}: {pair.answer!r} {sign} {pair.truth!r}".replace("\\\\", "\\")


def test_one_batch_agrees_with_the_labels() -> None:
    verdicts = grade_batch([(pair.answer, pair.truth) for pair in PAIRS])
    assert len(verdicts) == len(PAIRS)
    wrong = [name_of(pair) for pair, verdict in zip(PAIRS, verdicts, strict=True) if verdict.equal is not pair.equal]
    assert not wrong, "\n".join(wrong)


def test_no_pair_raises(caplog: pytest.LogCaptureFixture) -> None:
    """An exception inside the comparison counts as wrong, and is logged."""
    for pair in PAIRS:
        cheap_verdict(pair.answer, pair.truth)
    assert [record.getMessage() for record in caplog.records] == []


def test_the_docs_count_the_pairs_and_the_hostile_responses() -> None:
    page = (Path(__file__).parents[2] / "docs/grader.md").read_text()
    assert f"{len(PAIRS):,} labelled pairs, {len(CASES)} hostile responses" in page


def test_no_pair_is_there_twice() -> None:
    seen = [(pair.answer, pair.truth) for pair in PAIRS]
    assert sorted(seen) == sorted(set(seen))


def test_truths_as_data_sets_write_them_can_be_answered() -> None:
    for truth in (
        r"\\frac{5}{9}",
        r"\(\{n \ge 13\}\)",
        "x = 2 OR x = 3",
        "Ａ",
        r"\frac{\hbar^{2} k^{2}}{2 m}",
        r"p \land q",
        r"\angle ABC",
    ):
        check_ground_truth(truth)
