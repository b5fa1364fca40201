"""What a study has that a claim can be judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo.results.collapses import collapses_of, held
from grpo.results.findings import Collapse, Contrast
from grpo.results.intervals import Scores, difference_of, simultaneous
from grpo.results.runs import Run, by_arm, final_scores, read_runs, steps_taken
from grpo.study.schema import Study


class NotMeasured(Exception):
    """The study lacks what a test needs; the message says what."""


@dataclass(frozen=True)
class Evidence:
    """What a claim is judged by.

    Attributes:
        arms: the experiment's runs by arm, in the order of params.yaml.
        last_k: how many evaluations a run counts by.
        baseline: reports/math_baseline.json, for claims about the untrained model.
        other: the experiment that a claim compares this one with.
    """

    experiment: str
    arms: dict[str, list[Run]]
    last_k: int
    baseline: dict[str, Any] = field(default_factory=dict)
    other: Evidence | None = None

    def runs(self, arm: str) -> list[Run]:
        """The runs of an arm.

        Raises:
            NotMeasured: the study has no such arm.
        """
        if arm not in self.arms:
            raise NotMeasured(f"the study has no arm {arm}")
        return self.arms[arm]

    def held(self, arm: str) -> list[Run]:
        """The runs of an arm that did not collapse; all where all did."""
        return held(self.runs(arm), self.last_k)

    def final(self, arm: str) -> Scores:
        """The scores that count: (runs that held, problems)."""
        return final_scores(self.held(arm), self.last_k)

    def mean(self, arm: str) -> float:
        """The mean of the scores that count."""
        return float(self.final(arm).mean())

    def collapses(self, *arms: str) -> tuple[Collapse, ...]:
        """The collapses in these arms."""
        return tuple(collapse for arm in arms for collapse in collapses_of(self.runs(arm), self.last_k))

    @property
    def leader(self) -> str:
        """The arm with the highest final reward; one with a collapsed run only where all have one."""
        whole = [arm for arm in self.arms if not self.collapses(arm)]
        return max(whole or self.arms, key=self.mean)

    def contrast(self, arm: str, against: str, contrasts: int = 1) -> Contrast:
        """How far ``arm`` ends above ``against``, alone and as one of so many contrasts."""
        first, second = self.final(against), self.final(arm)
        return Contrast(
            arm, against, difference_of(first, second), difference_of(first, second, simultaneous(contrasts)), contrasts
        )

    def steps(self) -> int:
        """The fewest steps that an arm's runs took; arms whose runs all diverged are left out."""
        return min((steps for runs in self.arms.values() if (steps := steps_taken(runs))), default=0)


def evidence_of(study: Study, experiment: str, other: str | None = None) -> Evidence:
    """What the study has of an experiment.

    Args:
        other: the experiment that it is compared with.

    Raises:
        NotMeasured: the study leaves it out.
    """
    if experiment not in study.experiments:
        raise NotMeasured(f"this version has no experiment {experiment}")
    if experiment in study.left_out:
        raise NotMeasured(f"the study leaves {experiment} out")
    return Evidence(
        experiment,
        by_arm(read_runs(study, experiment)),
        study.last_k(experiment),
        other=None if other is None else evidence_of(study, other),
    )
