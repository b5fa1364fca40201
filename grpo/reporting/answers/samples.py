"""Whether pass@1 of the samples for Best-of-N agrees with the zero-shot figure."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.results.statistics import format_interval, paired_bootstrap
from grpo.study import paths


def read_first_and_all(prompt: str) -> dict[str, tuple[float, float]]:
    """problem -> answer reward of its first sample, and share of its samples that are right.

    Raises:
        UserError: the file is missing or damaged.
    """

    def line(value: dict[str, Any]) -> tuple[str, tuple[float, float]]:
        rights = [float(sample["answer_reward"] == 1.0) for sample in value["samples"]]
        return value["problem"], (rights[0], float(np.mean(rights)))

    return dict(read_jsonl(paths.BEST_OF_N / f"{prompt}.jsonl", "best_of_n", line))


def read_zero_shot(prompt: str) -> dict[str, float]:
    """problem -> 1.0 where the zero-shot answer is right.

    Raises:
        UserError: the file is missing or damaged.
    """

    def line(value: dict[str, Any]) -> tuple[str, float]:
        return value["problem"], float(value["answer_reward"] == 1.0)

    return dict(read_jsonl(paths.BASELINE / f"{prompt}.jsonl", "math_baseline", line))


def agreement(prompt: str, zero_shot: dict[str, float], sampled: dict[str, tuple[float, float]], best: dict[str, Any]) -> str:
    """Both figures on the problems that both have, and whether their difference can be told from zero.

    Args:
        best: what reports/best_of_n.json has of this prompt.
    """
    both = [problem for problem in sampled if problem in zero_shot]
    if not both:
        return f"Under {prompt} zero-shot evaluation and samples have no problem in common."
    zero, first, every = np.array([(zero_shot[p], *sampled[p]) for p in both]).T
    difference = paired_bootstrap(zero, every)
    apart = difference["low"] > 0 or difference["high"] < 0
    one, best_one = (best["n"]["1"][kind]["value"] for kind in ("pass", "best")) if "1" in best["n"] else (None, None)
    at_one = "" if one is None else f" pass@1 is {one:.4f} and Best@1 {best_one:.4f}: choosing among one is no choice."
    return (
        f"Under {prompt}, on the {len(both)} problems that both have, zero-shot evaluation is right in {zero.mean():.3f}, the "
        f"first of the {best['samples']} samples in {first.mean():.3f}, and all of them in {every.mean():.3f} (pass@1). "
        f"From zero-shot to pass@1 the difference is {format_interval(difference)} (paired bootstrap over problems): "
        f"{'the two DISAGREE' if apart else 'the two agree'}.{at_one}"
    )
