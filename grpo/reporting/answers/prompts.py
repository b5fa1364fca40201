"""Why the prompts end as they do: form and knowledge apart."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.results.runs import REWARD, Run, by_arm, read_runs
from grpo.study.schema import Study

FORM = "val/format_reward"


@dataclass(frozen=True)
class Split:
    """Answer reward as the product of how often the form is right and how often the answer is, where it is.

    ``within`` is None where no response has the form.
    """

    form: float
    within: float | None

    @property
    def answer(self) -> float:
        """The answer reward."""
        return self.form * (self.within or 0.0)


def prompt_ablations(study: Study) -> list[str]:
    """The GRPO experiments whose arms differ in the prompt."""
    made = [name for name in study.made if study.experiments[name].method == "grpo"]
    return [name for name in made if len({arm.get("prompt") for arm in study.experiments[name].arms.values()}) > 1]


def split(runs: list[Run], rows: slice) -> Split:
    """Over some of the evaluations of all runs of an arm."""
    form, answer = (sum(run.validation[c].iloc[rows].mean() for run in runs) / len(runs) for c in (FORM, REWARD))
    return Split(float(form), float(answer / form) if form > 0 else None)


def shares(first: Split, second: Split) -> tuple[float, float]:
    """Of second - first in answer reward what comes of the form, and what of the answers within it; they sum to it.

    Both orders of changing one and then the other, averaged (Shapley's value of two factors).
    """
    if first.within is None or second.within is None:  # without the form nothing is known of the answers within it
        return second.answer - first.answer, 0.0
    form = (second.form - first.form) * (first.within + second.within) / 2
    return form, (second.within - first.within) * (first.form + second.form) / 2


def explain(study: Study, experiment: str) -> str:
    """A table of form and answers within it, before and after, and the gaps between the prompts taken apart (Markdown)."""
    arms, last = by_arm(read_runs(study, experiment)), slice(-study.last_k(experiment), None)
    before = {arm: split(runs, slice(0, 1)) for arm, runs in arms.items()}
    after = {arm: split(runs, last) for arm, runs in arms.items()}
    lines = [
        "| prompt | form right, at start | answer right where the form is, at start | answer reward | form right, at end | "
        "answer right where the form is, at end | answer reward | gain by form | gain within the form |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        form, within = shares(before[arm], after[arm])
        cells = [*_cells(before[arm]), *_cells(after[arm]), f"{form:+.3f}", f"{within:+.3f}"]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    first, *others = arms
    gaps = [_gap(first, other, when, points) for other in others for when, points in (("before", before), ("after", after))]
    return "\n".join([*lines, "", " ".join(gaps)])


def _cells(point: Split) -> list[str]:
    return [f"{point.form:.3f}", "" if point.within is None else f"{point.within:.3f}", f"{point.answer:.3f}"]


def _gap(first: str, second: str, when: str, points: dict[str, Split]) -> str:
    form, within = shares(points[first], points[second])
    gap = points[second].answer - points[first].answer
    return (
        f"{when.capitalize()} training {second} stands {gap:+.3f} to {first} in answer reward: {form:+.3f} by the form, "
        f"{within:+.3f} by the answers within it."
    )
