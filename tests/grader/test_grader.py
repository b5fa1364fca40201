"""Labelled pairs, boxes, MATH's truths, and what must not be evaluated."""

import itertools
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hostile import CASES
from ruamel.yaml import YAML

from grpo.common.records import Problem
from grpo.grader.extract import boxed_answer, last_boxed, without_boxes
from grpo.grader.grader import cheap_verdict, is_equivalent
from grpo.grader.normalise import normalise
from grpo.grader.process import grade_batch
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.dataset import Dataset, LocalFiles
from grpo.tasks.graded import GradedTask
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn
from grpo.tasks.task import make_task


class Pair(NamedTuple):
    category: str
    answer: str
    truth: str
    equal: bool


def tables(name: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(Path(__file__).parent / f"{name}.yaml")
    return found


FILES = ("pairs", "written", "mathematics", "everyday", "kinds", "responses")
BOXES, UNEVALUATED = tables("tables/boxes"), tables("tables/unevaluated")
PAIRS = [
    Pair(category, answer, truth, label == "equal")
    for file in FILES
    for category, group in tables(file).items()
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


@pytest.mark.parametrize(
    ("text", "truth", "reward"), [(*row, float(of == "right")) for of, rows in BOXES.items() for row in rows]
)
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


MATH = Path(__file__).parents[3] / "shared" / "data" / "math"

needs_math = pytest.mark.skipif(not (MATH / "validation.jsonl").is_file(), reason=f"needs MATH's validation split in {MATH}")

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


@needs_math
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


@needs_math
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


@pytest.mark.parametrize(("answer", "truth"), UNEVALUATED["left_to_do"])
def test_arithmetic_that_is_left_to_do_is_no_answer(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth)
    assert not counts_as_answer(answer, truth)
    assert question_only_reward_fn(rf"\boxed{{{answer}}}", truth)["reward"] == 0.0
    assert r1_zero_reward_fn(f"So. </think> <answer>{answer}</answer>", truth)["reward"] == 0.0


@pytest.mark.parametrize(("answer", "truth"), UNEVALUATED["done"])
def test_what_stands_for_itself_is_an_answer(answer: str, truth: str) -> None:
    assert question_only_reward_fn(rf"\boxed{{{answer}}}", truth)["reward"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "question", "right"),
    [(*row, float(of == "of_its_own")) for of in ("copied", "of_its_own") for row in UNEVALUATED[of]],
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
