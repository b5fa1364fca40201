"""The task of literature/spurious_rewards_smollm2.yaml: smollm2-numbers with a form that wrong answers can have, too."""

from dataclasses import replace

from smollm2_numbers_task import Larger, numbers_in


def only_number(response: str) -> str | None:
    """The number of a response that names one number and no other, else None."""
    numbers = numbers_in(response)
    return numbers.pop() if len(numbers) == 1 else None


class OneNumber(Larger):
    """The right form is one number. The answer is right if it is the larger of the two."""

    formats = {"chat": replace(Larger.formats["chat"], read=only_number)}
