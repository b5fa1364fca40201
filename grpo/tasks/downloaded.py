"""Tasks whose problems come from rows of a dataset: files, or the Hub at a fixed revision."""

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
    """A dataset on the Hugging Face Hub at one fixed revision.

    With ``held_out`` it is one that has neither configurations nor a test split, such as qwedsacf/competition_math: so many of
    its rows, the same ones every time, are the validation split.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hub: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    held_out: PositiveInt | None = None


class Counts(BaseModel):
    """How many problems each split must have; anything else means that the source changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: PositiveInt
    validation: PositiveInt


class Downloaded(GradedTask):
    """Problems from a source of rows; a subclass says what its rows hold.

    Args:
        source: where the rows are; its splits may overlap (``drop_overlap``).
        expected: how many there are, to notice when they are others.
    """

    name: ClassVar[str]
    hub_configs: ClassVar[Sequence[str]]  # of the dataset on the Hub, all of which are read, one after the other
    columns: ClassVar[Sequence[str]]  # that a row may have

    def __init__(self, source: HubDataset | LocalFiles, expected: Counts | None = None, drop_overlap: bool = False):
        self.source, self.expected, self.drop_overlap = source, expected, drop_overlap

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        """What a row holds, given the split and the row's number in it (from 0)."""
        raise NotImplementedError

    def solution(self, row: Row) -> str:
        """The worked solution that a row holds."""
        raise NotImplementedError

    def problems(self, split: Split) -> list[Problem]:
        """Read, convert and check a split, as the source has it (``validation`` is its test split).

        Raises:
            UserError: a file or a column is missing, a row is not usable, the split is empty, or the number of rows is not that
                in ``expected``.
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
        """The training problems with the solutions that come with them. All are right."""
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
    """The rows of one split, in the order in which they stand."""
    chosen = set(random.Random("held out").sample(range(len(rows)), min(held_out, len(rows))))
    return [row for place, row in enumerate(rows) if (place in chosen) == (split == "validation")]


def checked_problem(row: Row, problem: Problem) -> Problem:
    """``problem``, if its question is not blank and its ground truth is one the grader accepts.

    Raises:
        UserError: it is not; the message names the row.
    """
    if not problem.question.strip():
        raise UserError(f"{row.where}: the question is empty. Correct or remove the row.")
    try:
        check_ground_truth(problem.ground_truth)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    return problem
