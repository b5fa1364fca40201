"""Generated arithmetic word problems: several steps, graded difficulty, unlimited, seeded.

A problem tells how a number of things changes from day to day and asks for the number at the end. Level ``n`` has
``n + 1`` changes. Its solution is a chain with one line a day. Whether a question belongs to the validation split is a
property of its text (a hash), so the splits, and the documents the mini model is pretrained on, can never overlap.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from grpo.common.records import Problem
from grpo.study.sections import ArithmeticTask

PEOPLE = (("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"))
THINGS = ("apples", "coins", "books", "shells")
GAINS = ("buys", "finds", "wins")
LOSSES = ("loses", "sells", "gives away")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
LARGEST = 15  # every number on the way lies in 0..LARGEST
VALIDATION_ONE_IN = 5
_STEP = re.compile(r"(\w+): (\d+) ([+-]) (\d+) = (\d+)\.")


@dataclass(frozen=True)
class WordProblem:
    """A question, the chain of steps that solves it, and its answer."""

    question: str
    steps: str
    answer: int
    level: int


def make_word_problem(rng: random.Random, level: int) -> WordProblem:
    """Draw one problem of ``level + 1`` changes."""
    (person, pronoun), thing = rng.choice(PEOPLE), rng.choice(THINGS)
    number = rng.randint(1, LARGEST)
    question, steps = [f"{person} has {number} {thing}."], []
    for day in DAYS[: level + 1]:
        change = rng.choice([c for c in range(-9, 10) if c and 0 <= number + c <= LARGEST])
        verb = rng.choice(GAINS if change > 0 else LOSSES)
        question.append(f"On {day} {pronoun} {verb} {abs(change)}.")
        steps.append(f"{day}: {number} {'+' if change > 0 else '-'} {abs(change)} = {number + change}.")
        number += change
    question.append(f"How many {thing} does {person} have?")
    return WordProblem(" ".join(question), " ".join(steps), number, level)


def derail(problem: WordProblem, rng: random.Random) -> WordProblem:
    """The same question with a solution that miscalculates one step by 1 to 3 and goes on from there."""
    steps = _STEP.findall(problem.steps)
    at, error = rng.randrange(len(steps)), rng.randint(1, 3)
    told, number = [], int(steps[0][1])
    for i, (day, _, sign, change, _) in enumerate(steps):
        result = number + (int(change) if sign == "+" else -int(change)) + (error if i == at else 0)
        told.append(f"{day}: {number} {sign} {change} = {result}.")
        number = result
    return WordProblem(problem.question, " ".join(told), number, problem.level)


def word_problems(seed: int, levels: int, validation: bool) -> Iterator[WordProblem]:
    """An endless stream of distinct problems of one split, levels drawn uniformly from 1 to ``levels``."""
    rng = random.Random(f"arithmetic {seed} {validation}")
    seen: set[str] = set()
    while True:
        problem = make_word_problem(rng, rng.randint(1, levels))
        in_validation = zlib.crc32(problem.question.encode()) % VALIDATION_ONE_IN == 0
        if in_validation == validation and problem.question not in seen:
            seen.add(problem.question)
            yield problem


def load(task: ArithmeticTask) -> tuple[list[Problem], list[Problem]]:
    """The training and validation problems of a study."""

    def take(n: int, validation: bool) -> list[Problem]:
        split = "validation" if validation else "train"
        stream = word_problems(task.seed, task.levels, validation)
        return [
            Problem(f"arithmetic/{split}/{i}", problem.question, str(problem.answer), problem.level, "word problem")
            for i, problem in enumerate(itertools.islice(stream, n))
        ]

    return take(task.train_size, False), take(task.validation_size, True)
