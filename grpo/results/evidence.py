"""The runs by which an experiment and the claims about it are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo.results.collapses import collapse_of
from grpo.results.findings import Collapse, Contrast
from grpo.results.intervals import Scores, difference_of, simultaneous
from grpo.results.runs import Run, by_arm, final_scores, read_runs
from grpo.study.schema import Study


class NotMeasured(Exception):
    """A test's requirement that the study does not meet; the message names it."""


@dataclass(frozen=True)
class Evidence:
    """The runs of an experiment."""

    experiment: str
    arms: dict[str, list[Run]]  # runs by arm, in the order of params.yaml
    last_k: int  # number of last evaluations that a final reward averages
    baseline: dict[str, Any] = field(default_factory=dict)  # reports/math_baseline.json, for claims about the untrained model

    @cached_property
    def _collapses(self) -> dict[str, tuple[Collapse, ...]]:
        found = {arm: [collapse_of(run, self.last_k) for run in runs] for arm, runs in self.arms.items()}
        return {arm: tuple(one for one in of_arm if one) for arm, of_arm in found.items()}

    def runs(self, arm: str) -> list[Run]:
        """The runs of an arm.

        Raises:
            NotMeasured: the study has no such arm.
        """
        if arm not in self.arms:
            raise NotMeasured(f"the study has no arm {arm}")
        return self.arms[arm]

    def collapses(self, *arms: str) -> tuple[Collapse, ...]:
        """The collapses in these arms; each must be one of the study, as for :meth:`runs`."""
        return tuple(collapse for arm in arms if self.runs(arm) for collapse in self._collapses[arm])

    def held(self, arm: str) -> list[Run]:
        """The runs of an arm that did not collapse; all if all collapsed."""
        fallen = {collapse.run for collapse in self.collapses(arm)}
        return [run for run in self.runs(arm) if run.name not in fallen] or self.runs(arm)

    def final(self, arm: str) -> Scores:
        """Final scores of the runs that did not collapse, (runs, problems)."""
        return final_scores(self.held(arm), self.last_k)

    def mean(self, arm: str) -> float:
        """The mean of :meth:`final`."""
        return float(self.final(arm).mean())

    @property
    def eligible(self) -> list[str]:
        """The arms that may lead: those without a collapsed run; if there are none, those with a run that held, or all."""
        fallen = {arm: len(self.collapses(arm)) for arm in self.arms}
        whole = [arm for arm in self.arms if not fallen[arm]]
        return whole or [arm for arm, runs in self.arms.items() if fallen[arm] < len(runs)] or list(self.arms)

    @property
    def leader(self) -> str:
        """The eligible arm with the highest final reward, the first of equals."""
        return max(self.eligible, key=self.mean)

    def contrast(self, arm: str, against: str, contrasts: int = 1, level: Callable[[int], float] = simultaneous) -> Contrast:
        """The difference of final rewards, unadjusted and adjusted for the number of contrasts by ``level``."""
        first, second = self.final(against), self.final(arm)
        adjusted = difference_of(first, second, level(contrasts))
        return Contrast(arm, against, difference_of(first, second), adjusted, contrasts)

    def steps(self) -> int:
        """The fewest steps of any run; diverged runs do not count, as they were stopped early."""
        runs = [run for of_arm in self.arms.values() for run in of_arm if run.metrics["diverged_step"] is None]
        return min((int(run.validation["step"].iloc[-1]) for run in runs), default=0)


def evidence_of(study: Study, experiment: str) -> Evidence:
    """Read the evidence on an experiment.

    Raises:
        NotMeasured: the study leaves it out.
        UserError: a run is missing.
    """
    if experiment not in study.experiments:
        raise NotMeasured(f"this version has no experiment {experiment}")
    if experiment in study.left_out:
        raise NotMeasured(f"the study leaves {experiment} out")
    return Evidence(experiment, by_arm(read_runs(study, experiment)), study.last_k(experiment))
