"""The runs by which a claim is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo.results.collapses import collapses_of, held
from grpo.results.findings import Collapse, Contrast
from grpo.results.intervals import Scores, difference_of, simultaneous
from grpo.results.runs import Run, by_arm, final_scores, read_runs
from grpo.study.schema import Study


class NotMeasured(Exception):
    """A test's requirement that the study does not meet; the message names it."""


@dataclass(frozen=True)
class Evidence:
    """The data for judging a claim.

    Attributes:
        arms: the experiment's runs by arm, in the order of params.yaml.
        last_k: number of last evaluations that a final reward averages.
        baseline: reports/math_baseline.json, for claims about the untrained model.
        other: the experiment with which a claim compares this one.
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
        """The runs of an arm that did not collapse; all if all collapsed."""
        return held(self.runs(arm), self.last_k)

    def final(self, arm: str) -> Scores:
        """Final scores of the runs that did not collapse, (runs, problems)."""
        return final_scores(self.held(arm), self.last_k)

    def mean(self, arm: str) -> float:
        """The mean of :meth:`final`."""
        return float(self.final(arm).mean())

    def collapses(self, *arms: str) -> tuple[Collapse, ...]:
        """The collapses in these arms."""
        return tuple(collapse for arm in arms for collapse in collapses_of(self.runs(arm), self.last_k))

    @property
    def leader(self) -> str:
        """The arm with the highest final reward, among the arms without a collapsed run if there are any."""
        whole = [arm for arm in self.arms if not self.collapses(arm)]
        return max(whole or self.arms, key=self.mean)

    def contrast(self, arm: str, against: str, contrasts: int = 1) -> Contrast:
        """The difference of final rewards, unadjusted and adjusted for the number of contrasts."""
        first, second = self.final(against), self.final(arm)
        return Contrast(
            arm, against, difference_of(first, second), difference_of(first, second, simultaneous(contrasts)), contrasts
        )

    def steps(self) -> int:
        """The fewest steps of any run; diverged runs do not count, as they were stopped early."""
        runs = [run for of_arm in self.arms.values() for run in of_arm if run.metrics["diverged_step"] is None]
        return min((int(run.validation["step"].iloc[-1]) for run in runs), default=0)


def evidence_of(study: Study, experiment: str, other: str | None = None) -> Evidence:
    """Read the evidence on an experiment.

    Args:
        other: the experiment with which it is compared.

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
