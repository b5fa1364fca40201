"""The prompts compared by form and by accuracy given the form."""

from __future__ import annotations

from grpo.reporting.discussion import Numbers
from grpo.reporting.form_and_answer import shares
from grpo.reporting.sentences import decimals, paragraphs
from grpo.results.markdown import markdown_table


def explain(numbers: Numbers) -> list[str]:
    """Table of form and accuracy given the form before and after training, and a split of the gaps between prompts."""
    arms = {arm["arm"]: {"before": arm["before"], "after": arm["after"]} for arm in numbers["arms"] if arm["before"]}
    if len(arms) < 2:
        return []
    columns = ["prompt", "form, at start", "answer given the form", "answer reward", "form, at end", "answer given the form"]
    columns += ["answer reward", "gain by form", "gain given the form"]
    rows = [
        [
            arm,
            *(decimals(share) for point in points.values() for share in (point.form, point.within, point.answer)),
            *(f"{share:+.3f}" for share in shares(*points.values())),
        ]
        for arm, points in arms.items()
    ]
    first, *others = arms
    gaps = [
        {"first": first, "other": other, "when": when, "gap": arms[other][when].answer - arms[first][when].answer}
        | dict(zip(("form", "within"), shares(arms[first][when], arms[other][when]), strict=True))
        for other in others
        for when in ("before", "after")
    ]
    return [markdown_table(columns, rows), *paragraphs("prompts_sentences.md.j2", gaps=gaps)]
