"""Sentences computed from an experiment's numbers. Nothing here is a fixed verdict."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo.evaluation.statistics import format_interval
from grpo.reporting.results import REWARD, Run

# An arm that ends below this share of its own best reward, and below this share of the leader's, has collapsed.
COLLAPSED_OWN, COLLAPSED_LEADER = 0.75, 0.5


def discuss(runs: list[Run], selection: dict[str, Any]) -> str:
    """Which arm leads, by how much, whether that can be told from noise, and what the other arms' curves did."""
    candidates = sorted(selection["candidates"], key=lambda c: -c["value"])
    sentences = [_leader(candidates)]
    sentences += [_collapse(runs, c["arm"]) for c in candidates if _has_collapsed(runs, c, candidates[0])]
    sentences += [_lag(c, candidates[0]) for c in candidates[1:] if _has_lagged(runs, c, candidates[0])]
    sentences.append(_movement(runs, candidates[0]["arm"]))
    if selection["pinned"]:
        sentences.append(f"The winner is {selection['winner']}, {selection['reason']}.")
    return " ".join(sentences)


def _leader(candidates: list[dict[str, Any]]) -> str:
    first, second = candidates[0], candidates[1] if len(candidates) > 1 else None
    text = f"{first['arm']} leads with a validation answer reward of {format_interval(first)}"
    if second is None:
        return text + "."
    apart = first["low"] > second["high"]
    verdict = (
        "the intervals do not overlap"
        if apart
        else "the intervals overlap, so the order of these two cannot be told from one another"
    )
    return f"{text}, {first['value'] - second['value']:.3f} above {second['arm']} ({second['value']:.3f}); {verdict}."


def _of_arm(runs: list[Run], arm: str) -> Run:
    return next(run for run in runs if run.arm == arm)


def _has_collapsed(runs: list[Run], candidate: dict[str, Any], leader: dict[str, Any]) -> bool:
    best = _of_arm(runs, candidate["arm"]).metrics["best/answer_reward"]
    return bool(candidate["value"] < COLLAPSED_OWN * best and candidate["value"] < COLLAPSED_LEADER * leader["value"])


def _collapse(runs: list[Run], arm: str) -> str:
    run = _of_arm(runs, arm)
    metrics = run.metrics
    return (
        f"{arm} collapsed: it reached {metrics['best/answer_reward']:.3f} at step {metrics['best/step']} and ended at "
        f"{metrics['val/answer_reward']:.3f}, with a format reward of {metrics['val/format_reward']:.3f} and a largest "
        f"gradient norm of {run.history['gradient_norm'].max():.2f}."
    )


def _has_lagged(runs: list[Run], candidate: dict[str, Any], leader: dict[str, Any]) -> bool:
    return candidate["high"] < leader["low"] and not _has_collapsed(runs, candidate, leader)


def _lag(candidate: dict[str, Any], leader: dict[str, Any]) -> str:
    return f"{candidate['arm']} stayed {leader['value'] - candidate['value']:.3f} below ({candidate['value']:.3f})."


def _movement(runs: list[Run], arm: str) -> str:
    run = _of_arm(runs, arm)
    norm = run.history["gradient_norm"]

    def ends(column: pd.Series, digits: int) -> str:
        return f"from {column.iloc[0]:.{digits}f} to {column.iloc[-1]:.{digits}f}"

    length, entropy = run.validation["val/response_length"], run.history["token_entropy"]
    return (
        f"In {arm} the reward went {ends(run.validation[REWARD], 3)} while response length went {ends(length, 1)} tokens and "
        f"token entropy {ends(entropy, 3)} nats; the gradient norm lay between {norm.min():.2f} and {norm.max():.2f}."
    )
