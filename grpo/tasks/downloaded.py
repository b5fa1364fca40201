"""Tasks with problems from the rows of a dataset: local files, or the Hub at a fixed revision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from grpo.common.errors import UserError
from grpo.common.imports import named_file
from grpo.common.records import Problem
from grpo.grader.grader import check_ground_truth
from grpo.tasks.graded import GradedTask, worked_response
from grpo.tasks.rows import HUB_SPLIT, HubSource, LocalFiles, Row, read_rows
from grpo.tasks.task import Split


class HubDataset(BaseModel):
    """A dataset on the Hugging Face Hub at a fixed revision.

    ``held_out`` is for a dataset without configurations and test split, such as qwedsacf/competition_math: that many fixed
    random rows become the validation split.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hub: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    held_out: PositiveInt | None = None


class Counts(BaseModel):
    """Required number of problems of each split; another number means that the source has changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: PositiveInt
    validation: PositiveInt


class Downloaded(GradedTask):
    """Base class of tasks with problems from rows; a subclass converts a row into a problem.

    Args:
        source: where to read the rows.
        expected: required number of problems, to notice changes of the source.
        drop_overlap: leave out training questions that are also validation questions, instead of refusing them.
    """

    name: ClassVar[str]
    hub_configs: ClassVar[Sequence[str]]  # configurations of the dataset on the Hub, read one after the other
    columns: ClassVar[Sequence[str]]  # that a row may have

    def __init__(self, source: HubDataset | LocalFiles, expected: Counts | None = None, drop_overlap: bool = False):
        self.source, self.expected, self.drop_overlap = source, expected, drop_overlap

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
        key = f"{self.params_key}.source"
        if isinstance(self.source, LocalFiles):
            return read_rows(named_file(getattr(self.source, split)), f"{key}.{split}")
        where = {"hub": self.source.hub, "revision": self.source.revision, "key": key}
        if self.source.held_out is not None:
            return _share(HubSource(**where).rows(self.columns), split, self.source.held_out)
        where["split"] = HUB_SPLIT[split]
        return [row for config in self.hub_configs for row in HubSource(**where, config=config).rows(self.columns)]


def _share(rows: list[Row], split: Split, held_out: int) -> list[Row]:
    """The rows of one split, in their order."""
    chosen = set(random.Random("held out").sample(range(len(rows)), min(held_out, len(rows))))
    return [row for place, row in enumerate(rows) if (place in chosen) == (split == "validation")]


def checked_problem(row: Row, problem: Problem) -> Problem:
    """Return ``problem`` if its question is not blank and the grader accepts its ground truth.

    Raises:
        UserError: otherwise; the message names the row.
    """
    if not problem.question.strip():
        raise UserError(f"{row.where}: the question is empty. Correct or remove the row.")
    try:
        check_ground_truth(problem.ground_truth)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    return problem
