"""The base model in words and tables: zero-shot outcomes, and what choosing among several samples is worth."""

from __future__ import annotations

from typing import Any

from grpo.reporting.sentences import interval, said

KINDS = {"pass": "pass@N", "best": "Best@N", "majority": "majority@N"}


def zero_shot_table(baseline: dict[str, Any]) -> str:
    """The three outcome categories under each prompt, and other rewards where there are any."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len, default=[])
    lines = [
        "| prompt | problems | " + " | ".join(names) + " | answer reward (95% interval) | mean response length |",
        "|---|---|" + "---|" * (len(names) + 2),
    ]
    for prompt, values in baseline.items():
        counts = " | ".join(str(values["categories"].get(name, 0)) for name in names)
        length = f"{values['response_length']:.1f}"
        lines.append(f"| {prompt} | {values['problems']} | {counts} | {interval(values['accuracy'])} | {length} |")
    return "\n".join(lines) + "\n"


def breakdown_table(baseline: dict[str, Any], by: str) -> str:
    """Accuracy with its 95% Wilson interval by ``level`` or ``subject``, one column a prompt."""
    parts = {prompt: values[f"accuracy_by_{by}"] for prompt, values in baseline.items()}
    first = next(iter(parts.values()))
    lines = [f"| {by} | problems | " + " | ".join(parts) + " |", "|---|---|" + "---|" * len(parts)]
    for name, values in first.items():
        cells = " | ".join(interval(part[name]) for part in parts.values())
        lines.append(f"| {name} | {values['problems']} | {cells} |")
    return "\n".join(lines) + "\n"


def best_of_n_table(metrics: dict[str, Any]) -> str:
    """pass@N, Best@N and majority vote for each N and prompt."""
    lines = ["| prompt | N | " + " | ".join(KINDS.values()) + " |", "|---|---|" + "---|" * len(KINDS)]
    for prompt, values in metrics.items():
        for n, kinds in values["n"].items():
            lines.append(f"| {prompt} | {n} | " + " | ".join(interval(kinds[kind]) for kind in KINDS) + " |")
    return "\n".join(lines) + "\n"


def discuss_best_of_n(prompt: str, metrics: dict[str, Any]) -> str:
    """Why Best@N falls short of pass@N under one prompt, from the numbers: one to three sentences."""
    n, kinds = list(metrics["n"].items())[-1]
    values = {kind: kinds[kind]["value"] for kind in KINDS}
    (text,) = said("best_of_n_said.md.j2", prompt=prompt, n=n, value=values, problems=metrics["problems"], **metrics["ranking"])
    return text
