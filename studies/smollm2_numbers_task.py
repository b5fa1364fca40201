"""The task of smollm2-numbers.yaml: which of two numbers is larger, asked in a chat with a real language model.

The reward is for the larger number and no other. A policy that names one of the two at random, or always the first, gets half.
"""

import random
import re
from collections.abc import Sequence

from grpo.common.records import Rollout
from grpo.tasks import Format, Problem, Task
from grpo.tasks.task import Split


class Larger(Task):
    """Pairs of different numbers from 10 to 999. The validation pairs do not occur in training, in either order."""

    formats = {"chat": Format("Which number is larger, {question}? Answer with the number only.", chat=True)}

    def __init__(self, train_size: int = 2048, validation_size: int = 256, seed: int = 0):
        self.sizes, self.seed = {"validation": validation_size, "train": train_size}, seed

    def problems(self, split: Split) -> list[Problem]:
        rng, pairs = random.Random(f"larger {self.seed}"), dict[frozenset[int], list[int]]()
        while len(pairs) < sum(self.sizes.values()):
            drawn = rng.sample(range(10, 1000), 2)
            pairs.setdefault(frozenset(drawn), drawn)
        held_out = self.sizes["validation"]
        of_split = list(pairs.values())[:held_out] if split == "validation" else list(pairs.values())[held_out:]
        return [Problem(f"{split}/{a}-{b}", f"{a} or {b}", str(max(a, b))) for a, b in of_split]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """1 for a response whose only number is the larger one."""
        return [float(numbers_in(answer) == {problem.ground_truth}) for answer, problem in zip(answers, problems, strict=True)]

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Shares of responses that name one of the two numbers and no other, and that name the first. A guess is half right."""
        found = [(numbers_in(r.completion.text), r.problem.question.split(" or ")) for r in rollouts]
        one = sum(len(said) == 1 and said <= {*asked} for said, asked in found)
        first = sum(said == {asked[0]} for said, asked in found)
        return {"names_one": one / len(found), "names_the_first": first / len(found)}


def numbers_in(text: str) -> set[str]:
    return {number.lstrip("0") for number in re.findall(r"\d+", text)}
