"""Generated arithmetic word problems of several steps, in graded levels, from a seed.

A problem describes how a number of things changes from day to day, and asks for the final number. Level ``n`` has ``n + 1``
changes. The solution is a chain with one line per day. A hash of the question decides whether it belongs to the validation
split, so validation questions occur neither in the training split nor in the pretraining documents.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.graded import GradedTask, worked_response
from grpo.tasks.task import Share, Split

PEOPLE = (("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"))
THINGS = ("apples", "coins", "books", "shells")
GAINS = ("buys", "finds", "wins")
LOSSES = ("loses", "sells", "gives away")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
LARGEST = 15  # all intermediate results are in 0..LARGEST
VALIDATION_ONE_IN = 5


@dataclass(frozen=True)
class WordProblem:
    """A question with its numbers: how many things there are at the start, and their change on each day."""

    question: str
    start: int
    changes: tuple[int, ...]

    def solution(self, errors: Sequence[int] = (0,) * len(DAYS)) -> tuple[str, int]:
        """The chain of steps and the answer; each step is off by its error, and the next one continues from its result."""
        steps, number = [], self.start
        for day, change, error in zip(DAYS, self.changes, errors, strict=False):
            result = number + change + error
            steps.append(f"{day}: {number} {'+' if change > 0 else '-'} {abs(change)} = {result}.")
            number = result
        return " ".join(steps), number

    def derailed(self, rng: random.Random) -> tuple[str, int]:
        """A solution in which one step is off by 1 to 3."""
        at, error = rng.randrange(len(self.changes)), rng.randint(1, 3)
        return self.solution([error if place == at else 0 for place in range(len(self.changes))])


def make_word_problem(rng: random.Random, level: int) -> WordProblem:
    """Draw one problem of ``level + 1`` changes."""
    (person, pronoun), thing = rng.choice(PEOPLE), rng.choice(THINGS)
    start = number = rng.randint(1, LARGEST)
    question, changes = [f"{person} has {start} {thing}."], []
    for day in DAYS[: level + 1]:
        change = rng.choice([c for c in range(-9, 10) if c and 0 <= number + c <= LARGEST])
        verb = rng.choice(GAINS if change > 0 else LOSSES)
        question.append(f"On {day} {pronoun} {verb} {abs(change)}.")
        changes.append(change)
        number += change
    question.append(f"How many {thing} does {person} have?")
    return WordProblem(" ".join(question), start, tuple(changes))


def word_problems(seed: int, levels: int, validation: bool) -> Iterator[WordProblem]:
    """Yield distinct problems of one split without end, with levels drawn uniformly from 1 to ``levels``."""
    rng = random.Random(f"arithmetic {seed} {validation}")
    seen: set[str] = set()
    while True:
        problem = make_word_problem(rng, rng.randint(1, levels))
        in_validation = zlib.crc32(problem.question.encode()) % VALIDATION_ONE_IN == 0
        if in_validation == validation and problem.question not in seen:
            seen.add(problem.question)
            yield problem


COMPLETE = " </think> <answer>{answer}</answer>"
# Endings of documents that the r1_zero format does not accept.
INCOMPLETE = (
    " \\boxed{{{answer}}}",
    " </think> \\boxed{{{answer}}}",
    " </think> The answer is {answer}.",
    " <answer>{answer}</answer>",
    " </think> <answer>{answer}",
)


@dataclass(eq=False)
class Arithmetic(GradedTask):
    """Word problems with levels from 1 to ``levels``, drawn by the seed."""

    train_size: PositiveInt
    validation_size: PositiveInt
    levels: Annotated[int, Field(ge=1, le=5)]
    seed: int

    stands_for = "math"  # the small study is a miniature of the studies on MATH

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`."""
        stream = word_problems(self.seed, self.levels, split == "validation")
        drawn = itertools.islice(stream, getattr(self, f"{split}_size"))
        return [
            Problem(f"arithmetic/{split}/{i}", one.question, str(one.solution()[1]), len(one.changes) - 1, "word problem")
            for i, one in enumerate(drawn)
        ]

    def documents(  # type: ignore[override]
        self,
        seed: int,
        r1_zero_share: Share,
        complete_form_share: Share,
        guess_share: Share,
        native_guess_share: Share = 0.0,
        derailed_share: Share = 0.0,
    ) -> Iterator[tuple[str, str]]:
        """Yield (prompt, response) pairs without end, never with a validation question.

        They give a small model the behaviour of Qwen2.5-Math-1.5B: it solves part of the problems when asked the bare question,
        but under the r1_zero prompt it rarely closes the tags in the form that the reward requires. Guesses and wrong steps
        leave it reasoning to learn besides the form.

        Args:
            r1_zero_share: share of documents with the r1_zero prompt.
            complete_form_share: share of these that end in the form that the reward requires.
            guess_share: share of these with a random answer and no steps.
            native_guess_share: share of documents with the bare question that have a random answer and no steps.
            derailed_share: share of solutions with one wrong step, from which the later steps continue.
        """
        rng = random.Random(f"documents {seed}")
        for solved in word_problems(seed, self.levels, validation=False):
            r1_zero = rng.random() < r1_zero_share
            if rng.random() < (guess_share if r1_zero else native_guess_share):
                steps, answer = "", rng.randint(0, LARGEST)
            else:
                steps, answer = solved.derailed(rng) if rng.random() < derailed_share else solved.solution()
                steps = f" {steps}"
            yield document(rng, solved.question, steps, answer, complete_form_share if r1_zero else None)

    def traces(  # type: ignore[override]
        self, format: str, examples: PositiveInt, wrong_share: Share, seed: int
    ) -> list[tuple[Problem, str]]:
        """Solutions of the first ``examples`` training problems, with one wrong step in ``wrong_share`` of them.

        Raises UserError: ``examples`` exceeds the number of training problems.
        """
        if examples > self.train_size:
            raise UserError(
                f"examples: {examples} traces are asked for, but the task's train_size is {self.train_size}. "
                "Lower the former or raise the latter."
            )
        rng = random.Random(f"traces {seed}")
        stream = word_problems(self.seed, self.levels, validation=False)
        traces = []
        for problem, solved in zip(self.problems("train")[:examples], stream, strict=False):
            steps, answer = solved.derailed(rng) if rng.random() < wrong_share else solved.solution()
            traces.append((problem, worked_response(format, steps, str(answer))))
        return traces


def document(rng: random.Random, question: str, steps: str, answer: object, complete: float | None) -> tuple[str, str]:
    """A document with the r1_zero prompt, ``complete`` of which end in the accepted form; if None, with the bare question."""
    if complete is None:
        return question, f"{steps} \\boxed{{{answer}}}"
    ending = COMPLETE if rng.random() < complete else rng.choice(INCOMPLETE)
    return R1_ZERO.prompt(question), steps + ending.format(answer=answer)
