"""Tasks whose answers are mathematics: asked in the handouts' two formats or in chats, and verified by the grader."""

from __future__ import annotations

import math
import re

from grpo.common.records import Problem
from grpo.grader.pool import grade_batch
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.formats import CHAT, CHAT_WITHOUT_THINKING, QUESTION_ONLY, R1_ZERO
from grpo.tasks.task import Task

# How a response ends after the steps of a solution.
_THINK = re.compile("</?think>")
_TAGS, _BOX = " </think> <answer>{answer}</answer>", " \\boxed{{{answer}}}"


class GradedTask(Task):
    """An answer is right where :mod:`grpo.grader` finds it equal to the problem's ground truth."""

    unevaluated = False
    """Whether arithmetic that is left to do, or copied from the question, is an answer (:mod:`grpo.grader.unevaluated`)."""

    formats = {
        "r1_zero": R1_ZERO,
        "question_only": QUESTION_ONLY,
        "chat": CHAT,
        "chat_without_thinking": CHAT_WITHOUT_THINKING,
    }

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """1.0 or 0.0; NaN where the grader ran out of time. What needs computer algebra is spread over all cores.

        Raises:
            RuntimeError: computer algebra is needed, and its processes cannot start.
        """
        verdicts = grade_batch([(answer, problem.ground_truth) for answer, problem in zip(answers, problems, strict=True)])
        return [
            math.nan if verdict.timed_out else float(verdict.equal and self._counts(answer, problem))
            for verdict, answer, problem in zip(verdicts, answers, problems, strict=True)
        ]

    def _counts(self, answer: str, problem: Problem) -> bool:
        return self.unevaluated or counts_as_answer(answer, problem.ground_truth, problem.question)

    def rewrite(self, response: str, asked_in: str, format: str) -> str | None:
        """See :meth:`Task.rewrite`: the whole response as steps, then its answer in the other form."""
        answer = self.formats[asked_in].read(response)
        if answer is None:
            return None
        steps = _THINK.sub("", response).strip()
        if self.formats[asked_in].read is self.formats[format].read:
            return steps if self.formats[format].chat else f" {steps}"
        return worked_response(format, steps, answer)


def worked_response(format: str, steps: str, answer: str) -> str:
    """A response that gives the steps of a solution and the answer, in the form that ``format`` asks for."""
    response = f" {steps}" + (_TAGS if format == "r1_zero" else _BOX).format(answer=answer)
    return response.lstrip() if GradedTask.formats[format].chat else response
