"""What a study has that a claim can be judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.results.runs import Run, by_arm, final_scores, read_runs, read_selection
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
        winner: the arm that was selected.
        other: the experiment that a claim compares this one with.
    """

    arms: dict[str, list[Run]]
    last_k: int
    baseline: dict[str, Any] = field(default_factory=dict)
    winner: str = ""
    other: Evidence | None = None

    def runs(self, arm: str) -> list[Run]:
        """The runs of an arm.

        Raises:
            NotMeasured: the study has no such arm.
        """
        if arm not in self.arms:
            raise NotMeasured(f"the study has no arm {arm}")
        return self.arms[arm]

    def final(self, arm: str) -> NDArray[np.float64]:
        """The scores that count: (runs, problems)."""
        return final_scores(self.runs(arm), self.last_k)


def evidence_of(study: Study, experiment: str, other: str | None = None) -> Evidence:
    """What the study has of an experiment.

    Args:
        other: the experiment that it is compared with.

    Raises:
        NotMeasured: the study leaves it out.
    """
    if experiment in study.left_out:
        raise NotMeasured(f"left out: the study has no arms of {experiment}")
    return Evidence(
        by_arm(read_runs(study, experiment)),
        study.last_k(experiment),
        winner=read_selection(experiment)["winner"],
        other=None if other is None else evidence_of(study, other),
    )
