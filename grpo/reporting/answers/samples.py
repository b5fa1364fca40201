"""Whether pass@1 of the samples for Best-of-N agrees with the zero-shot figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.study import paths

DISAGREE = 0.05


def read_first_and_all(prompt: str) -> dict[str, tuple[float, float]]:
    """problem -> answer reward of its first sample, and share of its samples that are right.

    Raises:
        UserError: the file is missing or damaged.
    """

    def line(value: dict[str, Any]) -> tuple[str, tuple[float, float]]:
        rights = [float(sample["answer_reward"] == 1.0) for sample in value["samples"]]
        return value["problem"], (rights[0], float(np.mean(rights)))

    return dict(read_jsonl(paths.BEST_OF_N / f"{prompt}.jsonl", "best_of_n", line))


def chance_of(zero_shot: Sequence[float], rights: Sequence[int], samples: int) -> float:
    """Two-sided p of how many zero-shot answers are right, were each one more sample of its problem.

    The exact permutation test within problems (Good, Permutation Tests, 2000): the number is a sum of independent draws with
    chance (rights + zero-shot) / (samples + 1); p sums over all numbers that are no likelier than the one observed.

    Args:
        zero_shot: 1.0 where a problem's answer is right.
        rights: how many of its samples are.
    """
    distribution = np.ones(1)
    for right, zero in zip(rights, zero_shot, strict=True):
        chance = (right + zero) / (samples + 1)
        distribution = np.convolve(distribution, [1 - chance, chance])
    observed = distribution[round(sum(zero_shot))]
    return min(1.0, float(distribution[distribution <= observed * (1 + 1e-9)].sum()))


def agreement(prompt: str, zero_shot: dict[str, float], sampled: dict[str, tuple[float, float]], best: dict[str, Any]) -> str:
    """Both figures on the problems that both have, and whether they could be of one and the same model.

    Args:
        best: what reports/best_of_n.json has of this prompt.
    """
    both = [problem for problem in sampled if problem in zero_shot]
    if not both:
        return f"Under {prompt} zero-shot evaluation and samples have no problem in common."
    zero, first, every = np.array([(zero_shot[p], *sampled[p]) for p in both]).T
    p = chance_of(zero.tolist(), [round(share * best["samples"]) for share in every], best["samples"])
    one, best_one = (best["n"]["1"][kind]["value"] for kind in ("pass", "best")) if "1" in best["n"] else (None, None)
    of_all = " (pass@1)"
    at_one = "" if one is None else f" pass@1 is {one:.4f} and Best@1 {best_one:.4f}: choosing among one is no choice."
    if one is not None and zero_shot.keys() == sampled.keys():
        of_all = ""
        at_one = f" For N = 1 the zero-shot answers serve: pass@1 and Best@1 are {one:.4f}, the zero-shot figure."
    every_zero = sum(zero_shot.values()) / len(zero_shot)
    return (
        f"Under {prompt} zero-shot evaluation is right in {every_zero:.3f} of its {len(zero_shot)} problems. On the "
        f"{len(both)} that were also sampled it is right in {zero.mean():.3f}, the first of the {best['samples']} samples in "
        f"{first.mean():.3f}, and all of them in {every.mean():.3f}{of_all}. Were the zero-shot answer one more sample, a "
        f"number of right ones no likelier than this would come up with chance {p:.3f}: the two "
        f"{'agree' if p >= DISAGREE else 'DISAGREE'}.{at_one}"
    )
