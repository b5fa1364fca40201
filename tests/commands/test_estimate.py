"""`grpo plan`: what is taken over, hours by hand, and what a study can see, judged by the real rule on simulated studies."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from study_parts import activate, study_named, with_values

from grpo.commands.estimate import plan, work
from grpo.commands.power import OVER_PROBLEMS, power_table, precision
from grpo.common.files import write_json
from grpo.results.pairs import Pairs, write_pairs
from grpo.results.verdicts import DOES_NOT_HOLD, HOLDS, SAME, decide_by, smallest_seen
from grpo.study import paths
from grpo.study.claims import AnyClaim, Beats
from grpo.study.schema import Study, load_study

UNIT = {"RTX 4090": 84.0, "H100": 30.0, "H200": 14.0}
EVALUATED = 22 * 1024 + 2048  # of 200 steps: 0, 2, 5, 10, 20, ... 190, and the last


@pytest.fixture
def smoke(workdir: Path) -> Study:
    """The smoke study, active in an empty project; without a GPU."""
    activate("smoke", workdir)
    return load_study()


@cache
def planned(study: str) -> dict[str, Any]:
    return plan(study_named(study), None, None)


def hours(study: str, experiment: str) -> dict[str, float]:
    found: dict[str, float] = planned(study)["rows"][experiment]["hours"]
    return found


@pytest.mark.usefixtures("workdir")
def test_hours_of_each_card_are_those_of_steps_and_evaluations() -> None:
    """Five rates and three seeds of 200 steps of 256 rollouts, on two GPUs each; evaluations add 27%."""
    added = 0.56 * EVALUATED / 256
    assert added / 200 == pytest.approx(0.27, abs=0.005)
    rates = plan(study_named("math-2xh100"), None, 2.0)
    row = rates["rows"]["grpo_learning_rate"]
    assert row["hours"] == pytest.approx({card: 2 * 15 * (200 + added) * s / 3600 for card, s in UNIT.items()})
    assert (row["runs"], row["steps"]) == (15, 3000)
    assert rates["cost"] == pytest.approx({card: 2.0 * spent for card, spent in rates["rows"]["in all"]["hours"].items()})


@pytest.mark.usefixtures("workdir")
def test_what_else_decides_hours() -> None:
    sampled = 0.56 * (2 * 5000 + 2 * 5000 * 16) / 256
    assert hours("math-h100", "math_baseline, best_of_n")["H100"] == pytest.approx(sampled * 30 / 3600)
    assert hours("math-h100", "leaderboard") == dict.fromkeys(UNIT, 11 * 3 * 4), "a time limit of four hours"
    # Of 7.616 billion parameters 152,064 x 3,584 are an embedding that is only looked up; eight processes share a step.
    larger = (7615616512 - 152064 * 3584) / 1543714304
    both = hours("math-7b-8xh100", "grpo_learning_rate")["H100"], hours("math-h100", "grpo_learning_rate")["H100"]
    assert both[0] == pytest.approx(larger * both[1])
    study = study_named("math-h100")
    once, resampled, twice = (
        work(study, study.grpo.model_copy(update=changes))
        for changes in ({}, {"dynamic_sampling_rounds": 2}, {"epochs_per_rollout_batch": 2})
    )
    # Half of the groups have no signal: of 64 rollouts 32 are sampled anew, then 16.
    assert (once, resampled, twice) == pytest.approx((1.0, 0.56 * 112 / 64 + 0.44, 1.44))
    given = plan(study, 60.0, None)["rows"]["grpo_learning_rate"]["hours"]
    assert given == pytest.approx({"given": 2 * both[1]})


def test_a_run_that_equals_an_earlier_one_costs_nothing(smoke: Study) -> None:
    """Which one does depends on the winner before it."""
    rows = plan(smoke, None, None)["rows"]
    assert [rows["grpo_baselines"][key] for key in ("runs", "taken over", "steps")] == [1, 1, 3]
    other = with_values(smoke, {"selection.pinned": {"grpo_learning_rate": "1e-3"}, "grpo.learning_rate": 1e-3})
    changed = with_values(other, {"experiments.grpo_learning_rate.arms": {"1e-3": {"learning_rate": 2e-3}}})
    changed = with_values(changed, {"experiments.grpo_baselines.arms": {"no_baseline": {"loss_type": "no_baseline"}}})
    assert plan(changed, None, None)["rows"]["grpo_baselines"]["taken over"] == 0


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize("study", ["math-first", "math-24gb-first"])
def test_a_first_study_takes_the_hours_that_it_says(study: str) -> None:
    told = re.search(r"about (\d+) hours on an (RTX 4090|H100)\.", study_named(study).description)
    assert told and round(planned(study)["rows"]["in all"]["hours"][told[2]]) == int(told[1])


def test_the_command_prints_a_table_or_json(smoke: Study, grpo: Any) -> None:
    code, told, error = grpo("plan")
    assert code == 0 and told.startswith(
        "study smoke, seeds [0]; no run uses a GPU: --seconds-per-step gives hours on this machine\nexperiment "
    ), error
    (row,) = [line for line in told.splitlines() if line.startswith("grpo_baselines")]
    assert row.split() == ["grpo_baselines", "1", "1", "3"]
    told = grpo("plan", "--seconds-per-step", "3600")[1]
    assert "no run uses a GPU: hours, one run after the other" in told and "USD" not in told and "GPU-hours" not in told
    (row,) = [line for line in told.splitlines() if line.startswith("grpo_baselines")]
    assert float(row.split()[-1]) > 3, "three steps of an hour"
    assert json.loads(grpo("plan", "--json", "--price", "4")[1]) == plan(smoke, None, 4.0)
    heads, *rows = grpo("plan", "math-first")[1].splitlines()[1:]
    (row,) = [line for line in rows if line.startswith("grpo_learning_rate")]
    assert (heads.split()[-1], row.split()[-1]) == ("CS336", "6")
    columns = ("experiment", "same_as", "steps", "rollout_s", "scoring_s", "training_s")
    runs = [("mine", "", 4, 3, 1, 4), ("mine", "a/b/0", 4, 30, 0, 0), ("grpo_sft", "", 2, 0, 0, 9)]
    paths.TIMING_TABLE.parent.mkdir(exist_ok=True)
    methods = {"mine": {"method": "grpo"}, "grpo_sft": {"method": "sft"}}  # a name says nothing
    paths.RECORD.write_text(json.dumps({"experiments": methods}))
    paths.TIMING_TABLE.write_text("\n".join(",".join(map(str, row)) for row in (columns, *runs)))
    assert "on this machine (2 in the runs of reports/timing.csv)" in grpo("plan")[1]


# --------------------------------------------------------------------------------------------------------- what a study can see


CLAIM: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 0.05, "at": "last_step"})
MANY = 1000
ACROSS = Beats(
    experiment="grpo_baselines", arm="reinforce_with_baseline", beats="grpo_length_normalization/masked_mean", by=0.05
)


def test_one_seed_borrows_the_spread_of_five_equal_runs_for_each_of_two_arms() -> None:
    assert precision((0.3, 0.0), 1, 1) == (pytest.approx(math.sqrt(2) * 0.045), 4)


@pytest.mark.parametrize(("sd", "seeds", "problems"), [(0.07, 5, 384), (0.02, 3, 64), (0.1, 15, 64)])
def test_simulated_studies_find_the_stated_difference_and_rarely_err(sd: float, seeds: int, problems: int) -> None:
    """At the margin any decision is an error, at most 5%; at the stated distance from it 80% are found."""
    rng, smallest = np.random.default_rng(1), smallest_seen(*precision((sd, 0.05), seeds, problems))

    def verdicts(truth: float) -> list[str]:
        found = []
        for _ in range(MANY):
            over_seeds, over_problems = rng.normal(truth, sd, (seeds, 1)), rng.normal(0, math.sqrt(0.05), problems)
            pairs = Pairs("a", "b", [*range(seeds)], over_seeds + over_problems, np.empty((seeds, 0)))
            found.append(decide_by(CLAIM, [pairs]).verdict)
        return found

    error = 3 * math.sqrt(0.05 * 0.95 / MANY)  # of the simulation
    null = verdicts(0.05)
    assert sum(one in (HOLDS, DOES_NOT_HOLD, SAME) for one in null) / MANY <= 0.05 + error
    no_difference = verdicts(0.0)
    assert sum(one == HOLDS for one in no_difference) / MANY <= 0.025
    for truth, verdict in ((0.05 + smallest, {HOLDS}), (0.05 - smallest, {DOES_NOT_HOLD, SAME})):
        assert sum(one in verdict for one in verdicts(truth)) / MANY >= 0.8 - 2 * error


@pytest.mark.usefixtures("workdir")
def test_the_plan_says_what_each_claim_can_see_and_where_only_one_answer_is_possible(mini_study: Study) -> None:
    def rows(study: Study) -> dict[str, dict[str, Any]]:
        return {row["claim"] or row["experiment"]: row for row in plan(study, None, None)["power"]}

    found = rows(mini_study)
    assert found["std-normalization"]["seeds"] == 5 and not found["std-normalization"]["measured"]
    assert found["one-step-behind"]["seeds"] == 3 and found["one-step-behind"]["sees"] > found["std-normalization"]["sees"]
    assert found["std-entropy"]["ratio"] and found["std-entropy"]["margin"] == pytest.approx(1.25)
    assert found["prompt"]["note"] == "by design" and found["prompt"]["problems"] == 128
    fewer = rows(with_values(mini_study, {"experiments.grpo_baselines.seeds": 2, "claims": [ACROSS]}))
    assert {row["seeds"] for name, row in fewer.items() if name.startswith("own-")} == {2}  # as many pairs as both have
    enough = found["std-normalization"]["seeds_for_margin"]
    at, before = (smallest_seen(*precision((0.07, OVER_PROBLEMS), seeds, 384)) for seeds in (enough, enough - 1))
    assert at <= 0.05 < before and not found["std-normalization"]["more_problems"]
    few = rows(with_values(mini_study, {"evaluation.last_problems": 256}))["std-normalization"]  # 64 of them judge
    assert few["seeds_for_margin"] is None and few["more_problems"]
    short = rows(with_values(mini_study, {"grpo.n_grpo_steps": 8, "seeds": [0]}))
    assert "only *not tested*: it is about step 48, and the runs take 8" in short["std-normalization"]["note"]
    assert "needs two seeds" in short["std-entropy"]["note"] and "borrow" not in short["std-entropy"]["note"]
    write_json(paths.RECORD, {"study": mini_study.study, "experiments": {}})
    differences = np.array([[0.1, 0.3], [0.2, 0.2], [0.6, 0.4]])  # means .2, .2 and .5
    write_pairs(paths.PAIRS, {"std-normalization": Pairs("a", "b", [0, 1, 2], differences, np.empty((3, 0)))})
    measured = rows(mini_study)["std-normalization"]
    assert measured["measured"] and measured["spread"] == pytest.approx(np.std([0.2, 0.2, 0.5], ddof=1))
    assert power_table([measured])[0].endswith("0.173")
    assert "0.070*" in power_table([found["std-normalization"]])[0]
