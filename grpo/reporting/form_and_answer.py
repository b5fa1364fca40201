"""Answer reward taken apart: how often the form is right, and how often the answer is where the form is."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.results.runs import REWARD, Run

FORM = "val/format_reward"


@dataclass(frozen=True)
class Split:
    """Answer reward as the product of the form's share and of the accuracy given the form.

    Attributes:
        within: None where no response has the form, or where an answer is rewarded without it.
    """

    form: float
    answer: float

    @property
    def within(self) -> float | None:
        """Accuracy given the form."""
        return self.answer / self.form if 0 < self.form >= self.answer else None


def split(runs: list[Run], rows: slice) -> Split | None:
    """Over some of the evaluations of all runs; None where the form was not measured."""
    if any(FORM not in run.validation for run in runs):
        return None
    form, answer = (sum(run.validation[c].iloc[rows].mean() for run in runs) / len(runs) for c in (FORM, REWARD))
    return Split(float(form), float(answer))


def shares(first: Split, second: Split) -> tuple[float, float]:
    """Of second - first in answer reward what comes of the form, and what of the accuracy given it; they sum to it.

    Both orders of changing one and then the other, averaged (Shapley's value of two factors). Without the form nothing is
    known of the answers within it, and all is the form's.
    """
    if first.within is None or second.within is None:
        return second.answer - first.answer, 0.0
    form = (second.form - first.form) * (first.within + second.within) / 2
    return form, (second.within - first.within) * (first.form + second.form) / 2
