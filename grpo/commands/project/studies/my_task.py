"""The task: problems, the prompts in which they are asked, and which answers are right."""

import itertools
import random

from grpo.tasks import Problem, Task, formats


class MyTask(Task):
    """Write a word backwards."""

    formats = {"r1_zero": formats.R1_ZERO}

    def __init__(self, letters: str = "abcdef", seed: int = 0):
        self.letters, self.seed = letters, seed

    def problems(self, split: str) -> list[Problem]:
        words = ["".join(word) for word in itertools.product(self.letters, repeat=4)]
        random.Random(self.seed).shuffle(words)
        chosen = words[:384] if split == "validation" else words[384:]
        return [Problem(f"my_task/{split}/{word}", f"Write {word} backwards.", word[::-1]) for word in chosen]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [float(answer.strip() == problem.ground_truth) for answer, problem in zip(answers, problems, strict=True)]

    def documents(self, seed: int, right_share: float = 0.3):
        """What the small model is pretrained on: answers, of which only a share is right. A model of your own needs none."""
        rng, problems = random.Random(seed), self.problems("train")
        while True:
            problem = rng.choice(problems)
            letters = list(problem.ground_truth)
            if rng.random() > right_share:
                rng.shuffle(letters)
            yield formats.R1_ZERO.prompt(problem.question), f" </think> <answer>{''.join(letters)}</answer>"
