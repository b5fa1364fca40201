"""Undecided comparisons, from run folders that the functions of `select` and `claims` have read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from report_parts import run
from run_folders import write_baseline, write_run
from study_parts import with_values

from grpo.common.files import write_json
from grpo.reporting.what_it_would_take import contents, hours, not_a_matter_of_seeds, table, undecided
from grpo.results.claims import write_claims
from grpo.results.power import Spread, power, seeds_needed, spread_of
from grpo.results.selection import select
from grpo.study.schema import Study

pytestmark = pytest.mark.usefixtures("workdir")
LENGTHS, RATE = "grpo_length_normalization", "grpo_learning_rate"
PROBLEMS = 200


def scores(mean: float, seed: int) -> NDArray[np.float64]:
    """Rewards of 0 and 1, with so many problems right; which ones depends on the seed."""
    right = np.arange(PROBLEMS) < round(mean * PROBLEMS)
    return np.random.default_rng(seed).permutation(right).astype(float)


def finished(study: Study, means: dict[str, dict[str, list[float]]], norms: list[float]) -> Study:
    """A study of these experiments alone, with a run for each mean, selected and judged."""
    seeds = list(range(len(next(iter(next(iter(means.values())).values())))))
    arms_of = {f"experiments.{name}.arms": {arm: {} for arm in means.get(name, {})} for name in study.experiments}
    study = with_values(study, {"seeds": seeds, "selection.last_k": 1, **arms_of})
    for experiment, arms in means.items():
        for place, (arm, of_arm) in enumerate(arms.items()):
            for seed in seeds:
                rewards = np.zeros(PROBLEMS), scores(of_arm[seed], 10 * place + seed)
                write_run(run(arm, rewards, seed, experiment, every=64, steps=len(norms), gradient_norm=norms))
        write_json(Path(f"reports/candidates/{experiment}.json"), select(study, experiment))
    write_baseline(study)
    write_claims(study)
    return study


def test_an_undecided_pair_is_listed_once_with_all_that_ask_for_it(mini_study: Study) -> None:
    close = {"masked_mean": [0.70, 0.74], "masked_normalize": [0.75, 0.77], "microbatch_longest": [0.2, 0.2]}
    study = finished(mini_study, {RATE: {"3e-4": [0.7, 0.7]}, LENGTHS: close}, [1.0] * 8)
    (row,) = undecided(study)  # microbatch_longest is far behind, and the learning rate has one arm
    assert row["arms"] == ["masked_mean", "masked_normalize"] and row["experiments"] == [LENGTHS, LENGTHS]
    assert row["asked_by"] == ["selection", "constant-length-normalization"]
    assert row["measured"]["value"] == pytest.approx(0.04) and row["measured"]["low"] < 0 < row["measured"]["high"]
    first, second = (np.stack([scores(mean, 10 * place + seed) for seed, mean in enumerate(close[arm])]) for place, arm in
                     enumerate(row["arms"]))  # fmt: skip
    assert row["seeds_needed"] == seeds_needed(spread_of(first, second), 0.04) and row["problems_needed"] is None
    assert row["needs_runs_of"] == [RATE, LENGTHS]  # grpo_baselines, between them, is left out


def test_the_seeds_of_a_claim_with_a_margin_are_for_the_distance_from_it(mini_study: Study) -> None:
    """Rank 1 may end .02 below the whole: .04 above it is .06 away from that bar."""
    ends = {"full": [0.60, 0.64], "rank_1": [0.64, 0.68]}
    (row,) = (row for row in undecided(finished(mini_study, {"grpo_lora": ends}, [1.0] * 8)) if row["bar"])
    assert (row["arms"], row["asked_by"], row["bar"]) == (["full", "rank_1"], ["lora-rank-1"], -0.02)
    assert row["measured"]["value"] == pytest.approx(0.04)
    spread = Spread(**row["spread"], n_problems=PROBLEMS)
    needed = row["seeds_needed"]
    assert power(spread, 0.06, needed) >= 0.8 > power(spread, 0.06, needed - 1)


def test_one_seed_shows_no_spread(mini_study: Study) -> None:
    study = finished(mini_study, {LENGTHS: {"masked_mean": [0.70], "masked_normalize": [0.72]}}, [1.0] * 8)
    (row,) = undecided(study)
    assert (row["spread"], row["seeds_needed"], row["problems_needed"]) == (None, None, None)
    found = contents([row], [])["undecided"]
    assert found[0]["command"] == "" and "unknown: one seed" in table(found)


def test_equal_means_need_no_number_though_rounded_sums_differ(mini_study: Study) -> None:
    equal = {"masked_mean": [0.70, 0.74, 0.9], "masked_normalize": [0.9, 0.70, 0.74]}
    (row,) = undecided(finished(mini_study, {LENGTHS: equal}, [1.0] * 8))
    assert (row["seeds_needed"], row["problems_needed"]) == (None, None)
    assert "the measured difference is zero" in table(contents([row], [])["undecided"])


def test_a_claim_without_an_interval_of_rewards_is_listed_separately(mini_study: Study) -> None:
    """Gradient norms and entropies over 24 steps are too few for an interval, whatever the seeds."""
    arms = {"with_std": [0.9, 0.9], "without_std": [0.1, 0.1]}
    study = finished(mini_study, {"grpo_group_standard_deviation": arms}, list(np.linspace(1, 2, 24)))
    # The two trained alike as far as their gradient norms go, but not to the last number.
    assert undecided(study) == []
    claims = not_a_matter_of_seeds(study)
    assert [claim.claim for claim in claims] == ["std-gradient-norm", "std-entropy"]
    assert all("holds 1" in claim.reason for claim in claims)
    assert "Nothing" in table([])


def test_what_more_seeds_cost(mini_study: Study) -> None:
    measured = {"value": 0.04, "low": -0.01, "high": 0.09}
    row = {
        "experiments": [LENGTHS, LENGTHS], "arms": ["a", "b"], "asked_by": ["selection"], "bar": 0.0, "measured": measured,
        "seeds": [3, 7], "problems": 200, "spread": {"runs": 0.1, "problems": 0.1, "rest": 0.1}, "seeds_needed": 12,
        "problems_needed": None, "needs_runs_of": [RATE, LENGTHS],
    }  # fmt: skip
    seconds = {f"{LENGTHS}/a": 360.0, f"{LENGTHS}/b": 720.0, f"{LENGTHS}/c": 36.0, f"{RATE}/x": 0.0, "other/a": 9e9}
    assert hours(row, seconds) == (10 * 1080 / 3600, 10 * 1116 / 3600)
    (found,) = contents([row], [])["undecided"]
    assert found["command"] == f'dvc exp run -S "seeds=[3,7,$(seq -s, 8 17)]" select@{LENGTHS}'
    line = table([found], seconds).splitlines()[2]
    assert "| b or a |" in line and "| 0.040 (-0.010 to 0.090) | 2 | 12 | 3.00 | 3.10 |" in line
    (found,) = contents([row | {"seeds_needed": 2}], [])["undecided"]
    assert found["command"] == "" and "| none for this comparison alone; it is one of several |" in table([found])
    never = row | {"seeds_needed": None, "problems_needed": 1234}
    (found,) = contents([never], [])["undecided"]
    assert "200 problems are too few, at least 1,234" in table([found]) and hours(never, seconds) is None
    enough = contents([never | {"problems_needed": 0}], [])["undecided"]  # problems hardly spread, and the difference is small
    assert "| more than 1,000,000 |" in table(enough)
