"""Verdicts on published claims, from made-up runs whose verdict can be found by hand."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from run_folders import write_baseline, write_run
from study_parts import EXPERIMENTS, ROOT, study_named, with_values

from grpo.common.errors import UserError
from grpo.common.yaml_file import parse_yaml
from grpo.reporting.tables import claims_table
from grpo.results import verdicts
from grpo.results.claims import adjusted, judge_claims, read_verdicts, shown, write_claims
from grpo.results.evidence import Evidence, NotMeasured
from grpo.results.findings import AGREES, CANNOT_TELL, DISAGREES, NO_DIFFERENCE, NOT_TESTED, RUNS, Interval, Verdict
from grpo.results.runs import Run
from grpo.results.verdicts import KL
from grpo.study.schema import Study
from grpo.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.usefixtures("workdir")
PUBLISHED = parse_yaml(ROOT / "grpo" / "results" / "claims.yaml")
OF_MINI = [claim for claim in PUBLISHED["claims"] if claim["experiment"] in {*EXPERIMENTS, "math_baseline"}]
Write = Callable[..., None]
PROBLEMS = 200
NORM, ENTROPY = "gradient_norm", "token_entropy"


def solved(share: float) -> NDArray[np.float64]:
    """The first problems are solved, so that a larger share includes a smaller one."""
    return (np.arange(PROBLEMS) < round(share * PROBLEMS)).astype(float)


def made_up(
    arm: str, *rewards: float, seed: int = 0, updates: int = 1, diverged: int | None = None, steps: int = 64, **levels: Any
) -> Run:
    """A run of 64 steps.

    Args:
        rewards: of each evaluation, the untrained one first, at equal distances.
        levels: metrics of each step, by their names in the history without slashes; a number stands for all steps.
    """
    lengths = levels.pop("lengths", [100.0] * len(rewards))
    metrics = {NORM: 1.0, ENTROPY: 0.5, KL: np.arange(steps) / 100} | levels
    columns = {"step": np.repeat(np.arange(1, steps + 1), updates), "update": np.arange(1, steps * updates + 1)}
    columns |= {name: np.repeat(np.broadcast_to(values, steps), updates).astype(float) for name, values in metrics.items()}
    validation = {
        "step": np.linspace(0, steps, len(rewards)).astype(int),
        "val/answer_reward": rewards,
        "val/response_length": lengths,
    }
    return Run(
        experiment="made_up",
        arm=arm,
        seed=seed,
        config={"updates_per_rollout_batch": updates, "overrides": {}, "config": {}},
        metrics={"diverged_step": diverged, "diverged_reason": ""},
        history=pd.DataFrame(columns),
        validation=pd.DataFrame(validation),
        outcomes=np.stack([solved(reward) for reward in rewards]),
    )


def ending(arm: str, *finals: float, **options: Any) -> list[Run]:
    """Runs of an arm by their last evaluation."""
    return [made_up(arm, 0.1, final, seed=seed, **options) for seed, final in enumerate(finals)]


def evidence(*arms: list[Run], last_k: int = 1) -> Evidence:
    return Evidence("made_up", {runs[0].arm: runs for runs in arms}, last_k)


def judge(kind: str, found: Evidence, margin: float | None = None, **parameters: Any) -> Verdict:
    return getattr(verdicts, kind)(found, **parameters | ({} if margin is None else {"margin": margin}))


# ----------------------------------------------------------------------------------------------------- final rewards


@pytest.mark.parametrize(
    ("a", "b", "margin", "expected"),
    [
        ((0.9, 0.9, 0.9), (0.5, 0.5, 0.5), 0.05, AGREES),
        ((0.5, 0.5, 0.5), (0.9, 0.9, 0.9), 0.05, DISAGREES),
        ((0.505, 0.505, 0.505), (0.5, 0.5, 0.5), None, CANNOT_TELL),  # one problem of 200
        ((0.505, 0.505, 0.505), (0.5, 0.5, 0.5), 0.05, NO_DIFFERENCE),  # .005 +- 1.97 x .005
        ((0.52, 0.52, 0.52), (0.5, 0.5, 0.5), 0.05, NO_DIFFERENCE),  # told from zero, and yet within the margin
        ((0.54, 0.54, 0.54), (0.5, 0.5, 0.5), 0.05, AGREES),  # .04 +- .027: above zero, not within the margin
        # Means .6 and .5, runs' standard deviation .1 in both: .1 +- 2.78 x .0816, and the problems' share on top.
        ((0.5, 0.6, 0.7), (0.4, 0.5, 0.6), 0.05, CANNOT_TELL),
        ((0.6,), (0.5,), 0.05, CANNOT_TELL),  # one run an arm: the assumed .045 makes .1 +- .18
        ((0.9,), (0.5,), 0.05, AGREES),
    ],
)
def test_ends_above(a: tuple[float, ...], b: tuple[float, ...], margin: float | None, expected: str) -> None:
    found = judge("ends_above", evidence(ending("a", *a), ending("b", *b)), margin, better="a", worse="b")
    assert found.verdict == expected
    (contrast,) = found.contrasts
    assert (contrast.arm, contrast.against) == ("a", "b")
    assert contrast.difference.value == pytest.approx(np.mean(a) - np.mean(b))
    assert f"a {np.mean(a):.3f}, b {np.mean(b):.3f}; a above b by {contrast.difference}" in found.measured


def test_only_last_evaluations_count_and_never_the_untrained_one() -> None:
    a, b = [made_up("a", 1.0, 0.8, 0.2, 0.2)], [made_up("b", 0.0, 0.4, 0.4, 0.4)]
    assert judge("ends_above", evidence(a, b, last_k=3), better="a", worse="b").contrasts[0].difference.value == pytest.approx(
        0
    )
    assert judge("ends_above", evidence(a, b, last_k=2), better="a", worse="b").contrasts[0].difference.value < -0.19


def test_a_collapsed_run_is_counted_separately_and_no_arm_wins_by_its_other_runs() -> None:
    """Its mean without the collapsed run is higher, but one of three runs collapsed."""
    a = [made_up("a", 0.1, 0.9, 0.9, seed=0), made_up("a", 0.1, 0.9, 0.9, seed=1), made_up("a", 0.1, 0.9, 0.0, seed=2)]
    b = ending("b", 0.5, 0.5, 0.5)
    found = judge("ends_above", evidence(a, b), 0.05, better="a", worse="b")
    assert found.contrasts[0].difference.value == pytest.approx(0.4) and found.contrasts[0].difference.low > 0.3
    assert found.verdict == CANNOT_TELL and "more runs of the arm that ends higher collapsed" in found.reason
    assert [collapse.run for collapse in found.collapses] == ["made_up/a/2"] and "(1 of 3 collapsed)" in found.measured
    assert judge("ends_above", evidence(a, b), 0.05, better="b", worse="a").verdict == CANNOT_TELL
    whole = ending("c", 0.9, 0.9, 0.9)  # one rival that did not collapse is enough to disagree
    assert judge("not_below", evidence(a, b, whole), 0.05, better="b", worse=["a", "c"]).verdict == DISAGREES
    lost = [made_up("b", 0.1, 0.6, 0.0, seed=seed) for seed in range(3)]
    assert judge("ends_above", evidence(a, lost), 0.05, better="a", worse="b").verdict == AGREES


def test_arms_of_which_one_has_more_collapsed_runs_are_not_equal() -> None:
    a, b = ending("a", *[0.5] * 3), [*ending("b", 0.505, 0.505), made_up("b", 0.1, 0.5, 0.0, seed=2)]
    for pair in ({"better": "a", "worse": "b"}, {"better": "b", "worse": "a"}):
        found = judge("ends_above", evidence(a, b), 0.05, **pair)
        assert found.verdict == CANNOT_TELL and "more runs of one arm collapsed" in found.reason


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([-2.2], DISAGREES),  # p = .028
        ([-2.2, 0.1], CANNOT_TELL),  # the worst of two rivals: .056
        ([-2.6, 0.1, 0.1], DISAGREES),  # .0093 x 3
        ([2.2, 2.2, 2.2], AGREES),  # above all rivals needs no correction (Berger 1982)
        ([2.2, 2.2, 1.9], CANNOT_TELL),  # .057 for the third
    ],
)
def test_one_of_several_rivals_may_be_ahead_by_chance(differences: list[float], expected: str) -> None:
    """Differences in standard errors, of many degrees of freedom."""
    given = [Interval(value, value - 1.96, value + 1.96, 0.95, RUNS, 9, 9, 1.0, 1e9) for value in differences]
    assert verdicts.decide(given).verdict == expected


def test_identical_arms_and_missing_arms_are_not_tested() -> None:
    alike = evidence(ending("a", 0.5, 0.6), ending("b", 0.5, 0.6))
    for kind, roles in (("ends_above", {"better": "a", "worse": "b"}), ("metric_larger", {"larger": "a", "smaller": "b"})):
        with pytest.raises(NotMeasured, match="a and b have identical results"):
            judge(kind, alike, **roles, **({"metric": NORM} if kind == "metric_larger" else {}))
    with pytest.raises(NotMeasured, match="no arm c"):
        judge("ends_above", alike, better="a", worse="c")
    with pytest.raises(NotMeasured, match="no kl/none"):
        judge("metric_changes", alike, arm="a", metric="kl/none", since="first", above=2)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(0.70, (0.5, 0.6), AGREES), (0.70, (0.5, 0.71), AGREES), (0.70, (0.5, 0.9), DISAGREES), (0.70, (0.5, 0.73), CANNOT_TELL)],
)
def test_not_below_is_held_against_each_rival(a: float, b: tuple[float, float], expected: str) -> None:
    arms = [ending("a", *[a] * 3), *(ending(name, *[end] * 3) for name, end in zip("bc", b, strict=True))]
    found = judge("not_below", evidence(*arms), 0.05, better="a", worse=["b", "c"])
    assert found.verdict == expected and len(found.contrasts) == 2 and found.contrasts[0].contrasts == 2
    wide, narrow = found.contrasts[0].adjusted, found.contrasts[0].difference
    assert wide.low < narrow.low and wide.level == pytest.approx(0.95**0.5)


def test_not_below_is_about_as_many_steps() -> None:
    arms = ending("a", 0.5, 0.5), ending("b", 0.5, 0.6, steps=32)
    assert evidence(*arms).steps() == 32
    with pytest.raises(NotMeasured, match=r"different numbers of steps: a \[64\], b \[32\]"):
        judge("not_below", evidence(*arms), 0.05, better="a", worse="b")
    stopped = [*ending("b", 0.5, 0.5), made_up("b", 0.1, 0.5, 0.0, seed=2, steps=8, diverged=8)]  # not as long, as it diverged
    found = judge("not_below", evidence(ending("a", 0.7, 0.7), stopped), 0.05, better="a", worse="b")
    assert found.verdict == AGREES and evidence(stopped).steps() == 64


def test_leaders_stand_for_their_methods() -> None:
    """The tie-rule would take each method's first arm, and find the opposite."""
    other = evidence(ending("simple", *[0.80] * 3), ending("best", *[0.82] * 3))
    own = Evidence("own", {"simple": ending("simple", *[0.70] * 3), "best": ending("best", *[0.95] * 3)}, 1)
    found = judge("method_above", own, 0.05, other=other)
    assert found.verdict == AGREES and found.contrasts[0].difference.value == pytest.approx(0.13)
    assert (found.contrasts[0].arm, found.contrasts[0].against) == ("own/best", "made_up/best")


@pytest.mark.parametrize(("own", "others", "expected"), [(1, 1, AGREES), (1, 3, CANNOT_TELL), (3, 1, CANNOT_TELL)])
def test_the_best_of_several_arms_is_partly_luck_in_either_method(own: int, others: int, expected: str) -> None:
    """Five problems of 200: t = .025 / sqrt(.025 x .975 / 199) = 2.26, p = .025; of three arms .075."""
    first = evidence(*(ending(f"a{i}", *[0.845 if i == 0 else 0.5] * 3) for i in range(own)))
    second = evidence(*(ending(f"b{i}", *[0.82 if i == 0 else 0.5] * 3) for i in range(others)))
    assert judge("method_above", first, other=second).verdict == expected


def test_starts_above_is_about_the_untrained_policy() -> None:
    a, b = [made_up("a", 0.5, 0.1)], [made_up("b", 0.1, 0.9)]
    assert judge("starts_above", evidence(a, b), better="a", worse="b", by=0.1).verdict == AGREES
    assert judge("starts_above", evidence(b, a), better="b", worse="a", by=0.1).verdict == DISAGREES
    assert judge("starts_above", evidence(a, b), better="a", worse="b", by=0.4).verdict == CANNOT_TELL


@pytest.mark.parametrize(("low", "high", "expected"), [(0.01, 0.09, AGREES), (0.11, 0.2, DISAGREES), (0.05, 0.12, CANNOT_TELL)])
def test_zero_shot_below(low: float, high: float, expected: str) -> None:
    found = Evidence("math_baseline", {}, 1, {"r1_zero": {"accuracy": {"value": 0.05, "low": low, "high": high}}})
    assert judge("zero_shot_below", found, prompt="r1_zero", below=0.1).verdict == expected
    with pytest.raises(NotMeasured, match="no zero-shot evaluation under chat"):
        judge("zero_shot_below", found, prompt="chat", below=0.1)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.2, 0.8, 0.5), AGREES),
        ((0.8, 0.5, 0.2), DISAGREES),  # best at an end, and all between are below it
        ((0.2, 0.8, 0.799), CANNOT_TELL),
        ((0.2, 0.79, 0.8), CANNOT_TELL),
    ],
)
def test_best_inside_range(ends: tuple[float, ...], expected: str) -> None:
    arms = [ending(str(place), end, end - 0.01, end - 0.005 * place) for place, end in enumerate(ends)]
    assert judge("best_inside_range", evidence(*arms)).verdict == expected


def test_one_learning_rate_is_no_sweep() -> None:
    for kind in ("best_inside_range", "lags", "collapses"):
        with pytest.raises(NotMeasured, match="1 arm of a sweep"):
            judge(kind, evidence(ending("only", 0.5, 0.6)))


def test_the_lowest_rate_lags_unless_it_leads_or_collapsed() -> None:
    best = ending("best", 0.8, 0.8, 0.8)
    assert judge("lags", evidence(ending("low", 0.2, 0.2, 0.2), best), 0.03).verdict == AGREES
    assert judge("lags", evidence(ending("low", 0.9, 0.9, 0.9), best), 0.03).verdict == DISAGREES
    fallen = [made_up("low", 0.1, 0.7, 0.0, seed=seed) for seed in range(3)]
    assert judge("lags", evidence(fallen, best), 0.03).verdict == DISAGREES
    assert judge("lags", evidence([*fallen[:1], *ending("low", 0.2, 0.2)], best), 0.03).verdict == CANNOT_TELL


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.9, 0.8, 0.6), AGREES),
        ((0.6, 0.8, 0.7), DISAGREES),
        ((0.9, 0.8, 0.795), CANNOT_TELL),
        ((0.9, 0.895, 0.905), NO_DIFFERENCE),
    ],
)
def test_descends(ends: tuple[float, ...], expected: str) -> None:
    arms = [ending(name, end, end, end, **{NORM: end}) for name, end in zip("abc", ends, strict=True)]
    found = judge("descends", evidence(*arms), 0.03, arms=["a", "b", "x", "c"])
    assert found.verdict == expected and len(found.contrasts) == 3
    with pytest.raises(NotMeasured, match="1 of the arms"):
        judge("descends", evidence(*arms), 0.03, arms=["a", "x"])


# --------------------------------------------------------------------------------------------------------- collapses


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0.1, 0.8, 0.2), (0.1, 0.7, 0.1)], AGREES),
        ([(0.1, 0.8, 0.2), (0.1, 0.7, 0.6)], CANNOT_TELL),
        ([(0.1, 0.8, 0.7), (0.1, 0.7, 0.6)], DISAGREES),
        ([(0.1, 0.1, 0.1), (0.1, 0.1, 0.1)], DISAGREES),  # a run that stays where it started
        ([(0.1, 0.04, 0.015), (0.1, 0.04, 0.0)], AGREES),  # below half of the start: three problems of 20
        ([(0.02, 0.01, 0.005), (0.02, 0.02, 0.005)], DISAGREES),  # one problem of four: chance
        # Four problems of 200 are t = .02 / sqrt(.02 x .98 / 199) = 2.02: enough for one evaluation, not for the best of three.
        ([(0.01, 0.03, 0.01), (0.01, 0.03, 0.01)], DISAGREES),
    ],
)
def test_collapses_of_the_last_arm(runs: list[tuple[float, ...]], expected: str) -> None:
    last = [made_up("last", *rewards, seed=seed) for seed, rewards in enumerate(runs)]
    assert judge("collapses", evidence(ending("first", 0.5, 0.5), last)).verdict == expected


def test_a_collapse_between_two_evaluations_shows_in_the_training_rewards() -> None:
    rewards = np.array([0.1, 0.4, 0.6] + [0.0] * 61)
    run = made_up("last", 0.1, 0.0, 0.0, **{"train/answer_reward": rewards})
    run = replace(run, config=run.config | {"config": {"rollout_batch_size": {"value": 64}, "group_size": {"value": 8}}})
    (collapse,) = evidence([run]).collapses("last")
    seen = (collapse.seen_in, collapse.step, collapse.reached, collapse.ended)
    assert seen == ("training rewards", 3, pytest.approx(0.6), 0.0)
    lucky = made_up("last", 0.1, 0.1, 0.1, **{"train/answer_reward": np.array([0.1] * 32 + [0.5] + [0.1] * 31)})
    lucky = replace(lucky, config=run.config)
    assert evidence([lucky]).collapses("last") == ()  # of 8 groups at .5 the interval begins at .12; of 64 it would at .31


def test_a_diverged_run_collapsed() -> None:
    runs = ending("last", 0.5, 0.6, diverged=7)
    found = judge("collapses", evidence(ending("first", 0.5, 0.5), runs))
    assert found.verdict == AGREES and {(one.seen_in, one.step) for one in found.collapses} == {("divergence", 7)}
    (worse,) = evidence([made_up("last", 0.6, 0.5, 0.4, diverged=7)]).collapses("last")
    assert (worse.reached, worse.ended) == (pytest.approx(0.6), pytest.approx(0.4))  # it never was above its start


def test_many_updates_are_those_of_the_arm_with_most_of_them() -> None:
    many = [made_up("many", 0.1, 0.8, 0.1, updates=16)]
    found = evidence(many, ending("few", 0.5))
    assert judge("collapses", found, updates=16).verdict == AGREES
    with pytest.raises(NotMeasured, match=r"no arm with 32 updates per rollout batch \(most: 16\)"):
        judge("collapses", found, updates=32)


# -------------------------------------------------------------------------------- norms, entropy, length, KL over steps


def noisy(level: float, seed: int, trend: float = 1.0) -> NDArray[np.float64]:
    """A level with noise of a fifth from step to step, and a trend to ``trend`` times it."""
    return level * np.geomspace(1, trend, 64) * np.exp(0.2 * np.random.default_rng(seed).normal(size=64))


@pytest.mark.parametrize(("ratio", "expected"), [(2.0, AGREES), (0.5, DISAGREES), (1.0, NO_DIFFERENCE)])
def test_metric_larger_is_about_levels_block_by_block(ratio: float, expected: str) -> None:
    """Both arms' norms fall tenfold over the run, which cancels out, and one step has a spike."""
    arms = []
    for arm, level, first in (("a", ratio, 0), ("b", 1.0, 10)):
        runs = [made_up(arm, 0.1, 0.5, seed=s, **{NORM: noisy(level, first + s, 0.1)}) for s in range(3)]
        runs[0].history.loc[20, NORM] = 1e6
        arms.append(runs)
    found = judge("metric_larger", evidence(*arms), 1.25, larger="a", smaller="b", metric=NORM)
    assert found.verdict == expected and found.numbers["value"] == pytest.approx(ratio, rel=0.1)


def test_late_levels_are_those_of_the_last_quarter() -> None:
    falling = [made_up("a", 0.1, 0.5, seed=s, **{ENTROPY: noisy(1.0, s, 0.05)}) for s in range(3)]
    steady = [made_up("b", 0.1, 0.5, seed=s, **{ENTROPY: noisy(0.5, 9 + s)}) for s in range(3)]
    found = judge("metric_larger", evidence(falling, steady), 1.25, larger="b", smaller="a", metric=ENTROPY, late=True)
    # From 1 to .05 in 64 steps: in the last 16 the logarithm is on average that of .05^(7/8) = .0727.
    assert found.verdict == AGREES and found.numbers["value"] == pytest.approx(0.5 / 0.0727, rel=0.1)


def test_norms_that_are_not_finite_and_too_few_steps() -> None:
    a, b = (
        [made_up(arm, 0.1, 0.5, seed=s, **{NORM: noisy(level, s)}) for s in range(3)] for arm, level in (("a", 3), ("b", 1))
    )
    a[0].history.loc[5:11, NORM] = np.nan
    b[2] = made_up("b", 0.1, 0.5, seed=2, steps=40)  # a run that ended early: only steps that all runs took are compared
    assert judge("metric_larger", evidence(a, b), 1.1, larger="a", smaller="b", metric=NORM).verdict == AGREES
    short = evidence(ending("a", 0.5, 0.6, steps=8), ending("b", 0.5, 0.6, steps=8, **{NORM: 2.0}))
    with pytest.raises(NotMeasured, match="too few steps"):
        judge("metric_larger", short, 1.1, larger="a", smaller="b", metric=NORM)


@pytest.mark.parametrize(
    ("trend", "bar", "expected"),
    [
        (0.1, {"below": 0.5}, AGREES),
        (0.9, {"below": 0.5}, DISAGREES),
        (4.0, {"above": 1.5}, AGREES),
        (1.0, {"above": 1.5}, DISAGREES),
        (1.1, {"within": 2}, AGREES),
        (0.1, {"within": 2}, DISAGREES),
        (8.0, {"within": 2}, DISAGREES),
    ],
)
def test_metric_changes(trend: float, bar: dict[str, float], expected: str) -> None:
    runs = [made_up("a", 0.1, 0.5, seed=s, **{ENTROPY: noisy(0.5, s, trend)}) for s in range(3)]
    assert judge("metric_changes", evidence(runs), arm="a", metric=ENTROPY, since="first", **bar).verdict == expected


def test_a_fall_from_the_highest_level_and_an_arm_without_the_cause() -> None:
    spike = np.concatenate([np.full(8, 0.5), np.full(8, 2.0), np.full(48, 0.6)])
    runs = [made_up("a", 0.1, 0.5, seed=s, **{ENTROPY: spike}) for s in range(2)]
    found = evidence(runs, [replace(run, arm="b") for run in runs])
    parameters = {"arm": "a", "metric": ENTROPY, "below": 0.5}
    assert judge("metric_changes", found, **parameters, since="highest").verdict == AGREES  # .6 of 2
    assert judge("metric_changes", found, **parameters, since="first").verdict == DISAGREES
    assert judge("metric_changes", found, **parameters, since="highest", unlike="b").verdict == CANNOT_TELL


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((100, 20), (100, 90), AGREES), ((100, 60), (100, 90), DISAGREES), ((100, 20), (100, 20), CANNOT_TELL)],
)
def test_falls(a: tuple[float, float], b: tuple[float, float], expected: str) -> None:
    arms = [[made_up(arm, 0.1, 0.5, lengths=lengths)] for arm, lengths in (("a", a), ("b", b))]
    found = judge("falls", evidence(*arms), arm="a", unlike="b", metric="val/response_length", below=0.5)
    assert found.verdict == expected


def test_collapsed_runs_count_where_a_fall_or_a_blow_up_is_looked_for() -> None:
    spikes = np.where(np.arange(64) % 10 == 0, 100.0, 1.0)
    fallen = made_up("a", 0.1, 0.8, 0.1, seed=1, lengths=(100, 100, 20), **{NORM: spikes})
    arms = [[made_up("a", 0.1, 0.8, 0.8), fallen], [made_up("b", 0.1, 0.8, 0.8, seed=seed) for seed in range(2)]]
    of_length = {"metric": "val/response_length", "below": 0.5}
    assert judge("falls", evidence(*arms), arm="a", unlike="b", **of_length).verdict == CANNOT_TELL
    assert judge("blows_up", evidence(*arms), arm="a", unlike="b", metric=NORM, times=3).verdict == CANNOT_TELL


def test_norms_blow_up_in_more_than_one_spike() -> None:
    calm = [made_up("clip", 0.1, 0.5, seed=s, **{NORM: noisy(1.0, s)}) for s in range(2)]
    spikes = np.ones(64)
    spikes[[20, 30, 40, 50]] = 100
    wild = [made_up("no", 0.1, 0.5, seed=s, **{NORM: spikes}) for s in range(2)]
    one = np.ones(64)
    one[20] = 100
    single = [made_up("no", 0.1, 0.5, seed=s, **{NORM: one}) for s in range(2)]
    parameters = {"arm": "no", "unlike": "clip", "metric": NORM, "times": 3}
    assert judge("blows_up", evidence(calm, wild), **parameters).verdict == AGREES
    assert judge("blows_up", evidence(calm, single), **parameters).verdict == DISAGREES
    assert judge("blows_up", evidence(calm, [wild[0], single[1]]), **parameters).verdict == CANNOT_TELL


def test_a_norm_warns_before_the_reward_has_fallen() -> None:
    early, late = np.ones(64), np.ones(64)
    early[30], late[60] = 9, 9
    steady = ending("steady", 0.9, 0.9)

    def fallen(norms: NDArray[np.float64]) -> list[Run]:
        """Rises late, and falls by half at step 48."""
        return [made_up("many", 0.1, 0.2, 0.8, 0.1, 0.1, seed=seed, **{NORM: norms}) for seed in range(3)]

    assert judge("warns", evidence(steady, fallen(early)), metric=NORM, times=3).verdict == AGREES
    found = judge("warns", evidence(steady, fallen(early * 4)), metric=NORM, times=3)
    assert found.numbers == {"ratio": 36.0, "level": 1.0}  # the level is that of the steady runs alone
    assert judge("warns", evidence(steady, fallen(late)), metric=NORM, times=3).verdict == DISAGREES
    with pytest.raises(NotMeasured, match="0 runs collapsed and 2 held"):
        judge("warns", evidence(steady), metric=NORM, times=3)


@pytest.mark.parametrize(
    ("end", "kl", "expected"),
    [
        (0.9, np.arange(64), AGREES),
        (0.1, np.arange(64), CANNOT_TELL),
        (0.9, np.arange(64)[::-1], DISAGREES),
        (0.0, np.arange(64), DISAGREES),
    ],
)
def test_rises_with_kl(end: float, kl: NDArray[np.float64], expected: str) -> None:
    runs = [made_up("best", 0.1, end, end, seed=seed, **{KL: kl}) for seed in range(3)]
    assert judge("rises_with_kl", evidence(runs), arm="best").verdict == expected


# --------------------------------------------------------------------------------------------------- a study's claims


@pytest.fixture(scope="module")
def study(mini_study: Study) -> Study:
    """Three runs per arm; the last evaluation counts."""
    study: Study = with_values(mini_study, {"seeds": [0, 1, 2], "selection.last_k": 1})
    return study


def write(run: Run, experiment: str) -> None:
    write_run(replace(run, experiment=experiment))


@pytest.fixture(scope="module")
def write_study(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Write all runs of the study: each experiment's first arm ends at .5, its second at .7, all others at .6.

    Arm by arm the norms are 1, 2, 3, ...; their updates per rollout batch 1, 4, 16, ... Each file is written once, and linked.
    """

    @cache
    def written(steps: int) -> Path:
        with chdir(tmp_path_factory.mktemp("study")):
            for experiment, content in study.experiments.items():
                for place, arm in enumerate(content.arms):
                    for seed in study.seeds:
                        levels = {"updates": 4**place, "steps": steps, NORM: 1.0 + place}
                        write(made_up(arm, 0.1, (0.5, 0.7, 0.6)[min(place, 2)], seed=seed, **levels), experiment)
            write_baseline(study)
            return Path.cwd()

    return lambda steps=64: shutil.copytree(written(steps), ".", copy_function=os.link, dirs_exist_ok=True)


EXPECTED = {  # from write_study's .5, .7 and .6
    "learning-rate-matters": AGREES,
    "learning-rate-too-low": AGREES,
    "learning-rate-too-high": DISAGREES,
    "baseline-helps": DISAGREES,
    "no-baseline-length-collapse": DISAGREES,  # 100 tokens throughout
    "baseline-entropy-collapses": DISAGREES,  # constant
    "no-baseline-entropy-constant": AGREES,
    "constant-length-normalization": AGREES,
    "constant-length-norms": DISAGREES,  # 2 against 1
    "std-normalization": DISAGREES,
    "std-gradient-norm": DISAGREES,  # without 2, with 1
    "on-policy-wins": DISAGREES,
    "many-updates-collapse": DISAGREES,
    "prompt-final": AGREES,
    "sft-initialization-hurts": DISAGREES,
    "filtered-sft": NO_DIFFERENCE,
    "kl-not-needed": AGREES,
    "lora-rank-1": AGREES,
    "one-step-behind": AGREES,
    "prompt": NOT_TESTED,  # by construction
    "zero-shot-r1-zero": NOT_TESTED,  # by construction
    "norm-warns-of-collapse": NOT_TESTED,  # no run collapsed
}


def by_claim(verdicts: list[Verdict]) -> dict[str, Verdict]:
    return {verdict.claim: verdict for verdict in verdicts}


def test_every_claim_is_judged_in_the_order_of_the_file(study: Study, write_study: Write) -> None:
    write_study()
    found = judge_claims(study)
    assert [verdict.claim for verdict in found] == [claim["id"] for claim in OF_MINI]
    assert {claim: by_claim(found)[claim].verdict for claim in EXPECTED} == EXPECTED
    for verdict, published in zip(found, OF_MINI, strict=True):
        assert verdict.reported == {source: str(text) for source, text in published["reported"].items()}
        assert verdict.reason and (bool(re.search(r"\d", verdict.measured)) or verdict.verdict == NOT_TESTED)


def test_planted_ability_is_by_construction_only_where_it_was_planted(study: Study, write_study: Write) -> None:
    write_study()
    planted = {verdict.claim for verdict in judge_claims(study) if verdict.by_construction}
    assert planted == {"zero-shot-r1-zero", "prompt"}
    found = by_claim(judge_claims(with_values(study, {"models.main.source": "hub"})))
    assert (found["zero-shot-r1-zero"].verdict, found["prompt"].verdict) == (AGREES, DISAGREES)


def test_what_short_runs_show_tests_no_claim_about_later_steps(study: Study, write_study: Write) -> None:
    write_study(steps=24)
    found = by_claim(judge_claims(study))
    assert (found["baseline-helps"].verdict, found["many-updates-collapse"].verdict) == (NOT_TESTED, NOT_TESTED)
    assert found["baseline-helps"].reason == "the claim is about step 48 and later, and the runs took 24 steps"
    assert found["baseline-helps"].measured  # the numbers stay
    assert (found["std-gradient-norm"].verdict, found["filtered-sft"].verdict) == (DISAGREES, NO_DIFFERENCE)


def test_runs_that_end_at_the_horizon_have_reached_it(study: Study, write_study: Write) -> None:
    write_study(steps=48)
    assert by_claim(judge_claims(study))["baseline-helps"].verdict != NOT_TESTED


def test_a_collapse_before_the_horizon_is_a_collapse(study: Study, write_study: Write) -> None:
    write_study(steps=24)
    for arm in [*study.experiments["grpo_off_policy_sweep_broad"].arms][-2:]:  # those of 16 updates and more
        shutil.rmtree(f"data/runs/grpo_off_policy_sweep_broad/{arm}")
        for seed in study.seeds:
            write(made_up(arm, 0.1, 0.7, 0.0, seed=seed, updates=16, steps=24), "grpo_off_policy_sweep_broad")
    assert by_claim(judge_claims(study))["many-updates-collapse"].verdict == AGREES


def test_preconditions(study: Study, write_study: Write) -> None:
    """A leader that learned nothing, and responses too short to collapse."""
    write_study()
    for seed in study.seeds:
        for arm in study.experiments["grpo_baselines"].arms:
            shutil.rmtree(f"data/runs/grpo_baselines/{arm}/{seed}")
            write(made_up(arm, 0.5, 0.5, seed=seed, lengths=(20, 10)), "grpo_baselines")
    found = by_claim(judge_claims(study))
    assert found["baseline-helps"].verdict == NOT_TESTED and "nothing was learned" in found["baseline-helps"].reason
    short = found["no-baseline-length-collapse"]
    assert short.verdict == NOT_TESTED and "50 tokens or more, and these start with 20.0" in short.reason


def test_claims_belong_to_a_task(study: Study, write_study: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims about MATH do not apply to another task, unless it stands for MATH."""
    write_study()
    monkeypatch.setattr(Arithmetic, "stands_for", "")
    found = judge_claims(study)
    assert {verdict.verdict for verdict in found} == {NOT_TESTED}
    assert "published for the task math" in found[0].reason


def test_an_experiment_with_one_learning_rate_tests_no_claim_about_rates(study: Study, write_study: Write) -> None:
    study = with_values(study, {"experiments.grpo_learning_rate.arms": {"3e-4": {"learning_rate": 3e-4}}})
    write_study()
    rates = [verdict for verdict in judge_claims(study) if verdict.experiment == "grpo_learning_rate"]
    assert {verdict.verdict for verdict in rates} == {NOT_TESTED}
    assert all("the study has 1" in verdict.reason for verdict in rates)


def test_the_number_of_claims_is_taken_into_account() -> None:
    """Of ten claims one has p = .03: of as many true ones so small a p comes in one study of four."""
    ps = [0.03, *[0.5] * 9]
    alone = [Verdict(f"c{i}", "e", "s", AGREES if p < 0.05 else CANNOT_TELL, "it is above", p=p) for i, p in enumerate(ps)]
    first, *_ = adjusted(alone)
    assert (first.verdict, first.p_adjusted) == (CANNOT_TELL, pytest.approx(0.3)) and "alone it would be agrees" in first.reason
    assert adjusted([replace(alone[0], p=0.004), *alone[1:]])[0].verdict == AGREES  # .004 x 10
    many = [replace(verdict, verdict=AGREES, p=0.03) for verdict in alone]
    assert {verdict.verdict for verdict in adjusted(many)} == {AGREES}
    assert adjusted([replace(alone[0], verdict=DISAGREES, p=None)])[0].verdict == DISAGREES
    untested = replace(alone[1], claim="untested", verdict=NOT_TESTED)  # with its numbers, but none of those that are decided
    assert adjusted([replace(alone[0], p=0.0048), *alone[1:], untested])[0].verdict == AGREES  # .0048 x 10, not x 11


@pytest.mark.parametrize("gone", [["grpo_async_offpolicy"], ["sft_experiment"]])
def test_claims_about_what_a_study_leaves_out_say_so(study: Study, write_study: Write, gone: list[str]) -> None:
    """These experiments have no results. A claim may also compare with one of them."""
    write_study()
    for name in gone:
        shutil.rmtree(f"data/runs/{name}")
    study = with_values(study, {f"experiments.{name}.arms": {} for name in gone})
    found = judge_claims(study)
    tests = {claim["id"]: claim for claim in PUBLISHED["claims"]}
    about = [v for v in found if {v.experiment, *(p.get("other") for p in tests[v.claim]["test"].values())} & set(gone)]
    assert about and all(v.verdict == NOT_TESTED and v.reason == f"the study leaves {gone[0]} out" for v in about)
    assert {v.claim for v in shown(found, study)} == {v.claim for v in found if v.experiment not in gone}


def test_a_run_that_is_missing_is_named_with_its_stage(study: Study, write_study: Write) -> None:
    write_study()
    Path("data/runs/grpo_baselines/no_baseline/0/outcomes.jsonl").unlink()
    with pytest.raises(UserError, match="dvc repro train@grpo_baselines-no_baseline"):
        judge_claims(study)


def test_the_report_holds_every_verdict_whole(study: Study, write_study: Write) -> None:
    write_study()
    write_claims(study)
    assert read_verdicts() == judge_claims(study)
    report = json.loads(Path("reports/claims.json").read_text())
    assert "gspo-2025" in PUBLISHED["sources"]  # of an experiment that is another study's
    assert set(report["sources"]) == {source for claim in OF_MINI for source in claim["reported"]}
    lines = claims_table(read_verdicts()).splitlines()
    assert len(lines) == 2 + len(OF_MINI)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in lines)
    assert "| **by construction**<br>by construction: " in lines[2]
    row = next(line for line in lines if "ends above no_baseline" in line)
    assert "| snider-2025: yes<br>garg-2026: 0.608 against 0.232 (late) |" in row and "**disagrees**" in row


# ---------------------------------------------------------------------------------------------------------- claims.yaml

BY_PLACE = {"best_inside_range", "lags", "collapses", "descends", "method_above", "warns"}  # kinds that name no arm


def arms_of(parameters: dict[str, Any]) -> set[str]:
    values = [parameters[key] for key in ("better", "worse", "smaller", "larger", "arm", "unlike") if key in parameters]
    return {arm for value in values for arm in ([value] if isinstance(value, str) else value)}


@pytest.mark.parametrize("name", ["mini", "math-2xh100", "objectives"])
def test_claims_have_a_test_whose_arms_the_studies_have(name: str) -> None:
    study = study_named(name)
    for claim in PUBLISHED["claims"]:
        ((kind, parameters),) = claim["test"].items()
        assert claim.get("requires", {}).keys() <= {"learns", "arms", "response_tokens"}
        assert claim["experiment"] in {*EXPERIMENTS, "math_baseline", "grpo_objectives"}
        judges = inspect.signature(getattr(verdicts, kind))
        assert judges.return_annotation == "Verdict" and judges.bind(None, **parameters)
        if claim["experiment"] in study.made:
            assert arms_of(parameters) <= set(study.experiments[claim["experiment"]].arms), claim["id"]
            assert bool(arms_of(parameters)) == (kind not in BY_PLACE)


@pytest.mark.parametrize("name", ["mini", "math-2xh100"])
def test_arms_stand_in_the_order_that_claims_go_by(name: str) -> None:
    """Learning rates rise; more SFT comes later, and the base model first."""
    study = study_named(name)
    rates = [arm["learning_rate"] for arm in study.experiments["grpo_learning_rate"].arms.values()]
    assert rates == sorted(rates) and len(rates) >= 3
    arms = study.experiments["grpo_sft_initialization"].arms
    claim = next(claim for claim in PUBLISHED["claims"] if claim["id"] == "sft-initialization-hurts")
    starts = [arms[arm].get("start_from") for arm in claim["test"]["descends"]["arms"] if arm in arms]
    checkpoints = [start.split("/")[-1] for start in starts[1:]]
    steps = [study.sft.n_sft_steps if name == "last" else int(name.removeprefix("step-")) for name in checkpoints]
    assert starts[0] is None and steps == sorted(set(steps)) and len(steps) >= 2


def test_every_source_that_a_claim_names_is_listed() -> None:
    assert {source for claim in PUBLISHED["claims"] for source in claim["reported"]} == set(PUBLISHED["sources"])
    assert len({claim["id"] for claim in PUBLISHED["claims"]}) == len(PUBLISHED["claims"]) >= 26
