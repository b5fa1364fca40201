"""Split of the answer reward into the form's share and the accuracy given the form."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.results.runs import REWARD, Run

FORM = "val/format_reward"


@dataclass(frozen=True)
class Split:
    """Answer reward as the product of the form's share and the accuracy given the form."""

    form: float
    answer: float

    @property
    def within(self) -> float | None:
        """Accuracy given the form; None if no response has it, or if answers are rewarded without it."""
        return self.answer / self.form if 0 < self.form >= self.answer else None


def split(runs: list[Run], rows: slice) -> Split | None:
    """The split over some evaluations (``rows``) of all runs; None if the form was not measured."""
    if any(FORM not in run.validation for run in runs):
        return None
    form, answer = (sum(run.validation[c].iloc[rows].mean() for run in runs) / len(runs) for c in (FORM, REWARD))
    return Split(float(form), float(answer))


def shares(first: Split, second: Split) -> tuple[float, float]:
    """Parts of second - first in answer reward due to the form and to the accuracy given the form; they sum to it.

    Average over both orders of changing the two factors (Shapley value). If the accuracy given the form is unknown, all is due
    to the form.
    """
    if first.within is None or second.within is None:
        return second.answer - first.answer, 0.0
    form = (second.form - first.form) * (first.within + second.within) / 2
    return form, (second.within - first.within) * (first.form + second.form) / 2
