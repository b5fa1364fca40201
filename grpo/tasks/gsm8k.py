"""GSM8K (openai/gsm8k): grade-school word problems whose answers are numbers."""

from __future__ import annotations

import re

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.tasks.downloaded import Downloaded, checked_problem
from grpo.tasks.rows import Row
from grpo.tasks.task import Split

_MARK = "####"


class Gsm8k(Downloaded):
    """GSM8K. Rows have ``question`` and ``answer``, whose short answer follows ``####``; its thousands commas are removed."""

    name = "gsm8k"
    hub_configs = ("main",)
    columns = ("question", "answer")

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        """See :meth:`Downloaded.problem`."""
        question, solution = row.text("question"), row.text("answer")
        _, mark, answer = solution.rpartition(_MARK)
        answer = answer.strip().replace(",", "")
        if not mark or not answer:
            raise UserError(f"{row.where}: no short answer after '{_MARK} ' in column 'answer'. Correct or remove the row.")
        return checked_problem(row, Problem(id=f"gsm8k/{split}/{number}", question=question, ground_truth=answer))

    def solution(self, row: Row) -> str:
        """The column ``answer`` without calculator annotations (``<<48/2=24>>``) and the short answer."""
        return re.sub(r"<<[^>]*>>", "", row.text("answer").rpartition(_MARK)[0]).strip()
