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
    def _first(self) -> Sequence[int]:
        if isinstance(self.config, SftConfig):
            return [self.config.evaluate_every]
        every = 1 if isinstance(self.config, ExpertIterationConfig) else self.every
        return [every] if isinstance(every, int) else every

    def _multiples(self, step: int) -> int:
        """Number of multiples up to this step, without 0 and the last step."""
        return min(step, self.config.n_steps - 1) // self._first[-1]

    @property
    def _others(self) -> list[int]:
        last, every = self.config.n_steps, self._first[-1]
        return sorted({0, last, *(step for step in self._first if step < last and step % every)})

    def __contains__(self, step: int) -> bool:
        return step in self._others or (0 < step < self.config.n_steps and step % self._first[-1] == 0)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._others) + self._multiples(self.config.n_steps)

    @property
    def middle(self) -> int:
        """The step of the middle one, or the later of two."""
        wanted = self.count // 2
        places = [place + self._multiples(step) for place, step in enumerate(self._others)]
        if wanted in places:
            return self._others[places.index(wanted)]
        return self._first[-1] * (wanted + 1 - sum(place < wanted for place in places))
