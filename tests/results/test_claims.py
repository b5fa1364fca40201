"""Verdicts on published claims, from made-up runs whose verdict can be found by hand."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from study_parts import EXPERIMENTS

from grpo.common.errors import UserError
from grpo.results import claims, verdicts
from grpo.results.claims import claims_table, judge_claims, write_claims
from grpo.results.evidence import Evidence, NotMeasured
from grpo.results.runs import Run
from grpo.results.verdicts import KINDS, KL
from grpo.study.schema import Study, load_study, read_yaml

REPOSITORY = Path(__file__).parents[2]
PUBLISHED = read_yaml(REPOSITORY / "grpo" / "results" / "claims.yaml")
IN_THIS_VERSION = [c for c in PUBLISHED["claims"] if c["experiment"] in {*EXPERIMENTS, "math_baseline"}]
AGREES, DISAGREES, CANNOT_TELL, NOT_MEASURED = "agrees", "disagrees", "cannot tell", "not measured"
PROBLEMS = 100


def solved(n: int) -> NDArray[np.float64]:
    """The first ``n`` of 100 problems are solved, so that whoever solves more solves all that others solve."""
    return (np.arange(PROBLEMS) < n).astype(float)


def each(score: float) -> NDArray[np.float64]:
    """The same score on every problem: the interval over problems is one point."""
    return np.full(PROBLEMS, score)


def made_up(
    arm: str,
    *evaluations: NDArray[np.float64],
    seed: int = 0,
    updates: int = 1,
    diverged: int | None = None,
    norms: Sequence[float] | None = None,
    kl: Sequence[float] | None = None,
    lengths: Sequence[float] | None = None,
) -> Run:
    """A run.

    Args:
        evaluations: scores of the problems, the untrained evaluation first.
        norms: gradient norm of each optimizer step; that of one GRPO step, if not given.
    """
    norms = [1.0] * updates if norms is None else norms
    step = np.repeat(np.arange(1, len(norms) // updates + 1), updates)
    columns: dict[str, Any] = {"step": step, "update": np.arange(1, len(norms) + 1), "gradient_norm": np.array(norms, float)}
    if kl is not None:
        columns[KL] = np.array(kl, float)
    validation = pd.DataFrame(
        {
            "step": range(len(evaluations)),
            "val/answer_reward": [scores.mean() for scores in evaluations],
            "val/response_length": [100.0] * len(evaluations) if lengths is None else lengths,
        }
    )
    return Run(
        experiment="made_up",
        arm=arm,
        seed=seed,
        config={"updates_per_rollout_batch": updates},
        metrics={"diverged_step": diverged, "diverged_reason": ""},
        history=pd.DataFrame(columns),
        validation=validation,
        outcomes=np.stack(evaluations),
    )


def ending(arm: str, *finals: NDArray[np.float64], **options: Any) -> list[Run]:
    """Runs of an arm by their last evaluation."""
    return [made_up(arm, solved(10), final, seed=seed, **options) for seed, final in enumerate(finals)]


def evidence(*arms: list[Run], last_k: int = 1) -> Evidence:
    return Evidence({runs[0].arm: runs for runs in arms}, last_k)


def verdict(kind: str, parameters: dict[str, Any], found: Evidence) -> str:
    return KINDS[kind](parameters, found)[1]


# ----------------------------------------------------------------------------------------------------------- ends_above

A_OVER_B = {"better": "a", "worse": "b"}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (solved(60), solved(30), AGREES),  # 0.3, standard error sqrt(0.3 x 0.7 / 100) = 0.046
        (solved(30), solved(60), DISAGREES),
        (solved(52), solved(50), CANNOT_TELL),  # no resample is below 0, but 0.98^100 = 13% hold neither of the two problems
        (solved(50), solved(52), CANNOT_TELL),
        (solved(60), solved(50), AGREES),  # 0.9^100: none
        (solved(50), solved(50)[::-1], CANNOT_TELL),  # as many, but other ones
        (each(0.5), each(0.25), AGREES),
        (each(0.25), each(0.5), DISAGREES),
    ],
)
def test_ends_above(a: NDArray[np.float64], b: NDArray[np.float64], expected: str) -> None:
    assert verdict("ends_above", A_OVER_B, evidence(ending("a", a), ending("b", b))) == expected


@pytest.mark.parametrize("kind", ["ends_above", "smaller_gradient_norms"])
def test_arms_that_trained_alike_tell_nothing(kind: str) -> None:
    """As with and without division by the standard deviation, where the loss takes raw rewards."""
    roles = dict(zip({"ends_above": ("better", "worse")}.get(kind, ("smaller", "larger")), "ab", strict=True))
    alike = [ending(arm, solved(50), solved(60), norms=[1.0] * 40) for arm in "ab"]
    with pytest.raises(NotMeasured, match="a and b trained alike to the last number"):
        verdict(kind, roles, evidence(*alike))
    alike[1][1].history.loc[39, "gradient_norm"] = 1.001
    assert verdict(kind, roles, evidence(*alike)) == CANNOT_TELL


def test_ends_above_shows_means_and_interval() -> None:
    measured, _, _ = verdicts.ends_above(A_OVER_B, evidence(ending("a", solved(60)), ending("b", solved(30))))
    found = re.fullmatch(r"a 0\.600, b 0\.300; difference 0\.300 \((.*) to (.*)\)", measured)
    assert found is not None
    assert [float(end) for end in found.groups()] == pytest.approx([0.3 - 1.96 * 0.0458, 0.3 + 1.96 * 0.0458], abs=0.011)


def test_ends_above_counts_the_last_evaluations_and_never_the_untrained_one() -> None:
    a = [made_up("a", each(1.0), solved(80), solved(20), solved(20))]
    b = [made_up("b", each(0.0), solved(40), solved(40), solved(40))]
    assert verdict("ends_above", A_OVER_B, evidence(a, b, last_k=1)) == DISAGREES  # .2 against .4
    assert verdict("ends_above", A_OVER_B, evidence(a, b, last_k=2)) == DISAGREES
    # (.8 + .2 + .2) / 3 = .4 on average; were the untrained evaluation counted, .55 against .3
    assert verdict("ends_above", A_OVER_B, evidence(a, b, last_k=3)) == CANNOT_TELL
    assert verdict("ends_above", A_OVER_B, evidence(a, b, last_k=9)) == CANNOT_TELL


def test_runs_that_differ_much_cannot_tell_what_their_problems_alone_would() -> None:
    b = ending("b", solved(50), solved(50), solved(50))
    apart = ending("a", solved(90), solved(60), solved(30))  # mean 60, standard error 30 / sqrt 3 = 17
    alike = ending("a", solved(61), solved(60), solved(59))
    assert verdict("ends_above", A_OVER_B, evidence(apart, b)) == CANNOT_TELL
    assert verdict("ends_above", A_OVER_B, evidence(alike, b)) == AGREES
    # The same gain of 0.1 with no spread between runs: 10 problems of 100 more, standard error 0.03.
    assert verdict("ends_above", A_OVER_B, evidence(ending("a", solved(60)), b[:1])) == AGREES


def test_diverged_runs_are_named() -> None:
    b = [made_up("b", solved(10), solved(3), diverged=10), made_up("b", solved(10), solved(30), seed=1)]
    measured, _, _ = verdicts.ends_above(A_OVER_B, evidence(ending("a", solved(60), solved(60)), b))
    assert measured.startswith("a 0.600, b 0.165 (1 of 2 runs diverged); ")


def test_a_missing_arm_is_named() -> None:
    with pytest.raises(NotMeasured, match=r"^the study has no arm b$"):
        verdicts.ends_above(A_OVER_B, evidence(ending("a", solved(60))))


# ------------------------------------------------------------------------------------------------------------ not_below


@pytest.mark.parametrize(
    ("a", "b", "margin", "expected"),
    [
        (each(0.25), each(0.5), 0.25, CANNOT_TELL),  # the interval is the point -0.25, and lies on the margin
        (each(0.25), each(0.5), 0.26, AGREES),
        (each(0.25), each(0.5), 0.24, DISAGREES),
        (each(0.5), each(0.25), 0.02, AGREES),
        (solved(50), solved(50), 0.02, AGREES),
        (solved(45), solved(50), 0.02, CANNOT_TELL),  # -0.05, from -0.09 to -0.01
        (solved(20), solved(50), 0.02, DISAGREES),
    ],
)
def test_not_below(a: NDArray[np.float64], b: NDArray[np.float64], margin: float, expected: str) -> None:
    found = evidence(ending("a", a), ending("b", b))
    assert verdict("not_below", {**A_OVER_B, "margin": margin}, found) == expected
    assert verdict("not_below", {"better": "a", "worse": ["b"], "margin": margin}, found) == expected


@pytest.mark.parametrize("worse", [["b", "c"], ["c", "b"]])
def test_not_below_is_held_against_the_best_of_several_arms(worse: list[str]) -> None:
    found = evidence(ending("a", solved(40)), ending("b", solved(10)), ending("c", solved(70)))
    measured, told, _ = verdicts.not_below({"better": "a", "worse": worse, "margin": 0.02}, found)
    assert told == DISAGREES
    assert measured.startswith("a 0.400, c 0.700; difference -0.300 (")
    assert measured.endswith("margin 0.02")


def test_not_below_with_runs_that_differ_much() -> None:
    b = ending("b", solved(50), solved(50), solved(50))
    parameters = {**A_OVER_B, "margin": 0.02}
    assert verdict("not_below", parameters, evidence(ending("a", solved(90), solved(60), solved(30)), b)) == CANNOT_TELL
    assert verdict("not_below", parameters, evidence(ending("a", solved(60), solved(60), solved(60)), b)) == AGREES


def test_not_below_is_about_as_many_steps() -> None:
    """At least as good per step cannot be told from runs of different lengths; one that diverged is shorter for a reason."""
    parameters = {**A_OVER_B, "margin": 0.02}
    longer = [made_up("a", solved(10), solved(20), solved(60))]
    with pytest.raises(NotMeasured, match=r"^the runs took different numbers of steps: a \[2\], b \[1\]$"):
        verdicts.not_below(parameters, evidence(longer, ending("b", solved(50))))
    assert verdict("not_below", parameters, evidence(longer, ending("b", solved(5), diverged=1))) == AGREES


def test_not_below_needs_every_arm() -> None:
    with pytest.raises(NotMeasured, match="no arm c"):
        verdicts.not_below(
            {"better": "a", "worse": ["b", "c"], "margin": 0.0}, evidence(ending("a", each(1)), ending("b", each(1)))
        )


# --------------------------------------------------------------------------------------------------------- winner_above


@pytest.mark.parametrize(
    ("won", "other", "expected"),
    [
        (solved(60), solved(30), AGREES),
        (solved(30), solved(60), DISAGREES),
        (solved(52), solved(50), CANNOT_TELL),
        (each(0.5), each(0.5), CANNOT_TELL),
        (each(0.5), each(0.25), AGREES),
        (each(0.25), each(0.5), DISAGREES),
    ],
)
def test_winner_above_is_about_the_winners(won: NDArray[np.float64], other: NDArray[np.float64], expected: str) -> None:
    """Of both experiments: an arm that did not win, as good as can be, says nothing."""
    theirs = evidence(ending("b", other), ending("pinned_away", each(1.0)))
    found = evidence(ending("pinned_away", each(1.0)), ending("a", won))
    found = replace(found, winner="a", other=replace(theirs, winner="b"))
    measured, told, _ = verdicts.winner_above({"other": "another"}, found)
    assert told == expected
    difference = won.mean() - other.mean()
    assert measured.startswith(f"a {won.mean():.3f}; another: b {other.mean():.3f}; difference {difference:.3f} (")


def test_winner_above_counts_each_experiment_by_its_own_last_evaluations() -> None:
    ours, theirs = ([made_up(arm, each(0.5), each(0.25), each(0.75))] for arm in ("a", "b"))
    found = replace(evidence(ours, last_k=1), winner="a", other=replace(evidence(theirs, last_k=2), winner="b"))
    measured, told, _ = verdicts.winner_above({"other": "another"}, found)
    assert (measured, told) == ("a 0.750; another: b 0.500; difference 0.250 (0.250 to 0.250)", AGREES)


# --------------------------------------------------------------------------------------------------------- starts_above


@pytest.mark.parametrize(
    ("a", "b", "margin", "expected"),
    [
        (each(0.5), each(0.25), 0.25, CANNOT_TELL),
        (each(0.5), each(0.25), 0.24, AGREES),
        (each(0.5), each(0.25), 0.26, DISAGREES),  # above, but not far above
        (solved(60), solved(30), 0.1, AGREES),  # from 0.21
        (solved(45), solved(30), 0.1, CANNOT_TELL),  # 0.15, from 0.08 to 0.22
        (solved(31), solved(30), 0.1, DISAGREES),
        (solved(10), solved(30), 0.1, DISAGREES),
    ],
)
def test_starts_above_is_about_the_untrained_policy(
    a: NDArray[np.float64], b: NDArray[np.float64], margin: float, expected: str
) -> None:
    found = evidence([made_up("a", a, each(0.0))], [made_up("b", b, each(1.0))])  # training turns the order round
    assert verdict("starts_above", {**A_OVER_B, "margin": margin}, found) == expected


# ------------------------------------------------------------------------------------------------------ zero_shot_below


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.03, 0.07, AGREES),
        (0.03, 0.1, CANNOT_TELL),
        (0.05, 0.15, CANNOT_TELL),
        (0.1, 0.2, CANNOT_TELL),
        (0.11, 0.2, DISAGREES),
    ],
)
def test_zero_shot_below(low: float, high: float, expected: str) -> None:
    other = {"value": 0.5, "low": 0.4, "high": 0.6}
    report = {
        "question_only": {"accuracy": other},
        "r1_zero": {"accuracy": {"value": (low + high) / 2, "low": low, "high": high}},
    }
    parameters = {"prompt": "r1_zero", "below": 0.1}
    measured, told, _ = verdicts.zero_shot_below(parameters, Evidence({}, 1, baseline=report))
    assert told == expected
    assert f"r1_zero {(low + high) / 2:.3f} ({low:.3f} to {high:.3f})" in measured
    with pytest.raises(NotMeasured, match="no zero-shot evaluation under r1_zero"):
        verdicts.zero_shot_below(parameters, Evidence({}, 1, baseline={"question_only": report["question_only"]}))


# ---------------------------------------------------------------------------------------------------- best_inside_range


@pytest.mark.parametrize(
    ("counts", "expected", "shown"),
    [
        ((20, 60, 30), AGREES, ["best m1 (0.600), inside the range", "above m0 by 0.400", "above m2 by 0.300"]),
        ((20, 60, 59, 30), AGREES, ["best m1", "above m0", "above m3"]),  # only the ends decide
        ((59, 60, 20), CANNOT_TELL, ["best m1", "above m0 by 0.010"]),
        ((20, 60, 59), CANNOT_TELL, ["best m1", "above m2 by 0.010"]),
        ((20, 30, 60), DISAGREES, ["best m2 (0.600), an end of the range", "above m1 by 0.300"]),
        ((60, 30, 20), DISAGREES, ["best m0 (0.600), an end of the range", "above m1 by 0.300"]),
        ((60, 30, 60), DISAGREES, ["best m0"]),  # the other end need not lose: the best is an end either way
        ((20, 59, 60), CANNOT_TELL, ["best m2", "above m1 by 0.010"]),
        ((60, 20, 59, 30), CANNOT_TELL, ["best m0", "above m2 by 0.010"]),  # one arm inside may be as good
        ((20, 60), CANNOT_TELL, ["best m1"]),  # nothing lies inside
        ((20,), CANNOT_TELL, ["best m0"]),
    ],
)
def test_best_inside_range(counts: tuple[int, ...], expected: str, shown: list[str]) -> None:
    found = evidence(*(ending(f"m{i}", solved(n)) for i, n in enumerate(counts)))
    measured, told, _ = verdicts.best_inside_range({}, found)
    assert told == expected
    assert all(text in measured for text in shown), measured


def test_best_inside_range_with_runs_that_differ_much() -> None:
    ends = [ending(arm, solved(50), solved(50), solved(50)) for arm in ("m0", "m2")]
    apart = ending("m1", solved(90), solved(60), solved(30))
    alike = ending("m1", solved(60), solved(60), solved(60))
    assert verdict("best_inside_range", {}, evidence(ends[0], apart, ends[1])) == CANNOT_TELL
    assert verdict("best_inside_range", {}, evidence(ends[0], alike, ends[1])) == AGREES


# ---------------------------------------------------------------------------------------------------------------- falls

LENGTH = {"arm": "a", "unlike": "b", "metric": "val/response_length", "below": 0.5}


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(400, 900, 20)], AGREES),
        ([(400, 20, 300)], DISAGREES),  # it came back: the last evaluation counts
        ([(400, 300, 200)], DISAGREES),  # half is not below half
        ([(400, 300, 199)], AGREES),
        ([(400, 300, 20), (400, 300, 380)], CANNOT_TELL),
        ([(400, 300, 20), (40, 30, 30)], CANNOT_TELL),  # each run against its own start
        ([(400, 300, 380), (400, 300, 390)], DISAGREES),
    ],
)
def test_falls(lengths: list[tuple[float, ...]], expected: str) -> None:
    runs = [made_up("a", *[solved(10)] * 3, seed=seed, lengths=values) for seed, values in enumerate(lengths)]
    others = [made_up("b", *[solved(10)] * 3, lengths=(400, 1, 300)), made_up("c", *[solved(10)] * 3, lengths=(400, 300, 1))]
    assert verdict("falls", LENGTH, evidence(*([other] for other in others), runs)) == expected
    # Where it falls in the other arm too, the difference between the two is not the reason.
    others[0].validation["val/response_length"] = [400, 300, 1]
    expected = CANNOT_TELL if expected == AGREES else expected
    assert verdict("falls", LENGTH, evidence(*([other] for other in others), runs)) == expected


def test_falls_shows_both_ends() -> None:
    runs = [made_up("a", solved(1), solved(1), lengths=pair, seed=i) for i, pair in enumerate([(400, 20), (400, 380)])]
    other = [made_up("b", solved(1), solved(1), lengths=(100, 90))]
    measured, _, _ = verdicts.falls(LENGTH, evidence(runs, other))
    assert measured == (
        "val/response_length below 0.5 of its start: a from 400.0 to 200.0 in 1 of 2 runs; b from 100.0 to 90.0 in 0 of 1 run"
    )


# ---------------------------------------------------------------------------------------------------- lags and collapses


def course(arm: str, *counts: tuple[int, ...], diverged: int | None = None, updates: int = 1) -> list[Run]:
    """Runs of an arm, each by how many problems it solves in its evaluations."""
    made = enumerate(counts)
    return [made_up(arm, *map(solved, run), seed=i, diverged=diverged, updates=updates) for i, run in made]


@pytest.mark.parametrize(
    ("counts", "diverged", "expected"),
    [
        ([(6, 60, 29)], None, AGREES),  # under half of its own best
        ([(6, 60, 30)], None, DISAGREES),
        ([(6, 7, 6)], None, DISAGREES),  # never left its start, however far behind: no collapse
        ([(6, 6, 6)], None, DISAGREES),
        ([(6, 7, 0)], None, AGREES),  # fell from its start
        ([(60, 7, 7)], None, AGREES),
        ([(2, 2, 0)], None, DISAGREES),  # 0.98^100 = 13% of resamples hold neither of the two problems
        ([(6, 60, 60)], 7, AGREES),  # diverged, whatever it scored
        ([(6, 60, 60)], 0, AGREES),
        ([(6, 60, 10), (6, 60, 50)], None, CANNOT_TELL),
        ([(6, 60, 10), (6, 50, 10)], None, AGREES),
        ([(6, 90, 40), (6, 41, 41)], None, CANNOT_TELL),  # each against its own best
    ],
)
def test_collapses_is_a_fall_from_what_a_run_had_reached(
    counts: list[tuple[int, ...]], diverged: int | None, expected: str
) -> None:
    found = evidence(course("first", (6, 60, 1)), course("best", (6, 90, 90)), course("last", *counts, diverged=diverged))
    assert verdict("collapses", {}, found) == expected


def test_collapses_counts_the_last_evaluations() -> None:
    found = evidence(course("last", (6, 80, 60, 10)))
    assert verdict("collapses", {}, found) == AGREES
    assert verdict("collapses", {}, replace(found, last_k=2)) == AGREES  # 35 under 40
    assert verdict("collapses", {}, replace(found, last_k=3)) == DISAGREES  # 50


def test_collapses_shows_the_course() -> None:
    measured, _, _ = verdicts.collapses(
        {}, evidence(course("a", (6, 60, 60)), course("most", (6, 60, 10), (8, 40, 30), diverged=None))
    )
    assert measured == (
        "most 0.200, started at 0.070, reached 0.500; 1 of 2 runs collapsed (diverged, or fell below 0.5 of its own best)"
    )


def test_many_updates_are_those_of_the_arm_with_most_of_them() -> None:
    """Wherever it stands; and a study with fewer than the claim speaks of says nothing about it."""
    fallen, risen = (6, 60, 10), (6, 60, 60)
    arms = [course("few", risen, updates=4), course("most", fallen, updates=16), course("eight", risen, updates=8)]
    assert verdict("collapses", {"updates": 16}, evidence(*arms)) == AGREES
    assert verdict("collapses", {}, evidence(*arms)) == DISAGREES  # the last arm
    with pytest.raises(NotMeasured, match=r"no arm with 16 updates per rollout batch \(most: 8\)"):
        verdicts.collapses({"updates": 16}, evidence(arms[0], arms[2]))


@pytest.mark.parametrize(
    ("first", "best", "expected", "shown"),
    [
        ([(6, 10, 15)], (6, 60, 70), AGREES, "below best (0.700) by 0.550"),
        ([(6, 6, 6)], (6, 60, 70), AGREES, "reached 0.060; 0 of 1 run collapsed"),  # no improvement is slow too
        ([(6, 60, 69)], (6, 60, 70), CANNOT_TELL, "by 0.010"),
        ([(6, 60, 20)], (6, 60, 70), DISAGREES, "1 of 1 run collapsed"),  # behind, but not for being slow
        ([(6, 60, 20), (6, 10, 15)], (6, 60, 70), CANNOT_TELL, "1 of 2 runs collapsed"),
        ([(6, 60, 80)], (6, 60, 70), DISAGREES, "it is the best"),
    ],
)
def test_lags(first: list[tuple[int, ...]], best: tuple[int, ...], expected: str, shown: str) -> None:
    found = evidence(course("first", *first), course("best", best), course("last", (6, 1, 1)))
    measured, told, _ = verdicts.lags({}, found)
    assert (told, shown in measured) == (expected, True), measured


# ------------------------------------------------------------------------------------------------------------- descends


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((70, 50, 30), AGREES),
        ((70, 30, 50), DISAGREES),  # the first is above both, but more is not less
        ((50, 70, 30), DISAGREES),
        ((30, 20, 70), DISAGREES),
        ((70, 50, 49), CANNOT_TELL),
        ((70, 69, 50), CANNOT_TELL),
        ((70, 50), AGREES),
        ((50, 50), CANNOT_TELL),
    ],
)
def test_descends(counts: tuple[int, ...], expected: str) -> None:
    found = evidence(*(ending(f"m{i}", solved(n)) for i, n in enumerate(counts)))
    measured, told, _ = verdicts.descends({}, found)
    assert told == expected
    assert measured.startswith("m0 0.") and measured.count(" above ") == len(counts) * (len(counts) - 1) // 2


def test_descends_compares_the_arms_that_are_named() -> None:
    found = evidence(*(ending(arm, solved(n)) for arm, n in (("base", 70), ("low", 90), ("early", 50))))
    assert verdicts.descends({"arms": ["base", "early", "late"]}, found).verdict == AGREES
    assert verdicts.descends({}, found).verdict == DISAGREES


def test_descends_needs_two_arms() -> None:
    with pytest.raises(NotMeasured, match="only one arm"):
        verdicts.descends({}, evidence(ending("m0", solved(3))))


# ----------------------------------------------------------------------------------------------- smaller_gradient_norms

A_UNDER_B = {"smaller": "a", "larger": "b"}


def with_norms(arm: str, *runs: Sequence[float], updates: int = 1) -> list[Run]:
    return [made_up(arm, solved(1), solved(1), seed=i, norms=norms, updates=updates) for i, norms in enumerate(runs)]


def alternating(low: float, high: float, steps: int = 40) -> list[float]:
    """Ten steps of one, ten of the other, and so on: whole blocks differ."""
    return [low if step // 10 % 2 == 0 else high for step in range(steps)]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0] * 40, [2.0] * 40, AGREES),
        ([2.0] * 40, [1.0] * 40, DISAGREES),
        ([1.0] * 40, alternating(1.5, 0.5), CANNOT_TELL),
        ([1.0] * 40, alternating(2.0, 3.0), AGREES),  # every block above
        # 4 of 8 blocks +1, 4 of 8 blocks -0.5: 0.25, standard error 0.75 / sqrt 8 = 0.27
        ([1.0] * 40, alternating(2.0, 0.5), CANNOT_TELL),
        # Within each block of five two steps at 0 and three at 2: mean 1.2 in every block, so the steps' spread is no matter
        ([1.0] * 40, [2.0, 0.0, 2.0, 0.0, 2.0] * 8, AGREES),
        ([1.0] * 30, [2.0] * 30, AGREES),  # six blocks
        ([1.0] * 29, [2.0] * 29, CANNOT_TELL),  # five: too few
        ([1.0] * 29, [2.0] * 60, CANNOT_TELL),  # only steps that both have count
        # b is large only where a has no steps
        ([1.0] * 30, [0.5] * 30 + [100.0] * 30, DISAGREES),
        ([1.0] * 30 + [100.0] * 30, [2.0] * 30, AGREES),
    ],
)
def test_smaller_gradient_norms(a: list[float], b: list[float], expected: str) -> None:
    assert verdict("smaller_gradient_norms", A_UNDER_B, evidence(with_norms("a", a), with_norms("b", b))) == expected


def test_gradient_norms_are_compared_step_by_step_however_many_updates_a_step_has() -> None:
    a = with_norms("a", [0.5, 1.5] * 40, updates=2)  # mean 1 in each of 40 steps
    b = with_norms("b", [2.0] * 40)
    measured, told, _ = verdicts.smaller_gradient_norms(A_UNDER_B, evidence(a, b))
    assert told == AGREES
    assert measured == "mean gradient norm over 40 steps: a 1.000, b 2.000; difference 1.000 (1.000 to 1.000)"


def test_gradient_norms_of_blocks_of_neighbouring_steps() -> None:
    """A curve that rises from 0 to 2: its mean of 1 has no standard error of independent steps."""
    b = with_norms("b", list(np.linspace(-1.0, 3.0, 40)))
    measured, told, _ = verdicts.smaller_gradient_norms(A_UNDER_B, evidence(with_norms("a", [0.5] * 40), b))
    low, high = (float(end) for end in re.findall(r"\((.*) to (.*)\)", measured)[0])
    # Eight block means, 4 / 39 x 5 = 0.513 apart: deviation 0.513 x sqrt((64 - 1) / 12) = 1.175, by sqrt 8: 0.415
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.415, 0.5 + 1.96 * 0.415), abs=0.05)
    assert told == CANNOT_TELL  # forty independent steps would give 0.5 - 1.96 x 0.187 > 0


def test_gradient_norms_of_runs_that_differ_much() -> None:
    a = with_norms("a", *[[1.0] * 40] * 3)
    apart = with_norms("b", [4.0] * 40, [1.0] * 40, [0.4] * 40)
    alike = with_norms("b", [1.7] * 40, [1.8] * 40, [1.9] * 40)
    assert verdict("smaller_gradient_norms", A_UNDER_B, evidence(a, apart)) == CANNOT_TELL
    assert verdict("smaller_gradient_norms", A_UNDER_B, evidence(a, alike)) == AGREES


def test_gradient_norms_of_runs_of_unequal_length() -> None:
    a = with_norms("a", [1.0] * 40, [1.0] * 35 + [50.0] * 15)
    measured, _, _ = verdicts.smaller_gradient_norms(
        A_UNDER_B, evidence(a, with_norms("b", [2.0] * 35 + [50.0] * 5, [2.0] * 35))
    )
    assert measured == "mean gradient norm over 35 steps: a 1.000, b 2.000; difference 1.000 (1.000 to 1.000)"


@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_norms_that_are_not_finite_are_left_out_and_counted(odd: float) -> None:
    a, b = [1.0] * 43, [2.0] * 43
    a[3] = a[20] = b[3] = b[30] = odd
    found = evidence(with_norms("a", a), with_norms("b", b))
    measured, told, _ = verdicts.smaller_gradient_norms(A_UNDER_B, found)
    assert told == AGREES
    assert "over 40 steps: a 1.000, b 2.000; difference 1.000 (1.000 to 1.000)" in measured
    assert measured.endswith("not finite: a 2, b 2")
    # In one of an arm's two runs is enough, and so is one of a step's two updates.
    found = evidence(with_norms("a", [1.0] * 43, a), with_norms("b", [2.0] * 43, [2.0] * 43))
    measured, _, _ = verdicts.smaller_gradient_norms(A_UNDER_B, found)
    assert "over 41 steps" in measured and measured.endswith("not finite: a 2")
    halves = [1.0, 1.0] * 40
    halves[11] = odd
    found = evidence(with_norms("a", halves, updates=2), with_norms("b", [2.0] * 40))
    assert verdicts.smaller_gradient_norms(A_UNDER_B, found)[0].endswith("not finite: a 1")
    found = evidence(with_norms("a", [odd] * 20 + [1.0] * 20), with_norms("b", [2.0] * 40))
    measured, told, _ = verdicts.smaller_gradient_norms(A_UNDER_B, found)
    assert told == CANNOT_TELL
    assert measured == "only 20 steps in common, too few for an interval; steps left out because a norm is not finite: a 20"


# -------------------------------------------------------------------------------------------------------- norms_blow_up

BLOW_UP = {"arm": "a", "unlike": "b", "times": 5}
CALM, LARGE, GROWN = [1.0] * 40, [100.0] * 40, [1.0] * 30 + [6.0] * 10


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([GROWN], [CALM], AGREES),
        ([LARGE], [CALM], DISAGREES),  # larger from the beginning, and stays so
        ([[1.0] * 30 + [5.0] * 10], [CALM], DISAGREES),
        ([[1.0] * 20 + [99.0] * 10 + [1.0] * 10], [CALM], DISAGREES),  # a spike that passes
        ([GROWN], [GROWN], CANNOT_TELL),
        ([CALM], [GROWN], DISAGREES),
        ([GROWN, CALM], [CALM, CALM], CANNOT_TELL),
        ([GROWN, GROWN], [CALM, GROWN], CANNOT_TELL),
        ([[1.0] * 39 + [np.nan]], [CALM], AGREES),
        ([[1.0] * 39 + [np.inf]], [CALM], AGREES),
        ([[1.0, 1.0, 6.0]], [CALM], AGREES),  # a run that was stopped early
    ],
)
def test_norms_blow_up(a: list[list[float]], b: list[list[float]], expected: str) -> None:
    assert verdict("norms_blow_up", BLOW_UP, evidence(with_norms("a", *a), with_norms("b", *b))) == expected


def test_norms_blow_up_shows_both_ends() -> None:
    measured, _, _ = verdicts.norms_blow_up(BLOW_UP, evidence(with_norms("a", GROWN, CALM), with_norms("b", CALM)))
    assert measured.endswith(
        "5 times that of the first: a from 1.000 to 3.500, in 1 of 2 runs; b from 1.000 to 1.000, in 0 of 1 run"
    )


# -------------------------------------------------------------------------------------------------------- rises_with_kl

GROWING, FLAT, FALLING = np.arange(8) / 100, [0.01] * 8, np.arange(8)[::-1] / 100


def trained(final: NDArray[np.float64], kl: Sequence[float] | NDArray[np.float64], seed: int = 0) -> Run:
    return made_up("best", solved(40), final, seed=seed, norms=[1.0] * 8, kl=list(kl))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(70, GROWING)], AGREES),
        ([(41, GROWING)], CANNOT_TELL),  # the reward may not have risen
        ([(20, GROWING)], DISAGREES),
        ([(70, FLAT)], DISAGREES),
        ([(70, FALLING)], DISAGREES),
        ([(70, [0.0, 0.01, 9, 9, 9, 9, 0.0, 0.02])], DISAGREES),  # 0.005 to 0.01 in all, but not steadily
        ([(70, [0.0, 0.01, 0.01, 0.02, 0.015, 0.025, 0.03, 0.02])], AGREES),  # within a quarter it may fall
        ([(70, GROWING), (70, FLAT)], CANNOT_TELL),
        ([(70, FLAT), (70, FALLING)], DISAGREES),
        ([(20, GROWING), (20, FLAT)], DISAGREES),
        ([(71, GROWING), (70, GROWING), (69, GROWING)], AGREES),
        ([(99, GROWING), (60, GROWING), (20, GROWING)], CANNOT_TELL),  # mean 60, standard error 23
    ],
)
def test_rises_with_kl(runs: list[tuple[int, Any]], expected: str) -> None:
    found = [trained(solved(n), kl, seed) for seed, (n, kl) in enumerate(runs)]
    assert verdict("rises_with_kl", {"arm": "best"}, evidence(found)) == expected


def test_rises_with_kl_shows_reward_and_kl() -> None:
    measured, _, _ = verdicts.rises_with_kl({"arm": "best"}, evidence([trained(solved(70), GROWING)]))
    assert re.fullmatch(
        r"answer reward above its start by 0\.300 \(0\.2.* to 0\.3.*\); "
        r"KL per token from 0\.0050 to 0\.0650 nats, growing from each quarter of the steps to the next in 1 of 1 run",
        measured,
    )


def test_a_study_that_does_not_measure_the_kl_says_so() -> None:
    with pytest.raises(NotMeasured, match=re.escape(KL)):
        verdicts.rises_with_kl({"arm": "best"}, evidence(ending("best", solved(70))))


# -------------------------------------------------------------------------------------------------------- the whole list


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def study(mini_study: Study) -> Study:
    """One run an arm; the last two evaluations count."""
    selection = mini_study.selection.model_copy(update={"last_k": 2})
    return mini_study.model_copy(update={"seeds": [0], "selection": selection})


def write(run: Run, experiment: str) -> None:
    folder = Path(f"data/runs/{experiment}/{run.arm}/{run.seed}")
    folder.mkdir(parents=True)
    config = {"identity": run.name, "same_as": None, "overrides": {}, "before": [], "config": {}, "software": {}}
    (folder / "config.yaml").write_text(json.dumps(config | run.config))  # JSON is YAML
    (folder / "metrics.json").write_text(json.dumps(run.metrics))
    run.history.to_csv(folder / "history.csv", index=False)
    run.validation.to_csv(folder / "validation.csv", index=False)
    lines = [json.dumps({"step": step, "answer_reward": list(row)}) for step, row in enumerate(run.outcomes)]
    (folder / "outcomes.jsonl").write_text("\n".join(lines) + "\n")


def write_study(study: Study) -> None:
    """All runs of a study: each experiment's first arm ends at 50 of 100 problems, its second at 70, all others at 60.

    Those are means of two evaluations, of which the last is better by 20. The second arm wins, where there is one.
    """
    Path("reports/candidates").mkdir(parents=True)
    for experiment, content in study.experiments.items():
        won = list(content.arms)[:2][-1]
        chosen = {"leader": won, "reason": "leads", "candidates": []}
        Path(f"reports/candidates/{experiment}.json").write_text(json.dumps(chosen | {"winner": won}))
        for place, arm in enumerate(content.arms):
            for seed in study.seeds:
                end = 50 + 20 * place if place < 2 else 60
                run = made_up(
                    arm,
                    solved(40 - 20 * place),
                    solved(0),
                    solved(end - 10),
                    solved(end + 10),
                    seed=seed,
                    updates=2**place,
                    norms=[1.0 + place] * (40 * 2**place),
                    kl=list(np.arange(40 * 2**place) / 100),
                    lengths=(100.0, 10.0, 10.0, 90.0),
                )
                write(run, experiment)
    accuracy = {"value": 0.04, "low": 0.03, "high": 0.06}
    Path("reports/math_baseline.json").write_text(
        json.dumps({name: {"accuracy": accuracy} for name in ("r1_zero", "question_only")})
    )


EXPECTED = {  # from write_study's 50, 70 and 60
    "zero-shot-r1-zero": AGREES,
    "learning-rate-matters": AGREES,  # 50, 70, 60, 60
    "learning-rate-too-low": AGREES,  # 50 against 70
    "learning-rate-too-high": DISAGREES,  # 60
    "baseline-helps": DISAGREES,  # 50 against 70
    "no-baseline-length-collapse": DISAGREES,  # 100 to 90
    "constant-length-normalization": AGREES,  # 70 against 50
    "std-normalization": DISAGREES,  # 50 against 70
    "std-gradient-norm": DISAGREES,  # without 2, with 1
    "on-policy-wins": DISAGREES,  # 50 against 70 and 60
    "many-updates-collapse": DISAGREES,  # 16 updates: 60
    "clipping-stabilises": DISAGREES,  # with clipping 1, without 2, from the first step to the last
    "prompt": DISAGREES,  # 20 against 40
    "prompt-final": AGREES,  # 70 against 50
    "sft-initialization-hurts": DISAGREES,  # 50, 70, 60
    "expert-iteration-beats-sft": AGREES,  # 80, the last of 60 and 80, against 70
    "filtered-sft": CANNOT_TELL,  # 60 against 60
    "kl-not-needed": AGREES,  # 40 to 50
    "lora-rank-1": AGREES,  # 60 against 50
    "lora-learning-rate": DISAGREES,  # 60 against 70 at the lower rate
    "one-step-behind": AGREES,  # 70 against 50
}


def test_every_claim_is_judged_in_the_order_of_the_file(study: Study) -> None:
    write_study(study)
    found = judge_claims(study)
    assert [claim["id"] for claim in found] == [claim["id"] for claim in PUBLISHED["claims"]]
    assert {claim["id"]: claim["verdict"] for claim in found} == EXPECTED
    for claim, published in zip(found, PUBLISHED["claims"], strict=True):
        keys = ["id", "experiment", "statement", "reported", "published", "measured", "verdict", "differences", "note"]
        assert list(claim) == keys
        shown = re.findall(r"(?:difference|by|its start by) (-?\d\.\d{3}) \(", claim["measured"])
        assert {f"{each['value']:.3f}" for each in claim["differences"].values()} <= set(shown)
        assert all(source in published["reported"] for source in claim["published"])
        assert (claim["experiment"], claim["statement"]) == (published["experiment"], published["statement"])
        assert claim["reported"] == {source: str(text) for source, text in published["reported"].items()}
        assert bool(re.search(r"\d", claim["measured"])) == (claim["verdict"] != NOT_MEASURED)


def test_what_is_not_measured_says_why(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every published claim has its test by now, so this one is made up."""
    write_study(study)
    assert NOT_MEASURED not in {claim["verdict"] for claim in judge_claims(study)}
    published = tmp_path / "claims.yaml"
    published.write_text("claims:\n  - {id: later, experiment: grpo_next, statement: It is., reported: {me: 1}}\n")
    monkeypatch.setattr(claims, "PUBLISHED", published)
    (claim,) = judge_claims(study)
    assert (claim["measured"], claim["verdict"], claim["note"]) == ("", NOT_MEASURED, "this version has no stage grpo_next")


def test_one_run_an_arm_is_said_where_it_matters(study: Study) -> None:
    write_study(study)
    note = "one run an arm, so the spread between runs is not in the interval"
    one = {claim["id"]: claim["note"] for claim in judge_claims(study)}
    assert {id for id, text in one.items() if text == note} == {
        "learning-rate-matters",
        "learning-rate-too-low",
        "baseline-helps",
        "constant-length-normalization",
        "std-normalization",
        "std-gradient-norm",
        "on-policy-wins",
        "prompt-final",
        "sft-initialization-hurts",
        "expert-iteration-beats-sft",
        "filtered-sft",
        "kl-not-needed",
        "lora-rank-1",
        "lora-learning-rate",
        "one-step-behind",
    }
    assert {id for id, text in one.items() if not text} == {
        "zero-shot-r1-zero",
        "learning-rate-too-high",
        "no-baseline-length-collapse",
        "many-updates-collapse",
        "clipping-stabilises",
        "prompt",
    }


def test_several_runs_an_arm_need_no_note(study: Study) -> None:
    study = study.model_copy(update={"seeds": [0, 1]})
    write_study(study)
    found = judge_claims(study)
    assert {claim["id"]: claim["verdict"] for claim in found} == EXPECTED  # the runs are equal
    assert all(claim["note"] == "" for claim in found if claim["verdict"] != NOT_MEASURED)


def test_an_arm_that_params_yaml_no_longer_names(study: Study) -> None:
    experiment = study.experiments["grpo_baselines"]
    arms = {"reinforce_with_baseline": experiment.arms["reinforce_with_baseline"]}
    changed = experiment.model_copy(update={"arms": arms})
    study = study.model_copy(update={"experiments": {**study.experiments, "grpo_baselines": changed}})
    write_study(study)
    found = {claim["id"]: claim for claim in judge_claims(study)}
    for name in ("baseline-helps", "no-baseline-length-collapse"):
        assert (found[name]["verdict"], found[name]["note"]) == (NOT_MEASURED, "the study has no arm no_baseline")
    assert found["prompt-final"]["verdict"] == AGREES


@pytest.mark.parametrize("gone", [["grpo_async_offpolicy"], ["sft_experiment"], ["grpo_prompt_ablation", "grpo_colocate"]])
def test_claims_about_what_a_study_leaves_out_say_so(study: Study, gone: list[str]) -> None:
    """Nothing is there of these experiments: no run, no winner. A claim may compare with one of them, too."""
    write_study(study)
    for name in gone:
        shutil.rmtree(f"data/runs/{name}", ignore_errors=True)
        Path(f"reports/candidates/{name}.json").unlink()
    without = {name: study.experiments[name].model_copy(update={"arms": {}}) for name in gone}
    found = judge_claims(study.model_copy(update={"experiments": study.experiments | without}))
    tests = {claim["id"]: claim for claim in PUBLISHED["claims"]}
    for claim in found:
        about = {claim["experiment"], *(p.get("other") for p in tests[claim["id"]]["test"].values())} & set(gone)
        expected = NOT_MEASURED if about else EXPECTED[claim["id"]]
        assert claim["verdict"] == expected
        if about:
            assert claim["note"] == f"left out: the study has no arms of {about.pop()}"
    assert NOT_MEASURED in {claim["verdict"] for claim in found}


def test_a_claim_about_a_prompt_that_the_study_does_not_ask_in_is_not_measured(study: Study) -> None:
    """A task of one's own has its own formats; but a baseline without one that the study asks in is a damaged file."""
    write_study(study)
    Path("reports/math_baseline.json").write_text('{"chat": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}}}')
    with pytest.raises(UserError, match=r"math_baseline.json: damaged \(r1_zero, question_only missing\)"):
        judge_claims(study)
    evaluation = study.evaluation.model_copy(update={"zero_shot_prompts": ["chat"]})
    found = {claim["id"]: claim for claim in judge_claims(study.model_copy(update={"evaluation": evaluation}))}
    assert found["zero-shot-r1-zero"]["verdict"] == NOT_MEASURED
    assert found["zero-shot-r1-zero"]["note"] == "the study has no zero-shot evaluation under r1_zero"
    assert {name for name, claim in found.items() if claim["verdict"] != EXPECTED[name]} == {"zero-shot-r1-zero"}


def test_a_run_that_is_missing_is_named_with_its_stage(study: Study) -> None:
    write_study(study)
    Path("data/runs/grpo_baselines/no_baseline/0/outcomes.jsonl").unlink()
    with pytest.raises(UserError, match="dvc repro train@grpo_baselines-no_baseline"):
        judge_claims(study)


@pytest.mark.parametrize("test", ["{looks_good: {}}", "{}", "{ends_above: {}, falls: {}}", None])
def test_a_mistake_in_the_list_of_claims_is_told(
    test: str | None, study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "claims.yaml"
    line = "" if test is None else f"\n    test: {test}"
    published.write_text(
        f"claims:\n  - id: it\n    experiment: grpo_baselines\n    statement: It is.{line}\n    reported: {{me: 1}}\n"
    )
    monkeypatch.setattr(claims, "PUBLISHED", published)
    with pytest.raises(ValueError, match=r"claims\.yaml: it: needs one test of a known kind"):
        judge_claims(study)


def test_the_report_and_its_table_hold_every_claim(study: Study) -> None:
    write_study(study)
    write_claims(study)
    report = json.loads(Path("reports/claims.json").read_text())
    assert list(report) == ["sources", "notes", "claims"]
    assert report["sources"] == PUBLISHED["sources"]
    assert report["claims"] == judge_claims(study)
    lines = claims_table(report).splitlines()
    assert lines[0] == "| claim | experiment | reported | measured here | verdict |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [c["statement"] for c in report["claims"]]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in lines)
    row = next(line for line in lines if "ends above no_baseline" in line)
    assert "| snider-2025: yes<br>garg-2026: 0.608 against 0.232 (late) |" in row
    assert "reinforce_with_baseline 0.500, no_baseline 0.700; difference -0.200 (" in row
    assert row.endswith("<br>one run an arm, so the spread between runs is not in the interval | disagrees |")
    row = next(line for line in lines if "Expert iteration" in line)
    second = [list(study.experiments[name].arms)[1] for name in ("expert_iteration_experiment", "sft_experiment")]
    assert f"| {second[0]} 0.800; sft_experiment: {second[1]} 0.700; difference 0.100 (" in row
    row = next(line for line in lines if "one version behind" in line)
    assert "| lag_1 0.700, lag_0 0.500; difference 0.200 (" in row
    assert row.endswith("; margin 0.02<br>one run an arm, so the spread between runs is not in the interval | agrees |")


def test_of_what_is_left_out_the_table_holds_no_claim(study: Study) -> None:
    write_study(study)
    names = [name for name in study.made if name not in ("grpo_learning_rate", "grpo_baselines")]
    empty = {name: study.experiments[name].model_copy(update={"arms": {}}) for name in names}
    study = study.model_copy(update={"experiments": study.experiments | empty})
    write_claims(study)
    report = json.loads(Path("reports/claims.json").read_text())
    rows = claims_table(report, study.left_out).splitlines()[2:]
    assert {row.split(" | ")[1] for row in rows} == {"math_baseline", "grpo_learning_rate", "grpo_baselines"}
    assert len(rows) == sum(claim["experiment"] not in names for claim in report["claims"]) < len(report["claims"])


def test_bars_in_a_cell_do_not_end_it() -> None:
    claim = {
        "statement": "a|b",
        "experiment": "e",
        "reported": {"me": "x|y"},
        "measured": "1",
        "note": "",
        "verdict": AGREES,
    }
    assert claims_table({"claims": [claim]}).splitlines()[2] == r"| a\|b | e | me: x\|y | 1 | agrees |"


# ---------------------------------------------------------------------------------------------------------- claims.yaml


BY_PLACE = {"best_inside_range", "lags", "collapses", "descends", "winner_above"}  # kinds that name no arm


def arms_of(parameters: dict[str, Any]) -> set[str]:
    values = [parameters[key] for key in ("better", "worse", "smaller", "larger", "arm", "unlike") if key in parameters]
    return {arm for value in values for arm in ([value] if isinstance(value, str) else value)}


@pytest.mark.parametrize("claim", IN_THIS_VERSION, ids=lambda claim: claim["id"])
@pytest.mark.parametrize("name", ["mini", "math-2xh100"])
def test_claims_of_this_version_have_a_test_whose_arms_the_studies_have(claim: dict[str, Any], name: str) -> None:
    ((kind, parameters),) = claim["test"].items()
    assert kind in KINDS
    study = load_study(REPOSITORY / "studies" / f"{name}.yaml")
    if claim["experiment"] == "math_baseline":
        assert parameters["prompt"] in study.evaluation.zero_shot_prompts
        return
    arms = study.experiments[claim["experiment"]].arms
    assert arms_of(parameters) <= set(arms)
    assert bool(arms_of(parameters)) == (kind not in BY_PLACE)
    if kind == "winner_above":
        assert parameters["other"] in study.experiments and parameters["other"] != claim["experiment"]


@pytest.mark.parametrize("name", ["mini", "math-2xh100"])
def test_the_learning_rates_stand_in_rising_order(name: str) -> None:
    arms = load_study(REPOSITORY / "studies" / f"{name}.yaml").experiments["grpo_learning_rate"].arms
    rates = [arm["learning_rate"] for arm in arms.values()]
    assert rates == sorted(rates) and len(rates) >= 3


@pytest.mark.parametrize("name", ["mini", "math-2xh100"])
def test_arms_stand_in_the_order_that_claims_go_by(name: str) -> None:
    """More SFT comes later, and the base model first."""
    study = load_study(REPOSITORY / "studies" / f"{name}.yaml")
    arms = study.experiments["grpo_sft_initialization"].arms
    claim = next(claim for claim in PUBLISHED["claims"] if claim["id"] == "sft-initialization-hurts")
    starts = [arms[arm].get("start_from") for arm in claim["test"]["descends"]["arms"] if arm in arms]
    checkpoints = [start.split("/")[-1] for start in starts[1:]]
    steps = [study.sft.n_sft_steps if name == "last" else int(name.removeprefix("step-")) for name in checkpoints]
    assert starts[0] is None and steps == sorted(set(steps)) and len(steps) >= 2


def test_every_source_that_a_claim_names_is_listed() -> None:
    assert {source for claim in PUBLISHED["claims"] for source in claim["reported"]} == set(PUBLISHED["sources"])
    assert len({claim["id"] for claim in PUBLISHED["claims"]}) == len(PUBLISHED["claims"])
    assert all("test" not in claim for claim in PUBLISHED["claims"] if claim not in IN_THIS_VERSION)
