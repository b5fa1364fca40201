"""Sums and products of two numbers, and a calculator to call: the task, the tools and the reward of tools.yaml.

A model this small adds two numbers in its head, and does not multiply them. So a call pays for a product, and wastes tokens for
a sum.
"""

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from grpo.common.records import Rollout
from grpo.tasks import Format, Problem, Task
from grpo.tasks.environment import Environment
from grpo.tasks.task import Share, Split, in_environment

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "EXPRESSION"}}</tool_call>'
ANSWER = "<tool_response>ANSWER</tool_response>"


class Calculator:
    """Calculates what it is asked."""

    def reset(self, **row: Any) -> None:
        """Nothing to prepare."""

    def calculate(self, expression: str) -> int:
        """Calculate a sum or a product.

        Args:
            expression: two whole numbers with + or * between them.
        """
        read = re.fullmatch(r"(\d+) ([+*]) (\d+)", expression)
        if read is None:
            raise ValueError("no sum or product")
        a, b = int(read[1]), int(read[3])
        return a + b if read[2] == "+" else a * b


class Guesser(Calculator):
    """The control: a calculator that answers with a random number of as many digits."""

    def reset(self, seed: int, **row: Any) -> None:
        self.rng = random.Random(seed)

    def calculate(self, expression: str) -> int:
        """As that of Calculator, but at random."""
        digits = len(str(super().calculate(expression)))
        return self.rng.randrange(10 ** (digits - 1), 10**digits)


def last_number(response: str) -> str | None:
    """The answer: what stands after the last tag, the response's own or a tool's."""
    return response.rpartition(">")[2].strip() or None


ALONE = Format("What is {question}?", read=last_number)


class SumsAndProducts(Task):
    """Sums such as 432 + 5 (without a carry) and products such as 43 * 57, as many of each."""

    formats = {
        "calculator": in_environment(ALONE, Environment("tools_task:Calculator", max_turns=3, max_observation_tokens=24)),
        "no_tool": ALONE,
        "guesser": in_environment(ALONE, Environment("tools_task:Guesser", max_turns=3, max_observation_tokens=24)),
    }

    def __init__(self, train_size: int, validation_size: int, seed: int = 0):
        self.seed, self.sizes = seed, {"train": train_size, "validation": validation_size}

    def problems(self, split: Split) -> list[Problem]:
        drawn, found = expressions(f"{self.seed} {split}", split), dict[str, Problem]()
        while len(found) < self.sizes[split]:
            asked = next(drawn)
            kind = "sum" if "+" in asked else "product"
            found[asked] = Problem(f"{split}/{asked}", asked, answer_to(asked), 1 + (kind == "product"), kind)
        return list(found.values())

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [float(answer == problem.ground_truth) for answer, problem in zip(answers, problems, strict=True)]

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Calls in a response: to all, to sums and to products. Without an environment, those that nothing answers."""
        calls: dict[str, list[int]] = {"tool_calls": [], "calls/sum": [], "calls/product": []}
        for rollout in rollouts:
            done = rollout.completion.episode
            count = done.tool_calls if done else rollout.completion.text.count("<tool_call>")
            for name in ("tool_calls", f"calls/{rollout.problem.subject}"):
                calls[name].append(count)
        return {name: sum(counts) / len(counts) if counts else 0.0 for name, counts in calls.items()}

    def documents(self, seed: int, call_share: Share, wrong_share: Share) -> Iterator[tuple[str, str]]:  # type: ignore[override]
        """Yield questions of the training split with right answers; some come from calls.

        Args:
            call_share: share of documents that call the calculator, as often for a sum as for a product.
            wrong_share: share of these whose call is wrong: half with another digit, whose result becomes the answer, and half
                without the sign, which is an error.
        """
        rng = random.Random(f"documents {seed}")
        for asked in expressions(f"documents {seed}", "train"):
            called, result, answer = asked, answer_to(asked), answer_to(asked)
            call = rng.random() < call_share
            if call and rng.random() < wrong_share:
                if rng.random() < 0.5:
                    place = rng.choice([place for place, letter in enumerate(asked) if letter.isdigit()])
                    called = asked[:place] + rng.choice("123456789".replace(asked[place], "")) + asked[place + 1 :]
                    result = answer = answer_to(called)
                else:
                    called, result = re.sub(" [+*]", "", asked), "error: no sum or product"
            text = CALL.replace("EXPRESSION", called) + ANSWER.replace("ANSWER", result) if call else ""
            yield ALONE.prompt(asked), f"{text} {answer}"

    def pieces(self, text: str) -> list[str]:
        """A tag, its content and what stands between are apart, as no token of a turn may reach into the next."""
        return re.findall(r"</?tool_\w+>|[^<]+", text)


def expressions(seed: str, split: Split) -> Iterator[str]:
    """Yield sums and products of a split without end; a hash of the text decides the split."""
    rng = random.Random(f"sums and products {seed}")
    while True:
        tens, ones = rng.randint(10, 99), rng.randint(0, 8)
        if rng.random() < 0.5:
            asked = f"{10 * tens + ones} + {rng.randint(1, 9 - ones)}"
        else:
            asked = f"{rng.randint(11, 99)} * {rng.randint(11, 99)}"
        if (zlib.crc32(asked.encode()) % 5 == 0) == (split == "validation"):
            yield asked


def answer_to(expression: str) -> str:
    return str(Calculator().calculate(expression))


def right_and_short(completion_ids: list[list[int]], answer_reward: list[float], **columns: Any) -> list[float]:
    """The reward: of a right answer 1, less 0.005 for each token, the tool's included; of a wrong one 0."""
    return [right * (1 - 0.005 * len(ids)) for ids, right in zip(completion_ids, answer_reward, strict=True)]
