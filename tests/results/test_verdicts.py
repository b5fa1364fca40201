"""Verdicts and intervals: in words and by hand; those of random studies equal to the other code of recompute.py."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_parts
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from report_parts import solved, store, store_general, study_of
from scipy import stats
from study_parts import with_values

from grpo.commands import recompute
from grpo.commands.verify import _unlike_record
from grpo.common.files import write_json
from grpo.reporting.record import record_of
from grpo.results.claims import judge_claims
from grpo.results.intervals import difference_of, interval_of_mean, mean_of, mean_of_any, mean_over_problems, wilson_interval
from grpo.results.outcomes_file import write_outcomes
from grpo.results.runs import Arm, ExperimentRuns, NotMeasured, Run, by_arm, identical
from grpo.results.verdicts import (
    DECIDED,
    DOES_NOT_HOLD,
    HOLDS,
    NOT_TESTED,
    OPEN,
    SAME,
    VERDICTS,
    Verdict,
    comparison,
    decide,
    decide_by,
    judge,
    level,
)
from grpo.study import paths
from grpo.study.claims import AnyClaim, own_claims
from grpo.study.schema import Study

NORM = "gradient_norm"


def ending(arm: str, *finals: float, before: float = 0.1, steps: int = 64) -> list[Run]:
    """Runs of an arm by their last evaluation, one a seed, and the one before it."""
    outcomes = [[solved(reward, 200) for reward in (0.1, before, final)] for final in finals]
    return [
        report_parts.run(arm, of, seed, "made_up", every=steps // 2, steps=steps, gradient_norm=1.0)
        for seed, of in enumerate(outcomes)
    ]


def verdict(arms: Sequence[list[Run]], **claim: Any) -> Verdict:
    """Judge the claim that the first arm beats the second."""
    evidence = ExperimentRuns("made_up", {runs[0].arm: runs for runs in arms})
    about = {"experiment": "made_up", "arm": "a", "beats": "b", "by": 0.05} | claim
    parsed: AnyClaim = TypeAdapter(AnyClaim).validate_python(about)
    return judge(parsed, *(evidence.arm(name) for _, name in parsed.arms()))


@pytest.mark.parametrize(
    ("low", "high", "expected", "word"),
    [
        (0.06, 0.2, HOLDS, "higher"),
        (0.04, 0.2, OPEN, "open"),  # above zero, but not by 0.05
        (-0.04, 0.04, SAME, "same"),
        (0.01, 0.04, SAME, "same"),  # above zero, and too little to count
        (-0.06, 0.04, DOES_NOT_HOLD, "open"),  # not above by 0.05, whatever else
        (-0.2, -0.06, DOES_NOT_HOLD, "lower"),
        (-0.2, 0.2, OPEN, "open"),
        (0.05, 0.2, OPEN, "open"),  # an end on a margin lies on no side of it
        (-0.2, 0.05, OPEN, "open"),
        (-0.05, 0.04, DOES_NOT_HOLD, "open"),
        (-0.2, -0.05, DOES_NOT_HOLD, "open"),
    ],
)
def test_an_interval_decides_by_which_side_of_the_margin_it_lies_on(low: float, high: float, expected: str, word: str) -> None:
    interval = {"value": (low + high) / 2, "low": low, "high": high}
    assert (decide(interval, 0.05, -0.05).verdict, comparison(interval)) == (expected, word)


def test_a_verdict_in_words() -> None:
    """Of five runs two fell from .9 to zero, so that their mean is .54; then an arm that is ahead, and loses its lead."""
    fallen = [replace(ending("a", 0.0 if seed < 2 else 0.9, before=0.9)[0], seed=seed) for seed in range(5)]
    found = verdict([fallen, ending("b", *[0.5] * 5)])
    assert (found.verdict, found.quantity, found.reason) == (OPEN, "difference", "0.05 lies in the interval")
    assert found.measured.startswith("a 0.540 (2 of 5 runs collapsed), b 0.500; difference 0.040 (")
    found = verdict([ending("a", *[0.7] * 3, before=0.7), ending("b", *[0.5] * 3, before=0.3)])
    assert found.verdict == NOT_TESTED and "still moving: between the last two evaluations" in found.reason
    assert verdict([ending("a", *[0.7] * 3, before=0.7), ending("b", *[0.5] * 3, before=0.3)], at="last_step").verdict == HOLDS


def test_a_run_that_was_evaluated_once_does_not_move() -> None:
    """One arm goes from .1 to .3, and one from .5 to .4: the first ends .1 lower."""
    arms = [
        [report_parts.run(arm, [solved(reward, 200) for reward in of], seed, "made_up") for seed in range(3)]
        for arm, of in (("a", (0.1, 0.3)), ("b", (0.5, 0.4)))
    ]
    assert verdict(arms).verdict == DOES_NOT_HOLD


def test_arms_of_one_name_in_two_experiments_are_paired_by_the_seeds_that_both_have() -> None:
    """Their numbers of steps may differ; nothing has collapsed at the start."""
    ends = ending("a", 0.7, 0.8, 0.1, before=0.7), ending("a", 0.5, 0.4, before=0.7, steps=32)
    assert not identical(ends[0], ends[0][:2])
    first, second = (Arm(name, "a", of, [of[-1].name]) for name, of in zip("ef", ends, strict=True))
    claim: AnyClaim = TypeAdapter(AnyClaim).validate_python({"experiment": "e", "arm": "a", "not_below": "f/a", "by": 0.05})
    found = judge(claim.model_copy(update={"at": "last_step"}), first, second)
    assert found.pairs is not None and found.pairs.seeds == [0, 1]
    assert found.interval is not None and found.interval["value"] == pytest.approx(0.3)
    assert found.measured.startswith("e/a 0.533 (1 of 3 runs collapsed), f/a 0.450 (1 of 2 runs collapsed); difference 0.300")
    assert "collapsed" not in judge(claim.model_copy(update={"at": "start"}), first, second).measured


def test_a_ratio_to_nothing_and_one_beyond_all_numbers_are_finite() -> None:
    """A level of zero counts as 1e-8; the end of an interval is at most exp(700)."""
    arms = [
        [replace(one, history=one.history.assign(m=m)) for one in ending(arm, 0.5, 0.6)] for arm, m in (("a", 1.0), ("b", 0.0))
    ]
    found = verdict(arms, metric="m", by=1.25, at="late")
    assert found.interval == pytest.approx(dict.fromkeys(("value", "low", "high"), 1e8)) and found.pairs is not None
    assert " times that of b" in found.measured
    claim: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 1.25, "metric": "m", "at": "late"})
    wide = decide_by(claim, [replace(found.pairs, differences=np.array([[600.0], [-600.0]]))])
    assert wide.verdict == OPEN and wide.interval is not None and wide.interval["high"] == math.exp(700) == wide.could_see


@pytest.mark.parametrize(
    ("a", "b", "claim", "message"),
    [
        (ending("a", 0.5, 0.5), ending("b", 0.5, 0.5), {}, "identical results"),
        (ending("a", 0.5, 0.5), ending("a", 0.5, 0.5), {"beats": "a"}, "is both arms"),
        (ending("a", 0.5, 0.6), ending("b", 0.5, 0.5, steps=32), {}, "different numbers of steps"),
        (ending("a", 0.6), ending("b", 0.5), {"metric": NORM, "by": 1.25, "at": "late"}, "two or more"),  # seeds
    ],
)
def test_what_decides_nothing(a: list[Run], b: list[Run], claim: dict[str, Any], message: str) -> None:
    with pytest.raises(NotMeasured, match=message):
        verdict([a, b], **claim)


def test_a_level_needs_two_values() -> None:
    (one,) = ending("a", 0.5)
    with pytest.raises(NotMeasured, match="no such_metric"):
        level(one, "such_metric", "end")
    with pytest.raises(NotMeasured, match="fewer than two values"):
        level(one, NORM, "end", last=1)
    twice = replace(one, history=one.history[:4].assign(step=[1, 1, 2, 2], m=[1.0, 3.0, 5.0, 9.0]))  # two updates a step
    found = {at: level(twice, "m", at) for at in ("start", "throughout", "end", "peak")}
    assert found == {"start": 2.0, "throughout": 4.5, "end": 7.0, "peak": 9.0} and level(one, NORM, "end", last=2) == 1.0


def test_kept_checkpoints_are_compared_by_the_last_one(workdir: Path) -> None:
    """Rewards on the old task by their difference, KL by its ratio; the arms took different numbers of steps."""
    arms = [ending("a", 0.8, 0.7, steps=8), ending("b", 0.8, 0.7, steps=64)]
    kept = {
        arm: [
            {"step": step, "by_run": {f"made_up/{arm}/{seed}": {"old_task_reward": end * share, "forward_per_token": 1 / end}}}
            for seed, end in enumerate(ends)
            for step, share in ((4, 0.1), (40, 1.0))
        ]
        for arm, ends in (("a", (0.9, 0.8)), ("b", (0.5, 0.45)))
    }
    write_json(paths.KL_REPORTS / "made_up.json", {"arms": kept})
    found = verdict(arms, metric="val/old_task_reward")
    half = stats.t.ppf(0.975, 1) * 0.025  # of the differences 0.4 and 0.35
    ends = {"value": 0.375, "low": 0.375 - half, "high": 0.375 + half}
    assert found.quantity == "difference" and found.interval == pytest.approx(ends)
    nearer = {"arm": "b", "beats": "a", "metric": "kl/forward_per_token", "by": 1.25}
    found = verdict(arms, **nearer)
    assert found.quantity == "ratio" and found.interval is not None
    assert found.interval["value"] == pytest.approx(math.sqrt(0.9 / 0.5 * 0.8 / 0.45))
    with pytest.raises(ValidationError, match="leave `at` out"):
        verdict(arms, **nearer, at="late")
    with pytest.raises(NotMeasured, match="no kl/per_token"):
        verdict(arms, **nearer | {"metric": "kl/per_token"})
    for lacking in (ending("c", 0.8, 0.6), [replace(one, seed=one.seed + 5) for one in arms[0]]):  # an arm, and runs
        with pytest.raises(NotMeasured, match="no val/old_task_reward"):
            verdict([lacking, arms[1]], arm=lacking[0].arm, metric="val/old_task_reward")


# ------------------------------------------------------------------------------------------------------- random studies


SWEEP, LORA = "grpo_learning_rate", "grpo_lora"
ARMS = {SWEEP: {"low": 0.1, "a-rate_half": 0.5, "a-rate_same": 1, "a-rate_2": 2, "b": 1}, LORA: {"x": 1, "y": 1}}
SHARED, LAST, STEPS = 40, 60, 48  # problems of all evaluations, and of the last one
PAIRS = [("b", "low"), ("leader", "first"), ("last", "a"), (f"{LORA}/x", f"{SWEEP}/b"), (f"{LORA}/x", f"{LORA}/y")]
AT = ("start", "throughout", "late", "end", "peak")
REQUIRES = [{}, {"learns": True}, {"best_rate_inside": ["a"]}, {"response_tokens": 20}, {"response_tokens": 21}]


def claims() -> list[AnyClaim]:
    """Claims of both kinds about each pair of arms: rewards at each place by two margins, and levels of metrics."""
    found: list[dict[str, Any]] = []
    for (arm, other), by in product(PAIRS, (0.02, 0.2)):
        found += [{"arm": arm, "beats": other, "by": by, "at": at} for at in ("start", "end", "last_step")]
        found += [{"arm": arm, "not_below": other, "by": by}]
    for (arm, other), at in product([PAIRS[3], *PAIRS[:3]], AT):
        found += [{"arm": arm, "beats": other, "by": 1.1, "metric": "gradient_norm", "at": at}]
    found += [{"arm": "b", "beats": "low", "by": 0.02, "requires": one} for one in REQUIRES]
    found += [{"arm": "b", "beats": "low", "by": 1.05, "metric": "val/response_length", "at": "end", "horizon": STEPS}]
    return TypeAdapter(list[AnyClaim]).validate_python([{"experiment": SWEEP} | one for one in found])


def random_run(rng: np.random.Generator, experiment: str, arm: str, seed: int, way: tuple[float, float, int]) -> Run:
    """A run of so many steps that rises by so much at last, to about a level; some are stopped, fall, or are not finite."""
    level, rise, steps = way
    fate = rng.choice(["ends", "stopped", "falls", "falls between", "not finite"], p=[0.8, 0.05, 0.05, 0.05, 0.05])
    shares = [0.1, level - rise, 0.02 if fate.startswith("falls") else level]
    if fate == "falls between":
        shares[1] = 0.1
    chances = np.clip(np.array(shares)[:, None] + rng.normal(0, 0.04) + rng.normal(0, 0.15, LAST), 0, 1)
    scores = (rng.random((3, LAST)) < chances * bool(level)).astype(float)
    steps = steps // 2 if fate == "stopped" else steps
    history: dict[str, Any] = {"gradient_norm": rng.lognormal(level, 0.5, steps), "train/answer_reward": 0.1}
    if fate == "not finite":
        history["gradient_norm"][-1] = np.nan
    if fate == "falls between":
        history["train/answer_reward"] = [0.1, *[0.9] * (steps - 1)]
    made = report_parts.run(
        arm, list(scores[:, :SHARED]), seed, experiment, every=steps // 2, steps=steps,
        diverged=steps if fate == "stopped" else None,
        values={"learning_rate": ARMS[experiment][arm], "rollout_batch_size": 64, "group_size": 8},
        validation={"val/response_length": [20.0, 20.0, rng.uniform(18, 26)]}, **history,
    )  # fmt: skip
    return replace(made, last=scores[-1])


@pytest.mark.parametrize("part", range(3))
def test_results_are_those_of_the_program_that_shares_none_of_their_code(part: int, workdir: Path, mini_study: Study) -> None:
    """Three studies of one to five seeds, some with a pinned winner, a shorter arm, and problems of their own that select."""
    verdicts: Counter[str] = Counter()
    for number in range(3 * part, 3 * part + 3):
        store_general()
        rng = np.random.default_rng(number)
        seeds, selecting = [*range((1, 3, 5)[number % 3])], int(rng.choice([0, 20]))
        study = study_of(mini_study, **{name: {arm: {} for arm in arms} for name, arms in ARMS.items()})
        pinned = {SWEEP: "a-rate_2"} if number % 4 == 3 else {}
        study = with_values(study, {"seeds": seeds, "selection.pinned": pinned})
        study = with_values(study, {"claims": own_claims(claims(), study.experiments)})
        evidence = {}
        for name, arms in ARMS.items():
            levels = rng.choice([0.1, 0.15] if number % 4 == 2 else [0.0, 0.3, 0.6, 0.65, 0.7], len(arms))
            if name == LORA and number % 4 == 0:
                levels[:] = 0.0  # two arms without any reward
            short = {("low", 1): STEPS // 2, ("x", 2): STEPS // 3}  # an arm of some studies takes fewer steps
            ways = {
                arm: (level, rng.choice([0.0, 0.1]), short.get((arm, number % 4), STEPS))
                for arm, level in zip(arms, levels, strict=True)
            }
            runs = [random_run(rng, name, arm, seed, ways[arm]) for arm in arms for seed in seeds]
            runs = [replace(one, selection_problems=selecting) for one in runs]
            for one in runs:
                store(one)
                for at in AT if not one.seed else ():
                    other = recompute._level([one.history, one.validation], NORM, at, str(STEPS))
                    assert level(one, NORM, at, STEPS) == pytest.approx(other)
            evidence[name] = ExperimentRuns(name, by_arm(runs))
        write_outcomes(study, evidence)
        judged = judge_claims(study, evidence)
        record = record_of(study, evidence, judged)
        shutil.rmtree(paths.BASELINE)  # made-up rows that do not give the made-up accuracy
        rows = recompute.rows_of_file(paths.OUTCOMES)
        experiments = {
            name: recompute.Experiment(
                {arm: [recompute.Run(rows[one.name]) for one in runs] for arm, runs in of.arms.items()}, pinned.get(name)
            )
            for name, of in evidence.items()
        }
        assert [*_unlike_record(study, record, experiments)] == []
        rises = {arm: np.array([one.rise for one in of]) for made in experiments.values() for arm, of in made.arms.items()}
        for pairs in (one.pairs for one in judged if one.pairs and one.pairs.moved.size):
            assert pairs.moved == pytest.approx(rises[pairs.arm] - rises[pairs.other])
        verdicts.update(claim["verdict"] for claim in record["claims"] if claim["own"])
    assert {*DECIDED} <= verdicts.keys() == {*VERDICTS}


# -------------------------------------------------------------------------------------------------------------------- intervals


def answers(generator: np.random.Generator, rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right (1) or wrong (0), each with its own chance."""
    return (generator.random(rates.shape) < rates).astype(float)


def test_of_numbers_of_any_size_nothing_is_added_or_cut() -> None:
    rise = mean_of_any(np.tile(np.array([[1.09], [1.1], [1.11]]), 50))
    assert rise.se == pytest.approx(0.01 / math.sqrt(3)) and rise.df == 2 and rise.high > rise.value > 1


def test_where_only_problems_vary_it_is_the_paired_t_interval() -> None:
    generator = np.random.default_rng(3)
    rates = generator.random(300)
    first, second = answers(generator, rates), answers(generator, np.minimum(1, rates + 0.08))
    found, truth = difference_of(first, second, fixed=True), stats.ttest_rel(second, first)
    expected = truth.confidence_interval()
    assert (found.low, found.high) == pytest.approx(expected)
    three = difference_of(np.tile(first, (3, 1)), np.tile(second, (3, 1)))
    assert (three.low, three.high) == pytest.approx(expected)


@pytest.mark.parametrize(("runs", "sds"), [(3, (0.05, 0.05)), (3, (0.02, 0.02)), (3, (0.02, 0.1)), (5, (0.1, 0.1))])
def test_the_interval_covers_the_true_difference_as_often_as_it_says(runs: int, sds: tuple[float, float]) -> None:
    """Runs and problems drawn anew each time; benchmarks/coverage.py has the whole table."""
    generator, hits = np.random.default_rng(9), 0
    for _ in range(300):
        problems = generator.uniform(0.35, 0.65, size=256)
        arms = [answers(generator, np.clip(problems + generator.normal(0, sd, (runs, 1)), 0, 1)) for sd in sds]
        found = difference_of(*arms)
        hits += found.low <= 0 <= found.high
    assert hits / 300 >= 0.92


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611)],  # Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_intervals_of_another_level_and_of_nothing() -> None:
    # p = 1/2, n = 4, z = 1: center 1/2, half width sqrt(1/16 + 1/64) / 1.25 = .223607
    assert wilson_interval(2, 4, level=0.6826894921370859) == pytest.approx((0.276393, 0.723607), abs=1e-6)
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, 0)


def test_mean_over_problems_by_hand() -> None:
    three = mean_over_problems([0.2, 0.4, 0.6])  # a standard deviation of .2, and t with two degrees of freedom
    assert (three["low"], three["high"]) == (0.0, pytest.approx(0.4 + 4.3027 * 0.2 / 3**0.5, rel=1e-4))
    assert mean_over_problems([1.0, 1.0]) == {"value": 1.0, "low": 1.0, "high": 1.0, "problems": 2}
    with pytest.raises(ValueError, match="at least two problems"):
        mean_over_problems([1.0])


def test_intervals_of_rewards_end_where_rewards_do() -> None:
    """One run a table: half the width is 2.776 of .0636, or of .045."""
    none, all_right = np.zeros((1, 50)), np.ones((1, 50))
    ends = [difference_of(none, all_right), difference_of(all_right, none), mean_of(all_right), mean_of(none)]
    assert [one.high for one in ends[::2]] == [1.0, 1.0] and [one.low for one in ends[1::2]] == [-1.0, 0.0]


def test_a_sum_that_is_no_whole_number_lies_between_its_neighbours() -> None:
    below, between, above = (wilson_interval(total, 10) for total in (4, 4.5, 5))
    assert between == (below[0], above[1])
    assert wilson_interval(0.1 * 3 + 2.7, 10) == wilson_interval(3, 10)  # 3.0000000000000004


def test_an_interval_of_a_mean_is_wilsons_for_shares_and_normal_for_other_numbers() -> None:
    assert interval_of_mean([1.0, 0.0, 0.0, 1.0]) == wilson_interval(2, 4)
    assert interval_of_mean([0.0, 2.0]) == pytest.approx((1 - 1.95996 / 2**0.5, 1 + 1.95996 / 2**0.5), abs=1e-4)
    low, high = interval_of_mean([-3.0, -1.0])  # a standard deviation of 1, and 1.96 standard errors
    assert (low, high) == (pytest.approx(-2 - 1.95996 / 2**0.5, abs=1e-4), pytest.approx(-2 + 1.95996 / 2**0.5, abs=1e-4))
