"""Why the prompts end as they do: form and accuracy given the form."""

from __future__ import annotations

from grpo.reporting.discussion import Numbers
from grpo.reporting.form_and_answer import Split, shares
from grpo.reporting.sentences import decimals, said


def explain(numbers: Numbers) -> list[str]:
    """A table of form and accuracy given it, before and after, and the gaps between the prompts taken apart (Markdown)."""
    arms = {arm["arm"]: {"before": arm["before"], "after": arm["after"]} for arm in numbers["arms"] if arm["before"]}
    if len(arms) < 2:
        return []
    lines = [
        "| prompt | form, at start | answer given the form | answer reward | form, at end | answer given the form | "
        "answer reward | gain by form | gain given the form |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, points in arms.items():
        cells = [cell for point in points.values() for cell in _cells(point)]
        lines.append(f"| {arm} | " + " | ".join([*cells, *(f"{share:+.3f}" for share in shares(*points.values()))]) + " |")
    first, *others = arms
    gaps = [
        {"first": first, "other": other, "when": when, "gap": arms[other][when].answer - arms[first][when].answer}
        | dict(zip(("form", "within"), shares(arms[first][when], arms[other][when]), strict=True))
        for other in others
        for when in ("before", "after")
    ]
    return ["\n".join(lines), *said("prompts_said.md.j2", gaps=gaps)]


def _cells(point: Split) -> list[str]:
    return [decimals(point.form), decimals(point.within), decimals(point.answer)]
