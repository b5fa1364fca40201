"""GSM8K (openai/gsm8k): grade-school word problems whose answers are numbers."""

from __future__ import annotations

import re

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.study.sections import DownloadedTask
from grpo.tasks.downloaded import Row, Split, checked_problem, load_solutions, load_task

_HUB_FILES = ["main/{split}-00000-of-00001.parquet"]
_MARK = "####"


def load(task: DownloadedTask) -> tuple[list[Problem], list[Problem]]:
    """Read train and validation (the source's test split).

    Rows have ``question`` and ``answer``; the short answer follows ``####`` in the latter and loses its thousands commas.

    Raises:
        UserError: see :func:`grpo.tasks.downloaded.load_task`.
    """
    return load_task(task, _HUB_FILES, _problem)


def solutions(task: DownloadedTask) -> list[tuple[Problem, str]]:
    """The training problems with their solutions, without the calculator's notes (``<<48/2=24>>``) and the short answer."""
    return load_solutions(task, _HUB_FILES, _problem, _solution)


def _solution(row: Row) -> str:
    return re.sub(r"<<[^>]*>>", "", row.text("answer").rpartition(_MARK)[0]).strip()


def _problem(row: Row, split: Split, number: int) -> Problem:
    question, solution = row.text("question"), row.text("answer")
    _, mark, answer = solution.rpartition(_MARK)
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise UserError(f"{row.where}: no short answer after '{_MARK} ' in column 'answer'. Correct or remove the row.")
    return checked_problem(row, Problem(id=f"gsm8k/{split}/{number}", question=question, ground_truth=answer))
