"""MATH (Hendrycks et al. 2021): competition problems of five levels in seven subjects.

Sources on the Hub: EleutherAI/hendrycks_math with the published splits, or qwedsacf/competition_math with all 12,500 problems
in one split.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.grader.extract import last_boxed
from grpo.tasks.downloaded import Downloaded, checked_problem
from grpo.tasks.rows import Row
from grpo.tasks.task import Split

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

    Attributes:
        parse_solutions: if a solution has no ``\boxed{}``, let Math-Verify read the answer. It may read a number that is not
            the answer, so by default such a row is refused.
    """

    parse_solutions: bool = False

    name = "math"
    stands_for = "math"
    hub_configs = SUBJECTS
    columns = ("problem", "level", "subject", "type", "answer", "solution", "unique_id")

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        """See :meth:`Downloaded.problem`."""
        question, subject = row.text("problem"), row.text("subject", "type")
        # Some releases name a row by its number in the original release, which has other splits; the split makes ids unique.
        name = row.text("unique_id") if row.values.get("unique_id") else str(number)
        answer = _short_answer(row, question, self.parse_solutions)
        return checked_problem(row, Problem(f"math/{split}/{name}", question, answer, _level(row), subject))

    def solution(self, row: Row) -> str:
        """The column ``solution``."""
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

        answer = str(found[-1]).strip() if (found := parse(text)) else None
    if answer:
        return answer
    if hashlib.sha256(" ".join(question.split()).encode()).hexdigest() in _UNANSWERED:
        return "0"
    what = "an empty 'answer'" if is_given else "no \\boxed{} with an answer in 'solution'"
    raise UserError(f"{row.where}: {what}. Correct or remove the row.")
