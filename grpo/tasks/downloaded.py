"""Tasks with problems from the rows of a dataset: local files, or the Hub at a fixed revision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, PositiveInt

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.grader.grader import check_ground_truth
from grpo.tasks.graded import GradedTask, worked_response
from grpo.tasks.rows import HubDataset, LocalFiles, Row, read_rows
from grpo.tasks.task import Split

# These datasets have no validation split on the Hub; as in the handouts, the test split is used.
HUB_SPLIT: dict[Split, str] = {"train": "train", "validation": "test"}


class Counts(BaseModel):
    """Required number of problems of each split; another number means that the source has changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: PositiveInt
    validation: PositiveInt


@dataclass(eq=False)
class Downloaded(GradedTask):
    """Base class of tasks with problems from rows; a subclass converts a row into a problem.

    Attributes:
        source: where to read the rows.
        expected: required number of problems, to notice changes of the source.
        drop_overlap: leave out training questions that are also validation questions, instead of refusing them.
    """

    source: HubDataset | LocalFiles
    expected: Counts | None = None
    drop_overlap: bool = False

    name: ClassVar[str]
    hub_configs: ClassVar[Sequence[str]]  # configurations of the dataset on the Hub, read one after the other
    columns: ClassVar[Sequence[str]]  # that a row may have

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        """The problem in a row, given the split and the row's number in it (from 0)."""
        raise NotImplementedError

    def solution(self, row: Row) -> str:
        """The worked solution in a row."""
        raise NotImplementedError

    def problems(self, split: Split) -> list[Problem]:
        """Read, convert and check a split of the source (``validation`` is its test split).

        Raises:
            UserError: a file or a column is missing, a row is unusable, the split is empty, or its size differs from
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
            found = (source.rows(HUB_SPLIT[split], self.columns, key, config) for config in self.hub_configs)
            return [row for rows in found for row in rows]
        rows = source.rows("train", self.columns, key)
        held_out = set(random.Random("held out").sample(range(len(rows)), min(source.held_out, len(rows))))
        return [row for place, row in enumerate(rows) if (place in held_out) == (split == "validation")]


def checked_problem(row: Row, problem: Problem, graded: bool = True) -> Problem:
    """Return ``problem`` if it has a question and an answer, one that the grader accepts if it is ``graded``.

    Raises:
        UserError: otherwise; the message names the row.
    """
    try:
        if not problem.question.strip():
            raise UserError("the question is empty. Correct or remove the row.")
        if graded:
            check_ground_truth(problem.ground_truth)  # else no answer could match
        elif not problem.ground_truth.strip():
            raise UserError("the answer is empty. Correct or remove the row.")
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    return problem
