"""MATH and GSM8K, from local files or from the Hub at a fixed revision.

MATH (Hendrycks et al. 2021) has competition problems of five levels in seven subjects: on the Hub EleutherAI/hendrycks_math
with the published splits, or qwedsacf/competition_math with all 12,500 problems in one split. GSM8K (openai/gsm8k) has
grade-school word problems whose answers are numbers.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.grader.extract import last_boxed
from grpo.tasks.graded import GradedTask, checked_problem, worked_response
from grpo.tasks.rows import HubDataset, LocalFiles, Row, read_rows
from grpo.tasks.task import Settings, Split

# They have no validation split on the Hub; as in the handouts, the test split is used.
HUB_SPLIT: dict[Split, str] = {"train": "train", "validation": "test"}


class Counts(Settings):
    """Required number of problems of each split; another number means that the source has changed."""

    train: PositiveInt
    validation: PositiveInt


@dataclass(eq=False)
class Downloaded(GradedTask):
    """Base class of both; a subclass converts a row into a problem."""

    source: HubDataset | LocalFiles  # where to read the rows
    expected: Counts | None = None  # required number of problems, to notice changes of the source
    drop_overlap: bool = False  # leave out training questions that are also validation questions, instead of refusing them

    name: ClassVar[str]
    hub_configs: ClassVar[Sequence[str]]  # configurations of the dataset on the Hub, read one after the other
    columns: ClassVar[Sequence[str]]  # that a row may have

    def __post_init__(self) -> None:
        self.own_files = self.source.names if isinstance(self.source, LocalFiles) else ()

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        """The problem in a row, given the split and the row's number in it (from 0)."""
        raise NotImplementedError

    def solution(self, row: Row) -> str:
        """The worked solution in a row."""
        raise NotImplementedError

    def problems(self, split: Split) -> list[Problem]:
        """Read, convert and check a split of the source (``validation`` is its test split).

        Raises UserError if a file or a column is missing, a row is unusable, the split is empty, or its size differs from
        ``expected``.
        """
        problems = [self.problem(row, split, number) for number, row in enumerate(self._rows(split))]
        if not problems:
            raise UserError(f"{self.params_key}.source: the {split} split of {self.name} is empty. Check the source.")
        expected = getattr(self.expected, split) if self.expected else len(problems)
        if len(problems) != expected:
            raise UserError(
                f"{self.params_key}.expected.{split}: {expected} problems expected, but the source has {len(problems)}. "
                f"Check that `{self.params_key}.source` is the dataset you mean, or correct the number."
            )
        return problems

    def traces(self, format: str) -> list[tuple[Problem, str]]:  # type: ignore[override]
        """The training problems with the source's own solutions, which are all right."""
        solved = [(self.problem(row, "train", number), self.solution(row)) for number, row in enumerate(self._rows("train"))]
        return [(problem, worked_response(format, steps, problem.ground_truth)) for problem, steps in solved]

    def _rows(self, split: Split) -> list[Row]:
        source, key = self.source, f"{self.params_key}.source"
        if isinstance(source, LocalFiles):
            return read_rows(getattr(source, split), f"{key}.{split}")
        if source.held_out is None:
            parts = (source.rows(HUB_SPLIT[split], self.columns, key, config) for config in self.hub_configs)
            return [row for rows in parts for row in rows]
        rows = source.rows("train", self.columns, key)
        held_out = set(random.Random("held out").sample(range(len(rows)), min(source.held_out, len(rows))))
        return [row for place, row in enumerate(rows) if (place in held_out) == (split == "validation")]


# ------------------------------------------------------------------------------------------------------------------ MATH

SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra"),
    "precalculus",
)

# Two problems of the original training set, number_theory/7115 and 7117, were published without a solution. Both ask for the
# number of primes among numbers that are all composite, so the answer is 0. A reader cannot correct a dataset at a fixed
# revision, and refusing these rows would refuse MATH. SHA-256 of the questions with white space collapsed; a row with an answer
# keeps it.
_UNANSWERED = (
    "79595ba3b4cfcfe2199d686e80a0ccf75c9e41ebbb03a801cfaa02c740ac4680",
    "81a7fe8e017d681cc815fff2e03a4e69fc15c6b6f768109943fcaf6ba54d22dd",
)


@dataclass(eq=False)
class Math(Downloaded):
    r"""MATH. Rows have ``problem``, ``level`` ("Level 3"; "Level ?" becomes 0), ``subject`` or ``type``, and ``answer`` or
    ``solution``, whose last ``\boxed{}`` is the answer. ``unique_id`` is optional.

    ``parse_solutions``: if a solution has no ``\boxed{}``, let Math-Verify read the answer. It may read a number that is not
    the answer, so by default such a row is refused.
    """

    parse_solutions: bool = False

    name = "math"
    stands_for = "math"
    hub_configs = SUBJECTS
    columns = ("problem", "level", "subject", "type", "answer", "solution", "unique_id")

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        question, subject = row.text("problem"), row.text("subject", "type")
        # Some releases name a row by its number in the original release, which has other splits; the split makes ids unique.
        name = row.text("unique_id") if row.values.get("unique_id") else str(number)
        answer = _short_answer(row, question, self.parse_solutions)
        return checked_problem(Problem(f"math/{split}/{name}", question, answer, _level(row), subject), row.where)

    def solution(self, row: Row) -> str:
        return row.text("solution").strip()


def _level(row: Row) -> int:
    text = row.text("level")
    match = re.fullmatch(r"\s*(?:Level\s+)?([1-5]|\?)\s*", text)
    if not match:
        raise UserError(f"{row.where}: level {text!r}, but 'Level 1' to 'Level 5' or 'Level ?' is expected. Correct the row.")
    return 0 if match[1] == "?" else int(match[1])


def _short_answer(row: Row, question: str, parse_solutions: bool) -> str:
    text, is_given = row.text("answer", "solution"), "answer" in row.values
    answer = text.strip() if is_given else last_boxed(text)
    if not answer and parse_solutions and not is_given:
        from math_verify import parse

        answer = str(parsed[-1]).strip() if (parsed := parse(text)) else None
    if answer:
        return answer
    if hashlib.sha256(" ".join(question.split()).encode()).hexdigest() in _UNANSWERED:
        return "0"
    what = "an empty 'answer'" if is_given else "no \\boxed{} with an answer in 'solution'"
    raise UserError(f"{row.where}: {what}. Correct or remove the row.")


class Gsm8k(Downloaded):
    """GSM8K. Rows have ``question`` and ``answer``, whose short answer follows ``####``; its thousands commas are removed."""

    name = "gsm8k"
    hub_configs = ("main",)
    columns = ("question", "answer")

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        question, solution = row.text("question"), row.text("answer")
        _, mark, answer = solution.rpartition("####")
        answer = answer.strip().replace(",", "")
        if not mark or not answer:
            raise UserError(f"{row.where}: no short answer after '####' in column 'answer'. Correct or remove the row.")
        return checked_problem(Problem(f"gsm8k/{split}/{number}", question, answer), row.where)

    def solution(self, row: Row) -> str:
        """The column ``answer`` without calculator annotations (``<<48/2=24>>``) and the short answer."""
        return re.sub(r"<<[^<>]*>>", "", row.text("answer").rpartition("####")[0]).strip()
