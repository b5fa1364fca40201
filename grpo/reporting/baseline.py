"""Tables and sentences on the base model: zero-shot outcomes and best-of-N."""

from __future__ import annotations

from typing import Any

from grpo.reporting.sentences import interval, paragraphs
from grpo.results.markdown import markdown_table

KINDS = {"pass": "pass@N", "best": "Best@N", "majority": "majority@N"}


def zero_shot_table(baseline: dict[str, Any]) -> str:
    """Number of responses in each outcome category, answer reward and length, by prompt."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len, default=[])
    rows = [
        [
            prompt,
            str(values["problems"]),
            *(str(values["categories"].get(name, 0)) for name in names),
            interval(values["accuracy"]),
            f"{values['response_length']:.1f}",
        ]
        for prompt, values in baseline.items()
    ]
    return markdown_table(["prompt", "problems", *names, "answer reward (95% interval)", "mean response length"], rows)


def breakdown_table(baseline: dict[str, Any], by: str) -> str:
    """Accuracy with its 95% Wilson interval by ``level`` or ``subject``, one column per prompt."""
    parts = {prompt: values[f"accuracy_by_{by}"] for prompt, values in baseline.items()}
    rows = [
        [name, str(values["problems"]), *(interval(part[name]) for part in parts.values())]
        for name, values in next(iter(parts.values())).items()
    ]
    return markdown_table([by, "problems", *parts], rows)


def best_of_n_table(metrics: dict[str, Any]) -> str:
    """pass@N, Best@N and majority vote for each N and prompt."""
    rows = [
        [prompt, str(n), *(interval(kinds[kind]) for kind in KINDS)]
        for prompt, values in metrics.items()
        for n, kinds in values["n"].items()
    ]
    return markdown_table(["prompt", "N", *KINDS.values()], rows)


def discuss_best_of_n(prompt: str, metrics: dict[str, Any]) -> str:
    """Explain the gap between Best@N and pass@N under one prompt, in one to three sentences."""
    n, kinds = list(metrics["n"].items())[-1]
    values = {kind: kinds[kind]["value"] for kind in KINDS}
    (text,) = paragraphs(
        "best_of_n_sentences.md.j2", prompt=prompt, n=n, value=values, problems=metrics["problems"], **metrics["ranking"]
    )
    return text
