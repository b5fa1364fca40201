"""The base model in words and tables: zero-shot outcomes, and what choosing among several samples is worth."""

from __future__ import annotations

from typing import Any

from grpo.results.statistics import format_interval

KINDS = {"pass": "pass@N", "best": "Best@N", "majority": "majority@N"}


def zero_shot_table(baseline: dict[str, Any]) -> str:
    """The three outcome categories under each prompt, and other rewards where there are any."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)
    lines = [
        "| prompt | problems | " + " | ".join(names) + " | answer reward (95% interval) | mean response length |",
        "|---|---|" + "---|" * (len(names) + 2),
    ]
    for prompt, values in baseline.items():
        counts = " | ".join(str(values["categories"].get(name, 0)) for name in names)
        length = f"{values['response_length']:.1f}"
        lines.append(f"| {prompt} | {values['problems']} | {counts} | {format_interval(values['accuracy'])} | {length} |")
    return "\n".join(lines) + "\n"


def breakdown_table(baseline: dict[str, Any], by: str) -> str:
    """Accuracy with its 95% Wilson interval by ``level`` or ``subject``, one column a prompt."""
    parts = {prompt: values[f"accuracy_by_{by}"] for prompt, values in baseline.items()}
    first = next(iter(parts.values()))
    lines = [f"| {by} | problems | " + " | ".join(parts) + " |", "|---|---|" + "---|" * len(parts)]
    for name, values in first.items():
        cells = " | ".join(format_interval(part[name]) for part in parts.values())
        lines.append(f"| {name} | {values['problems']} | {cells} |")
    return "\n".join(lines) + "\n"


def best_of_n_table(metrics: dict[str, Any]) -> str:
    """pass@N, Best@N and majority vote for each N and prompt."""
    lines = ["| prompt | N | " + " | ".join(KINDS.values()) + " |", "|---|---|" + "---|" * len(KINDS)]
    for prompt, values in metrics.items():
        for n, kinds in values["n"].items():
            lines.append(f"| {prompt} | {n} | " + " | ".join(format_interval(kinds[kind]) for kind in KINDS) + " |")
    return "\n".join(lines) + "\n"


def discuss_best_of_n(prompt: str, metrics: dict[str, Any]) -> str:
    """Why Best@N falls short of pass@N under one prompt, from the numbers."""
    n, kinds = list(metrics["n"].items())[-1]
    ranking = metrics["ranking"]
    passed, best, majority = (kinds[kind]["value"] for kind in ("pass", "best", "majority"))
    text = (
        f"Under the {prompt} prompt pass@{n} is {passed:.3f}, Best@{n} {best:.3f} and majority@{n} {majority:.3f}: choosing by "
        f"mean log-probability loses {passed - best:.3f} of what the samples hold. Of {metrics['problems']} problems "
        f"{ranking['never_solved']:.1%} have no right sample among {metrics['samples']}, {ranking['always_solved']:.1%} have "
        f"only right ones, and {ranking['mixed']:.1%} have both; only there does the choice matter."
    )
    if "outranks" not in ranking:
        return text
    score, length = ranking["score_difference"], ranking["length_difference"]
    return text + (
        f" There a random sample is right in {ranking['share_right']:.1%} of cases and the most probable one in "
        f"{ranking['top_right']:.1%}; in {ranking['top_wrong_form']:.1%} the most probable one does not even have the form. "
        f"A right sample scores above a wrong one with chance {ranking['outranks']:.3f} (0.5 is no information), so the "
        f"model's own probability {_verdict(ranking['outranks'])}. By medians right samples lie {abs(score):.3f} nats a token "
        f"{'above' if score >= 0 else 'below'} wrong ones of the same problem; they are {abs(length):.1f} tokens "
        f"{'longer' if length >= 0 else 'shorter'}."
    )


def _verdict(outranks: float) -> str:
    if outranks >= 0.6:
        return "points to the right ones"
    if outranks > 0.4:
        return "says little about which are right"
    return "points away from the right ones"
