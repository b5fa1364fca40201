"""The steps after which a run is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.study.methods import ExpertIterationConfig, RunConfig, SftConfig


@dataclass(frozen=True)
class EvaluationSteps:
    """The steps after which a run is evaluated, in order, always with 0 and the last one.

    They are not listed, as a run that trains until a time limit may name billions of steps.

    Attributes:
        every: the study's ``evaluation.every``, for GRPO runs: a number of steps, or a list of first steps, followed by the
            multiples of its last. Supervised fine-tuning uses ``evaluate_every``; expert iteration is evaluated after each of
            its (long) steps.
    """

    config: RunConfig
    every: int | Sequence[int]

    @property
    def _before_the_last(self) -> tuple[list[int], range]:
        """0 and the first steps, then the multiples."""
        match self.config:
            case SftConfig():
                every: Sequence[int] = [self.config.evaluate_every]
            case ExpertIterationConfig():
                every = [1]
            case _:
                every = [self.every] if isinstance(self.every, int) else self.every
        last = self.config.n_steps
        return [0, *(step for step in every[:-1] if step < last)], range(every[-1], last, every[-1])

    def __contains__(self, step: int) -> bool:
        first, multiples = self._before_the_last
        return step in first or step in multiples or step == self.config.n_steps

    @property
    def middle(self) -> int:
        """The step of the middle one, or the later of two."""
        first, multiples = self._before_the_last
        place = (len(first) + len(multiples) + 1) // 2
        if place < len(first):
            return first[place]
        return multiples[place - len(first)] if place - len(first) < len(multiples) else self.config.n_steps
