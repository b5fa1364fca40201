"""A task from two columns of any dataset: on the Hugging Face Hub at a fixed revision, or in JSONL, parquet or CSV files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from grpo.common.errors import UserError
from grpo.common.imports import import_object, is_import_path
from grpo.common.records import Problem
from grpo.tasks.downloaded import checked_problem
from grpo.tasks.graded import GradedTask
from grpo.tasks.rows import FORMATS, HUB_SPLIT, HubSource, LocalFiles, Row, file_of, read_part
from grpo.tasks.task import Split

Verify = Callable[[list[str], list[Problem]], list[float]]


class HubSplits(BaseModel):
    """What the splits are called on the Hub, or parts of one: ``train[:95%]`` and ``train[95%:]``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: str = HUB_SPLIT["train"]
    validation: str = HUB_SPLIT["validation"]


def exactly(answers: list[str], problems: list[Problem]) -> list[float]:
    """1.0 where the answer is the ground truth, letter by letter but for white space around it."""
    return [float(answer.strip() == p.ground_truth.strip()) for answer, p in zip(answers, problems, strict=True)]


class Dataset(GradedTask):
    """Problems from two columns.

    Args:
        question: the column with the question.
        answer: the column with the ground truth: text or a number.
        hub: a dataset on the Hub, with the ``revision`` (a commit) at which it is read, its ``config`` where it has several,
            and the names of its ``splits``.
        files: or two files, JSONL, parquet or CSV by their endings, or two parts of one: ``FILE[:90%]`` and ``FILE[90%:]``.
        verify: ``math`` (the grader), ``exact``, or an import path of a function that does what :meth:`Task.verify` does.
        drop_overlap: training questions that are also validation questions are left out, not refused.
        unevaluated: with ``verify: math``, arithmetic that is left to do (``2+2``) and expressions of the question are answers.
        skip_unusable: rows without a question or without an answer that ``verify`` can use are left out and counted, not
            refused.

    Raises:
        UserError: neither ``hub`` nor ``files`` is given or both are, or a file's ending or ``verify`` means nothing.
    """

    def __init__(
        self,
        question: str,
        answer: str,
        hub: str | None = None,
        revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None,
        config: str | None = None,
        splits: HubSplits = HubSplits(),  # noqa: B008 - it is frozen
        files: LocalFiles | None = None,
        verify: str = "math",
        drop_overlap: bool = False,
        unevaluated: bool = False,
        skip_unusable: bool = False,
    ):
        if (hub is None) == (files is None):
            raise UserError("name either `hub` or `files`, and not both.")
        if hub is not None and revision is None:
            raise UserError(f"{hub}: give the `revision`, 40 hex digits: the Hub lists it under Files, History.")
        for name in (files.train, files.validation) if files else ():
            if Path(file_of(name)).suffix not in FORMATS:
                raise UserError(f"files: {name}: cannot be read. Its ending says what it is, one of {', '.join(FORMATS)}.")
        self.question, self.answer, self.drop_overlap, self.unevaluated = question, answer, drop_overlap, unevaluated
        self.hub, self.revision, self.config, self.splits, self.files = hub, revision, config, splits, files
        self.math, self.skip_unusable = verify == "math", skip_unusable
        self._read: dict[Split, tuple[list[Problem], list[str]]] = {}
        self.own_code = (verify,) if is_import_path(verify) else ()
        if not self.own_code and verify not in ("math", "exact"):
            raise UserError(f"verify: expected math, exact, or an import path MODULE:NAME, but it is {verify!r}.")
        self._verify: Verify = {"math": super().verify, "exact": exactly}.get(verify) or import_object(verify)

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`; ids are the rows' places.

        Raises:
            UserError: the dataset cannot be had or read, it has no such column, a row is not usable and is not to be skipped,
                or no row is left.
        """
        found, skipped = self._problems_and_skipped(split)
        if not found:
            why = f"has no usable row; the first: {skipped[0]}" if skipped else "is empty."
            raise UserError(f"{self._where(split)}: {why} Check `{self.params_key}`.")
        return found

    def skipped(self, split: Split) -> list[str]:
        """See :meth:`Task.skipped`."""
        return self._problems_and_skipped(split)[1]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """By what the study's ``verify:`` names."""
        return self._verify(answers, problems)

    def _problems_and_skipped(self, split: Split) -> tuple[list[Problem], list[str]]:
        if split not in self._read:
            found: list[Problem] = []
            skipped: list[str] = []
            for number, row in enumerate(self._rows(split)):
                try:
                    found.append(self._problem(row, f"{split}/{number}"))
                except UserError as error:
                    if not self.skip_unusable:
                        raise
                    skipped.append(str(error))
            self._read[split] = found, skipped
        return self._read[split]

    def _problem(self, row: Row, id: str) -> Problem:
        problem = Problem(id, row.text(self.question), row.text(self.answer))
        if self.math:
            return checked_problem(row, problem)  # a ground truth that the grader cannot read would never be met
        if not problem.question.strip() or not problem.ground_truth.strip():
            raise UserError(f"{row.where}: the question or the answer is empty. Correct or remove the row.")
        return problem

    def _where(self, split: Split) -> str:
        return getattr(self.files, split) if self.files else f"{self.hub} {getattr(self.splits, split)}"

    def _rows(self, split: Split) -> list[Row]:
        if self.files is not None:
            return read_part(getattr(self.files, split), f"{self.params_key}.files.{split}")
        assert self.hub is not None
        part = getattr(self.splits, split)
        source = HubSource(self.hub, self.revision, self.params_key, part, self.config)
        return source.rows((self.question, self.answer))
