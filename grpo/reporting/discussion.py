"""Sentences computed from an experiment's numbers. Nothing here is a fixed verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from grpo.results.collapses import collapse_of
from grpo.results.intervals import two_level_difference
from grpo.results.runs import REWARD, Run, by_arm, final_scores, first_scores, identical
from grpo.results.statistics import format_interval

SPIKE = 5.0  # times the median: a step whose KL estimate stands out


def outcome(runs: list[Run], selection: dict[str, Any]) -> str:
    """Which arm leads, by how much, whether that can be told from noise; which arms trained alike."""
    arms = by_arm(runs)
    leader, others = _leader_and_others(selection)
    same = [c["arm"] for c in others if identical(arms[leader["arm"]], arms[c["arm"]])]
    sentences = [_leader(leader, others)]
    if same:
        sentences.append(
            f"{' and '.join(same)} trained like {leader['arm']} to the last number: what they differ in played no part."
        )
    return " ".join(sentences)


def course(runs: list[Run], selection: dict[str, Any]) -> str:
    """Which arms failed, stayed at the start or lie apart from the leader, and what the curves did."""
    arms, last_k = by_arm(runs), selection["last_k"]
    leader, others = _leader_and_others(selection)
    failed = [c for c in others if any(collapse_of(run, last_k) for run in arms[c["arm"]])]
    apart = [c for c in others[1:] if c not in failed and c["behind"]["low"] > 0]
    sentences = []
    if failed:
        sentences.append("; ".join(_failure(arms[c["arm"]], c, last_k) for c in failed) + ".")
    ended_well = [c["arm"] for c in selection["candidates"] if c not in failed]
    sentences += [_at_start(arm, arms[arm], last_k) for arm in ended_well]
    if apart:
        below = "; ".join(f"{c['arm']}, {format_interval(c['behind'])} below" for c in apart)
        sentences.append(f"Also apart from {leader['arm']}: {below}.")
    sentences.append(_movement(arms, leader["arm"]))
    if "kl/per_token" in runs[0].history:
        sentences.append(_drift(runs))
    elif any(_ratio_moved(run) for run in runs):
        sentences.append(_ratios(arms))
    return " ".join(filter(None, sentences))


def _leader_and_others(selection: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The leading candidate, and the others from the best to the worst."""
    leader = next(c for c in selection["candidates"] if c["arm"] == selection["leader"])
    return leader, sorted((c for c in selection["candidates"] if c is not leader), key=lambda c: -c["value"])


def _leader(leader: dict[str, Any], others: list[dict[str, Any]]) -> str:
    n = len(leader["runs"])
    runs = f"{n} run{'s' if n > 1 else ''}"
    if not others:
        return f"{leader['arm']} has a validation answer reward of {format_interval(leader)}, {runs}."
    second, behind = others[0], others[0]["behind"]
    text = (
        f"{leader['arm']} leads with a validation answer reward of {format_interval(leader)}, {runs} an arm, "
        f"{format_interval(behind)} above {second['arm']} ({second['value']:.3f}): "
    )
    if behind["low"] > 0:
        return text + "the interval of the difference lies above zero."
    if second["diverged"] and behind["value"] < 0:
        return text + "that arm did better, but a run of it diverged."
    return (
        text
        + f"the interval contains zero, so these runs cannot tell the two apart; a difference of {behind['detectable']:.3f} "
        "would have been found with a chance of 0.8, a smaller one more rarely."
    )


def _failure(runs: list[Run], candidate: dict[str, Any], last_k: int) -> str:
    def in_runs(those: list[Run]) -> str:
        return "" if len(those) == len(runs) else f" in {len(those)} of {len(runs)} runs"

    if candidate["diverged"]:
        stopped = [run for run in runs if run.metrics["diverged_step"] is not None]
        ends = "; ".join(f"step {run.metrics['diverged_step']}: {run.metrics['diverged_reason']}" for run in stopped)
        return f"{candidate['arm']} diverged{in_runs(stopped)} and was stopped ({ends})"
    fallen = [run for run in runs if collapse_of(run, last_k)]
    best = max(fallen, key=lambda run: run.metrics["best/answer_reward"])
    return (
        f"{candidate['arm']} collapsed{in_runs(fallen)}: it reached {best.metrics['best/answer_reward']:.3f} at step "
        f"{best.metrics['best/step']} and counts with {candidate['value']:.3f}, its format reward ended at "
        f"{_mean(runs, lambda run: run.metrics['val/format_reward']):.3f}, and its largest gradient norm was "
        f"{max(run.history['gradient_norm'].max() for run in runs):.2f}"
    )


def _at_start(arm: str, runs: list[Run], last_k: int) -> str:
    """That an arm, which has not collapsed, ends where it started; nothing if it does not."""
    gain = two_level_difference(first_scores(runs), final_scores(runs, last_k))
    if gain["low"] > 0 or gain["high"] < 0:
        return ""
    return f"{arm} ends where it started, at {first_scores(runs).mean():.3f}: its gain of {format_interval(gain)} holds zero."


def _movement(arms: dict[str, list[Run]], leader: str) -> str:
    """Reward of the leader; entropy, length and gradient norm of all arms side by side."""

    def across(value: Callable[[Run], float], digits: int) -> str:
        return ", ".join(f"{_mean(runs, value):.{digits}f} ({arm})" for arm, runs in arms.items())

    runs = arms[leader]
    start, end = _mean(runs, lambda r: r.validation[REWARD].iloc[0]), _mean(runs, lambda r: r.validation[REWARD].iloc[-1])
    length = _mean(runs, lambda r: r.validation["val/response_length"].iloc[0])
    entropy = _mean(runs, lambda r: r.history["token_entropy"].iloc[0])
    return (
        f"In {leader} the reward went from {start:.3f} to {end:.3f}; token entropy began at {entropy:.3f} nats there and "
        f"ended at {across(lambda r: r.history['token_entropy'].iloc[-1], 3)}; response length began at {length:.1f} tokens "
        f"and ended at {across(lambda r: r.validation['val/response_length'].iloc[-1], 1)}; the median gradient norm was "
        f"{across(lambda r: r.history['gradient_norm'].median(), 2)}."
    )


def _ratios(arms: dict[str, list[Run]]) -> str:
    """How far several updates on one rollout batch moved the policy from the one that sampled it."""

    def of_arm(arm: str, runs: list[Run]) -> str:
        history = pd.concat([run.history for run in runs])
        low, high = history["ratio_min"].min(), history["ratio_max"].max()
        return f"{arm} {low:.2g} to {high:.2g} with {100 * history['clip_fraction'].mean():.2g}% of tokens clipped"

    moved = {arm: runs for arm, runs in arms.items() if any(_ratio_moved(run) for run in runs)}
    return "Ratios to the sampling policy: " + "; ".join(of_arm(arm, runs) for arm, runs in moved.items()) + "."


def _ratio_moved(run: Run) -> bool:
    return "ratio_max" in run.history and bool((run.history["ratio_max"] != 1).any())


def _drift(runs: list[Run]) -> str:
    def at(column: str, row: int) -> str:
        return f"{_mean(runs, lambda run: run.history[f'kl/{column}'].iloc[row]):.3g}"

    first, last = at("per_token", 0), at("per_token", -1)
    text = (
        f"KL to the starting policy was {first} nats a token at step 1 and {last} at the last step by the sampled estimate, "
        f"{at('per_token_low_variance', 0)} and {at('per_token_low_variance', -1)} by the low-variance one; summed over a "
        f"response {at('per_sequence', -1)} and {at('per_sequence_low_variance', -1)} nats at the end."
    )
    low_variance = pd.concat([run.history["kl/per_token_low_variance"] for run in runs])
    if low_variance.max() < SPIKE * low_variance.median():
        return text
    return text + (
        f" The low-variance estimate belies its name here: its largest value in a step, {low_variance.max():.3g}, is "
        f"{low_variance.max() / low_variance.median():.0f} times its median. It holds exp(log pi_ref - log pi), so a few "
        "sampled tokens that the starting policy finds far likelier outweigh all others."
    )


def _mean(runs: list[Run], value: Callable[[Run], float]) -> float:
    return float(sum(value(run) for run in runs) / len(runs))
