"""The ground truths of MATH: each equals itself in any wrapper, and no truth with another meaning."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from pathlib import Path

import pytest

from grpo.common.records import Problem
from grpo.grader.process import grade_batch
from grpo.tasks.graded import GradedTask
from grpo.tasks.task import make_task

MATH = Path(__file__).parents[3] / "shared" / "data" / "math"

pytestmark = pytest.mark.skipif(not (MATH / "validation.jsonl").is_file(), reason=f"needs MATH's validation split in {MATH}")

# Different ground truths that say the same, judged by hand; those that `_values` reads need no entry.
SAME = {
    frozenset(pair)
    for pair in [
        (r"8\sqrt{3}", r"8\sqrt{3} \text { square inches}"), (r"\text{Saturday}", r"\mbox{Saturday}"), ("2x", "y = 2x"),
        (r"\frac{2 \pi}{3}", r"\frac{2}{3}\pi"), (r"\frac{3 \pi}{4}", r"\frac{3}{4}\pi\text{ inches}"),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    files = {split: str(MATH / f"{split}.jsonl") for split in ("train", "validation")}
    found = make_task({"use": "math", "source": files}).problems("validation")
    assert len(found) == 5000
    return found


@pytest.fixture(scope="module")
def truths(problems: list[Problem]) -> list[str]:
    return sorted({problem.ground_truth for problem in problems})


IN_TAGS = [
    "{}", "$ {} $", "$${}$$", r"\({}\)", r"\[{}\]", r"\boxed{{}}", "{}.", "${}$.", "**{}**", r"\displaystyle {}",
    r"The answer is $\boxed{{}}$.",
]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        *(("r1_zero", f"We add. </think> <answer> {form} </answer>") for form in IN_TAGS),
        ("question_only", r"\boxed{{}}"),
        ("question_only", r"First \boxed{0}, then $\boxed{{}}$."),
        ("question_only", r"\fbox{ {} }"),
        ("question_only", r"\[\boxed{${}$}\]"),
    ],
)
def test_every_truth_earns_the_full_reward(problems: list[Problem], prompt: str, form: str) -> None:
    truths = [problem.ground_truth for problem in problems]
    start, _, end = form.rpartition("{}")
    batch = GradedTask().score(
        prompt, [Problem("p", "q", truth) for truth in truths], [start + truth + end for truth in truths]
    )
    full = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
    assert [truth for truth, rewards in zip(truths, batch.rewards, strict=True) if rewards != full] == []
    assert not any(batch.out_of_time)


def test_alike_pairs_are_equal_only_where_they_say_the_same(truths: list[str]) -> None:
    """Neighbours in two alphabetical orders, which differ in little, and all with the same digits."""
    pairs = [*itertools.pairwise(truths), *itertools.pairwise(sorted(truths, key=lambda truth: truth[::-1]))]
    by_digits: dict[str, list[str]] = {}
    for truth in truths:
        by_digits.setdefault("".join(re.findall(r"\d", truth)), []).append(truth)
    for digits, group in by_digits.items():
        if digits:
            pairs += itertools.combinations(group, 2)
    verdicts = grade_batch(pairs)
    equal = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.equal]
    assert [pair for pair in equal if not _same(*pair)] == []
    assert not any(verdict.timed_out for verdict in verdicts)
    back = grade_batch([(truth, answer) for answer, truth in equal])
    assert [pair for pair, verdict in zip(equal, back, strict=True) if not verdict.equal] == [], "equal one way only"


def _same(left: str, right: str) -> bool:
    if frozenset((left, right)) in SAME or _canonical(left) == _canonical(right):
        return True
    units = {_unit(left), _unit(right)} - {""}
    return len(units) < 2 and bool(_values(left) & _values(right))


def _unit(truth: str) -> str:
    """The unit stated in ``truth``; "square units" and the like say nothing about which unit it is."""
    if r"\circ" in truth or r"\%" in truth:
        return "degree" if r"\circ" in truth else "%"
    found = re.search(r"\\(?:text|mbox|textrm|mathrm) ?\{([^{}]*)\}(.*)", truth, re.DOTALL)
    if not found or found[1].isdigit() or truth.startswith(found[0]):
        return ""
    unit = re.sub(r"[^a-z]", "", found[1].lower()).removesuffix("s")
    return "" if unit in {"unit", "squareunit", "cubicunit"} else unit + re.sub(r"[^23]", "", found[2])


def _canonical(text: str) -> str:
    """Spelling that never matters: spaces, sizes of brackets and fractions, braces around one character."""
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\s", "", text)
    text = re.sub(r"(\\sqrt|[\^_])\{(\w|\\circ)\}", r"\1\2", text)
    return re.sub(r"(?<=\})\{(\w)\}", r"\1", re.sub(r"(\\frac)\{(\w)\}", r"\1\2", text))


_NUMBER = re.compile(
    r"(?P<sign>-?)(?P<whole>\d*)\\frac(?:\{(?P<top>-?\d+)\}|(?P<short_top>\d))(?:\{(?P<bottom>\d+)\}|(?P<short_bottom>\d))"
    r"|(?P<minus>-?)(?P<decimal>\d+(?:\.\d+)?|\.\d+)(?:/(?P<by>\d+))?"
)
_UNIT = re.compile(r"(?:\\(?:text|mbox|textrm|mathrm)\{[A-Za-z.\-]+\}(?:\^\{?[23]\}?)?|\^\{?\\circ\}?|\\%)+")


def _values(truth: str) -> set[Fraction]:
    """What the one number in ``truth`` may mean; units and ``x =`` do not count, and a percentage is a fraction as well.

    This reader shares nothing with the grader's.
    """
    text = re.sub(r"\\[dt]frac", r"\\frac", truth)
    text = re.sub(r"\\[!,;: ]|\s|\{,\}|\\?\$", "", text)
    text = re.sub(r"^[a-z]=", "", re.sub(r"^\\text\{(\d+)\}$", r"\1", text))
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?!\d).*", text):
        text = text.replace(",", "")
    match = _NUMBER.match(text)
    if not match or (match.end() < len(text) and not _UNIT.fullmatch(text, match.end())):
        return set()
    found = match.groupdict()
    if found["decimal"]:
        value = Fraction(found["decimal"]) / int(found["by"] or 1) * (-1 if found["minus"] else 1)
    else:
        part = Fraction(int(found["top"] or found["short_top"]), int(found["bottom"] or found["short_bottom"]))
        value = (int(found["whole"] or 0) + part) * (-1 if found["sign"] else 1)
    return {value, value / 100} if text.endswith(r"\%") else {value}
