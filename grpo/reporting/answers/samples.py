"""Best-of-N: the gap between Best@N and pass@N, and agreement of pass@1 with the zero-shot accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.reporting.sentences import paragraphs
from grpo.reporting.tables import KINDS
from grpo.study import paths

DISAGREE = 0.05


def discuss_best_of_n(prompt: str, metrics: dict[str, Any]) -> str:
    """Explain the gap between Best@N and pass@N under one prompt, in one to three sentences."""
    n, kinds = list(metrics["n"].items())[-1]
    values = {kind: kinds[kind]["value"] for kind in KINDS}
    (text,) = paragraphs(
        "best_of_n_sentences.md.j2", prompt=prompt, n=n, value=values, problems=metrics["problems"], **metrics["ranking"]
    )
    return text


def read_first_and_all(prompt: str) -> dict[str, tuple[float, float]]:
    """Read problem -> whether its first sample is right (1.0 or 0.0), and the share of its samples that are right.

    Raises:
        UserError: the file is missing or damaged.
    """

    def line(value: dict[str, Any]) -> tuple[str, tuple[float, float]]:
        rights = [float(sample["answer_reward"] == 1.0) for sample in value["samples"]]
        return value["problem"], (rights[0], float(np.mean(rights)))

    return dict(read_jsonl(paths.BEST_OF_N / f"{prompt}.jsonl", "best_of_n", line))


def chance_of(zero_shot: Sequence[float], rights: Sequence[int], samples: int) -> float:
    """Two-sided p of the hypothesis that each zero-shot answer is one more sample of its problem.

    Exact permutation test within problems (Good, Permutation Tests, 2000). Under the hypothesis, the number of right answers is
    a sum of independent draws with probability (rights + zero-shot) / (samples + 1). p sums over all numbers that are at
    most as likely as the observed one.

    Args:
        zero_shot: 1.0 for a problem with a right answer.
        rights: number of right samples of each problem.
    """
    distribution = np.ones(1)
    for right, zero in zip(rights, zero_shot, strict=True):
        chance = (right + zero) / (samples + 1)
        distribution = np.convolve(distribution, [1 - chance, chance])
    observed = distribution[round(sum(zero_shot))]
    return min(1.0, float(distribution[distribution <= observed * (1 + 1e-9)].sum()))


def agreement(prompt: str, zero_shot: dict[str, float], sampled: dict[str, tuple[float, float]], best: dict[str, Any]) -> str:
    """Compare both figures on their common problems, and state whether they are consistent with one model.

    Args:
        best: the prompt's entry in reports/best_of_n.json.
    """
    both = [problem for problem in sampled if problem in zero_shot]
    if not both:
        return f"Under {prompt} zero-shot evaluation and samples have no problem in common."
    zero, first, every = np.array([(zero_shot[p], *sampled[p]) for p in both]).T
    p = chance_of(zero.tolist(), [round(share * best["samples"]) for share in every], best["samples"])
    one, best_one = (best["n"]["1"][kind]["value"] for kind in ("pass", "best")) if "1" in best["n"] else (None, None)
    of_all = " (pass@1)"
    at_one = "" if one is None else f" pass@1 is {one:.4f} and Best@1 {best_one:.4f}."
    if one is not None and zero_shot.keys() == sampled.keys():
        of_all = ""
        at_one = f" For N = 1 the zero-shot answers are used: pass@1 and Best@1 are {one:.4f}, the zero-shot figure."
    every_zero = sum(zero_shot.values()) / len(zero_shot)
    return (
        f"Under {prompt} zero-shot evaluation is right in {every_zero:.3f} of its {len(zero_shot)} problems. On the "
        f"{len(both)} that were also sampled it is right in {zero.mean():.3f}, the first of the {best['samples']} samples in "
        f"{first.mean():.3f}, and all of them in {every.mean():.3f}{of_all}. If the zero-shot answer were one more sample, a "
        f"number of right answers as unlikely as this would occur with probability {p:.3f}: the two "
        f"{'agree' if p >= DISAGREE else 'DISAGREE'}.{at_one}"
    )
