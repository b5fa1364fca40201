"""Tasks with mathematical answers: asked in the handouts' two formats or in a chat, and verified by the grader."""

from __future__ import annotations

import math
import re

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.grader.grader import check_ground_truth
from grpo.grader.process import grade_batch
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.formats import CHAT, CHAT_WITHOUT_THINKING, QUESTION_ONLY, R1_ZERO
from grpo.tasks.task import Task

_THINK = re.compile("</?think>")
# The end of a response, after the steps of a solution.
_TAGS, _BOX = " </think> <answer>{answer}</answer>", " \\boxed{{{answer}}}"


class GradedTask(Task):
    """Base class of tasks whose answers are right if :mod:`grpo.grader` finds them equal to the ground truth."""

    unevaluated = False
    """Whether unevaluated arithmetic, or an expression copied from the question, may be an answer
    (:mod:`grpo.grader.unevaluated`)."""

    formats = {"r1_zero": R1_ZERO, "question_only": QUESTION_ONLY, "chat": CHAT, "chat_without_thinking": CHAT_WITHOUT_THINKING}

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """1.0 for a right answer, 0.0 for a wrong one, NaN if the grader ran out of time. Computer algebra uses all cores.

        Raises RuntimeError if the processes for computer algebra cannot start.
        """
        verdicts = grade_batch([(answer, problem.ground_truth) for answer, problem in zip(answers, problems, strict=True)])
        return [
            math.nan
            if verdict.timed_out
            else float(verdict.equal and (self.unevaluated or counts_as_answer(answer, one.ground_truth, one.question)))
            for verdict, answer, one in zip(verdicts, answers, problems, strict=True)
        ]

    def rewrite(self, response: str, asked_in: str, format: str) -> str | None:
        """See :meth:`Task.rewrite`: keep the whole response as steps, and add its answer in the other form."""
        answer = self.formats[asked_in].read(response)
        if answer is None:
            return None
        steps = _THINK.sub("", response).strip()
        if self.formats[asked_in].read is self.formats[format].read:
            return steps if self.formats[format].chat else f" {steps}"
        return worked_response(format, steps, answer)


def worked_response(format: str, steps: str, answer: str) -> str:
    """Build a response from the steps of a solution and its answer, in the form that ``format`` requires."""
    response = f" {steps}" + (_TAGS if format == "r1_zero" else _BOX).format(answer=answer)
    return response.lstrip() if GradedTask.formats[format].chat else response


def checked_problem(problem: Problem, where: str, graded: bool = True) -> Problem:
    """Return ``problem`` if it has a question and an answer, one that the grader accepts if it is ``graded``.

    Raises UserError: otherwise; the message begins with the problem's place, ``where``.
    """
    try:
        if not problem.question.strip():
            raise UserError("the question is empty. Correct or remove the row.")
        if graded:
            check_ground_truth(problem.ground_truth)  # else no answer could match
        elif not problem.ground_truth.strip():
            raise UserError("the answer is empty. Correct or remove the row.")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return problem
