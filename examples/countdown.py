"""Your own task: Countdown. Reach a target with + - * and each of the given numbers at most once.

Put this file into the study's folder, or anywhere that Python finds it, and write a study that uses it:

    tasks:
      main: {use: "countdown:Countdown", numbers: 3, largest: 9, train_size: 512, validation_size: 64, seed: 0}
    models:
      main: {source: pretrain, documents: {wrong_share: 0.5}, …}  # or a model from the Hub
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator

from grpo.tasks import Problem, Task, formats


def value_of(expression: str, given: list[int]) -> int:
    """Evaluate an expression of + - * and the given numbers, each used at most once; ValueError for anything else."""
    if not re.fullmatch(r"[0-9+*() -]{1,100}", expression):
        raise ValueError(f"{expression}: not an expression of whole numbers and + - *")
    left = Counter(given)

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)) if left[number] > 0:
                left[number] -= 1
                return number
            case ast.BinOp(left=a, op=ast.Add(), right=b):
                return value(a) + value(b)
            case ast.BinOp(left=a, op=ast.Sub(), right=b):
                return value(a) - value(b)
            case ast.BinOp(left=a, op=ast.Mult(), right=b):
                return value(a) * value(b)
        raise ValueError(f"{expression}: uses more than the given numbers and + - *")

    return value(ast.parse(expression.strip(), mode="eval").body)


class Countdown(Task):
    """Countdown problems drawn by a seed. A hash of numbers and target decides the split, so that splits never overlap."""

    formats = {"r1_zero": formats.R1_ZERO, "question_only": formats.QUESTION_ONLY}

    def __init__(self, numbers: int = 3, largest: int = 9, train_size: int = 512, validation_size: int = 64, seed: int = 0):
        self.numbers, self.largest, self.seed = numbers, largest, seed
        self.sizes = {"train": train_size, "validation": validation_size}

    def draw(self, seed: int, split: str) -> Iterator[tuple[Problem, str]]:
        """Yield problems of a split without end, each with a right answer; a ground truth looks like ``1 3 8 = 23``."""
        rng = random.Random(f"countdown {seed} {split}")
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            answer = str(numbers[0]) + "".join(f" {rng.choice('+-*')} {number}" for number in numbers[1:])
            given, target = " ".join(map(str, sorted(numbers))), value_of(answer, numbers)
            truth = f"{given} = {target}"
            if (zlib.crc32(truth.encode()) % 5 == 0) == (split == "validation"):
                yield Problem(f"countdown/{split}/{truth}", f"Use {given} to make {target}.", truth), answer

    def problems(self, split: str) -> list[Problem]:
        """Draw the number of different problems asked for, or fewer if 100 times as many draws do not find them."""
        size = self.sizes[split]
        found = dict.fromkeys(problem for problem, _ in itertools.islice(self.draw(self.seed, split), 100 * size))
        return list(found)[:size]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """Score answers: 1 for the target, 0.1 for another value of an allowed expression, 0 for anything else."""
        return [score(answer, problem.ground_truth) for answer, problem in zip(answers, problems, strict=True)]

    def documents(self, seed: int, wrong_share: float = 0.5) -> Iterator[tuple[str, str]]:
        """Yield documents to pretrain a small model: training questions in both formats, ``wrong_share`` with wrong answers."""
        rng = random.Random(f"countdown documents {seed}")
        for problem, right in self.draw(seed, "train"):
            answer = right[: right.rindex(" ") - 2] if rng.random() < wrong_share else right  # wrong: without the last number
            if rng.random() < 0.5:
                yield self.formats["r1_zero"].prompt(problem.question), f" </think> <answer>{answer}</answer>"
            else:
                yield problem.question, f" \\boxed{{{answer}}}"


def score(answer: str, truth: str) -> float:
    """Score one answer; see :meth:`Countdown.verify`."""
    given, target = truth.split(" = ")
    try:
        return 1.0 if value_of(answer, [int(number) for number in given.split()]) == int(target) else 0.1
    except (ValueError, SyntaxError):
        return 0.0
