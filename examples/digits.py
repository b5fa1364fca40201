"""A task for a model that is asked in chats: see digits.yaml."""

import random

from grpo.tasks import Format, Problem, Task


class Digits(Task):
    """Answer with digits only."""

    formats = {"chat": Format("Say {question} in digits.", chat=True, system="You are a calculator.")}

    def problems(self, split: str) -> list[Problem]:
        numbers = list(range(400))
        random.Random(0).shuffle(numbers)
        chosen = numbers[:64] if split == "validation" else numbers[64:]
        return [Problem(f"digits/{n}", f"number {n}", str(n)) for n in chosen]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [sum(letter in "0123456789" for letter in answer) / len(answer) for answer in answers]
