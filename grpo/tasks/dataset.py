"""A task from two columns of a dataset: on the Hugging Face Hub at a fixed revision, or in JSONL, parquet or CSV files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from grpo.common.errors import UserError
from grpo.common.imports import import_object, is_import_path
from grpo.common.records import Problem
from grpo.tasks.formats import PLAIN_CHAT
from grpo.tasks.graded import GradedTask, checked_problem
from grpo.tasks.rewards import REWARD_ARGUMENTS
from grpo.tasks.rows import REVISION, HubDataset, LocalFiles, Row, read_rows
from grpo.tasks.task import Settings, Split

Verify = Callable[[list[str], list[Problem]], list[float]]
COLUMNS = {  # usual names of columns; `messages` has both
    "question": ("question", "problem", "prompt", "messages"),
    "answer": ("answer", "ground_truth", "messages"),
}


class HubSplits(Settings):
    """Names of the splits on the Hub, or parts of one split: ``train[:95%]`` and ``train[95%:]``."""

    train: str = "train"
    validation: str = "test"


def exactly(answers: list[str], problems: list[Problem]) -> list[float]:
    """1.0 if the answer equals the ground truth, except for surrounding white space, else 0.0."""
    return [float(answer.strip() == p.ground_truth.strip()) for answer, p in zip(answers, problems, strict=True)]


class Dataset(GradedTask):
    """Problems from two columns of a dataset.

    Raises UserError if not exactly one of ``hub`` and ``files`` is given, or ``verify`` is unknown.

    Args:
        question: column of the question; of a list of messages (``role``, ``content``) the last one of the user.
        answer: column of the ground truth, text or a number; of a list of messages the last one of the assistant.
        hub: a dataset on the Hub, with its ``revision`` (a commit), its ``config`` if it has several, and the names of its
            ``splits``.
        files: instead of ``hub``, two files, JSONL, parquet or CSV by suffix, or two parts of one file: ``FILE[:90%]`` and
            ``FILE[90%:]``.
        verify: ``math`` (the grader), ``exact``, or the import path of a function with the signature of :meth:`Task.verify`.
        drop_overlap: leave out training questions that are also validation questions, instead of refusing them.
        unevaluated: with ``verify: math``, accept unevaluated arithmetic (``2+2``) and expressions of the question as answers.
        system: a system message before the question, in the formats that are chats.
        columns: further columns, passed to reward functions. Numbers of text files stay text.
        skip_unusable: leave out and count rows without a question or without an answer that ``verify`` can use, instead of
            refusing them.
    """

    def __init__(
        self,
        question: str,
        answer: str,
        hub: str | None = None,
        revision: Annotated[str, REVISION] | None = None,
        config: str | None = None,
        splits: HubSplits = HubSplits(),  # noqa: B008 - frozen
        files: LocalFiles | None = None,
        verify: str = "math",
        drop_overlap: bool = False,
        unevaluated: bool = False,
        skip_unusable: bool = False,
        columns: tuple[str, ...] | list[str] = (),
        system: str = "",
    ):
        if (hub is None) == (files is None):
            raise UserError("name either `hub` or `files`, and not both.")
        if taken := [name for name in columns if name in REWARD_ARGUMENTS]:
            raise UserError(f"columns: reward functions get a {taken[0]} already. Rename the column.")
        self.reward_columns = tuple(columns)
        formats = {**GradedTask.formats, "plain_chat": PLAIN_CHAT}
        self.formats = {  # type: ignore[misc]
            name: replace(format, system=system) if format.chat else format for name, format in formats.items()
        }
        if hub is not None and revision is None:
            raise UserError(f"{hub}: give the `revision`, 40 hex digits: the Hub lists it under Files, History.")
        self.question, self.answer, self.drop_overlap, self.unevaluated = question, answer, drop_overlap, unevaluated
        self.files, self.splits, self.config = files, splits, config
        self.own_files = files.names if files else ()
        self.source = HubDataset(hub=hub, revision=revision) if hub and revision else None
        self.graded, self.skip_unusable = verify == "math", skip_unusable
        self._skipped: dict[Split, list[str]] = {}
        self.own_code = (verify,) if is_import_path(verify) else ()
        if not self.own_code and verify not in ("math", "exact"):
            raise UserError(f"verify: expected math, exact, or an import path MODULE:NAME, but it is {verify!r}.")
        self._verify: Verify = {"math": super().verify, "exact": exactly}.get(verify) or import_object(verify)

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`; ids are row numbers.

        Raises UserError if the dataset cannot be read, it lacks a column, a row is unusable (without ``skip_unusable``), or no
        row is left.
        """
        problems: list[Problem] = []
        skipped: list[str] = []
        for number, row in enumerate(self._rows(split)):
            try:
                further = {name: row.value(name) for name in self.reward_columns}
                question, answer = row.said(self.question, "user"), row.said(self.answer, "assistant")
                problem = Problem(f"{split}/{number}", question, answer, columns=further)
                problems.append(checked_problem(problem, row.where, self.graded))
            except UserError as error:
                if not self.skip_unusable:
                    raise
                skipped.append(str(error))
        if not problems:
            why = f"has no usable row; the first: {skipped[0]}" if skipped else "is empty."
            raise UserError(f"{self.params_key}: the {split} split {why} Check `{self.params_key}`.")
        self._skipped[split] = skipped
        return problems

    def skipped(self, split: Split) -> list[str]:
        return self._skipped[split]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return self._verify(answers, problems)

    def _rows(self, split: Split) -> list[Row]:
        if self.source is None:
            key, file = f"{self.params_key}.files.{split}", getattr(self.files, split)
            if file is None:
                raise UserError(f"{key}: missing. Name a file to train on.")
            return read_rows(file, key)
        return self.source.rows(getattr(self.splits, split), (self.question, self.answer), self.params_key, self.config)


def columns_of(row: Row, where: str, remedy: str, given: Collection[str] = ()) -> dict[str, str]:
    """Find the columns of questions and answers by their usual names, but for those that are given; UserError without one."""
    columns = {}
    for which, usual in COLUMNS.items():
        if which not in given:
            column = next((name for name in usual if name in row.values), None)
            if column is None:
                there = ", ".join(row.values)
                raise UserError(f"{where}: no column for the {which}. {remedy.format(which)} {there}.")
            columns[which] = column
    return columns


def entry_of_file(path: Path) -> dict[str, Any]:
    """The entry of ``tasks:`` that reads a file to be evaluated: MATH's rows, GSM8K's, or the columns of :data:`COLUMNS`."""
    first, files = read_rows(str(path), "--file")[0], {"validation": str(path)}
    if {"problem", "level"} <= first.values.keys():
        return {"use": "math", "source": files}
    if "question" in first.values and "####" in str(first.values.get("answer")):
        return {"use": "gsm8k", "source": files}
    return {"use": "dataset", "files": files, **columns_of(first, str(path), "Call one so: {0}; there are")}
