"""Tables on the base model: zero-shot outcomes and best-of-N."""

from __future__ import annotations

from typing import Any

from grpo.reporting.sentences import interval, table

KINDS = {"pass": "pass@N", "best": "Best@N", "majority": "majority@N"}


def zero_shot_table(baseline: dict[str, Any]) -> str:
    """Number of responses in each outcome category, answer reward and length, by prompt."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)
    return table(
        {"prompt": prompt, "problems": values["problems"]}
        | {name: values["categories"].get(name, 0) for name in names}
        | {
            "answer reward (95% interval)": interval(values["accuracy"]),
            "mean response length": f"{values['response_length']:.1f}",
        }
        for prompt, values in baseline.items()
    )


def breakdown_table(baseline: dict[str, Any], by: str) -> str:
    """Accuracy with its 95% Wilson interval by ``level`` or ``subject``, one column per prompt."""
    parts = {prompt: values[f"accuracy_by_{by}"] for prompt, values in baseline.items()}
    return table(
        {by: name, "problems": values["problems"]} | {prompt: interval(part[name]) for prompt, part in parts.items()}
        for name, values in next(iter(parts.values())).items()
    )


def best_of_n_table(metrics: dict[str, Any]) -> str:
    """pass@N, Best@N and majority vote for each N and prompt."""
    return table(
        {"prompt": prompt, "N": n} | {title: interval(kinds[kind]) for kind, title in KINDS.items()}
        for prompt, values in metrics.items()
        for n, kinds in values["n"].items()
    )
