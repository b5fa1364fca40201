"""Selection of an experiment's winner from made-up run folders."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_parts
from numpy.typing import NDArray
from report_parts import run, solved
from study_parts import RANKED_BY, with_values

from grpo.common.errors import UserError
from grpo.results.selection import select, winner_file
from grpo.study.effective import read_selections
from grpo.study.schema import Study

pytestmark = pytest.mark.usefixtures("workdir")
EXPERIMENT = "grpo_learning_rate"
SWEEP = "grpo_off_policy_sweep_broad"
BEFORE = [{"experiment": "sft_experiment", "winner": "all", "overrides": {}}]  # as the runs of these tests have it
N = 200  # validation problems
RATES = {"low": 1e-5, "middle": 1e-4, "high": 1e-3}


@pytest.fixture
def study(mini_study: Study) -> Study:
    """Three arms, one seed."""
    return with_arms(mini_study, EXPERIMENT, {name: {"learning_rate": rate} for name, rate in RATES.items()})


def with_arms(study: Study, experiment: str, arms: dict[str, Any]) -> Study:
    selection = {"selection.best_few": 2, "selection.pinned": {}}
    return with_values(study, {"seeds": [0], f"experiments.{experiment}.arms": arms, **selection})


def pinned_to(study: Study, arm: str) -> Study:
    return with_values(study, {"selection.pinned": {EXPERIMENT: arm}})


def right(share: float) -> NDArray[np.float64]:
    """The first ``share`` of the problems are answered right."""
    return solved(share, N)


def write_run(
    arm: str, share: float, diverged: bool = False, judged: float | None = None, seed: int = 0, **config: Any
) -> None:
    """A finished run's folder: an untrained evaluation without a right answer, and two of ``share``.

    Args:
        judged: share of as many further problems of the last evaluation, which judge; the others then select.
    """
    experiment, ended = config.pop("experiment", EXPERIMENT), 5 if diverged else None
    made = run(arm, [right(0.0), right(share), right(share)], seed, experiment, diverged=ended)
    if judged is not None:
        made = replace(made, last=np.concatenate([right(share), right(judged)]), selection_problems=N)
    made.config.update({"overrides": {"learning_rate": RATES.get(arm, 1.0)}, "before": BEFORE} | config)
    report_parts.write_run(made)


def write_arms(**shares: float) -> None:
    for arm, share in shares.items():
        write_run(arm, share)


def test_a_missing_run_is_named_with_its_stage(study: Study) -> None:
    write_arms(low=0.1, high=0.1)
    with pytest.raises(UserError, match=r"middle/0: no finished run.*dvc repro train@grpo_learning_rate-middle-0"):
        select(study, EXPERIMENT)
    write_arms(middle=0.1)
    with pytest.raises(UserError, match=r"low/7: no finished run.*dvc repro train@grpo_learning_rate-low-7"):
        select(study.model_copy(update={"seeds": [0, 7]}), EXPERIMENT)


# ---------------------------------------------------------------------------------------------------------- the winner


@pytest.mark.parametrize(
    ("shares", "changes", "found", "reason"),
    [
        # Of one run an arm the difference has a standard error of .0636 between runs alone.
        ((0.1, 0.55, 0.6), {}, ("middle", "high", "middle"), "within one standard error of high, which leads, and before it"),
        ((0.1, 0.5, 0.6), {}, ("high", "high", "middle"), "leads by 0.100, standard error 0.067"),
        ((0.1, 0.5, 0.2), {"pinned": "high"}, ("high", "middle", "high"), "pinned by hand .* without that, middle would win"),
        ((0.2, 0.5, 0.9), {"diverged": ("high",)}, ("middle", "middle", "low"), ".*; left out because a run collapsed: high"),
        (
            (0.2, 0.5, 0.9),
            {"diverged": ("low", "high")},
            ("middle", "middle", None),
            "the only arm that may win; left out .*: low",
        ),
        ((0.2, 0.5, 0.3), {"diverged": tuple(RATES)}, ("middle", "middle", "high"), "leads by 0.200"),  # the best still wins
    ],
)
def test_the_first_arm_within_one_standard_error_of_the_leader_wins(
    study: Study, shares: tuple[float, ...], changes: dict[str, Any], found: tuple[str | None, ...], reason: str
) -> None:
    ends = dict(zip(RATES, shares, strict=True))
    diverged = changes.get("diverged", ())
    for arm, share in ends.items():
        write_run(arm, share, arm in diverged)
    pinned = changes.get("pinned")
    result = select(pinned_to(study, pinned) if pinned else study, EXPERIMENT)
    assert (result["winner"], result["leader"], result["runner_up"]) == found and result["pinned"] == bool(pinned)
    assert result["overrides"] == {"learning_rate": RATES[found[0]]}
    assert result["value"] == pytest.approx(ends[found[0]], abs=0.006)
    assert re.match(reason, result["reason"])
    assert [c["arm"] for c in result["candidates"] if c["collapsed"]] == list(diverged)


def test_an_arm_of_which_some_runs_collapsed_wins_before_one_that_collapsed_wholly(study: Study) -> None:
    for seed in (0, 1):
        for arm, share in {"low": 0.9, "middle": 0.2, "high": 0.8}.items():
            write_run(arm, share, arm != "middle" or seed == 0, seed=seed)
    assert select(study.model_copy(update={"seeds": [0, 1]}), EXPERIMENT)["winner"] == "middle"


def test_a_setting_stands_with_its_best_rate(mini_study: Study) -> None:
    shares = {"one": 0.5, "two-rate_half": 0.8, "two-rate_same": 0.1}
    write_arms(**shares)
    result = select(with_arms(mini_study, EXPERIMENT, {arm: {} for arm in shares}), EXPERIMENT)
    assert (result["winner"], result["runner_up"]) == ("two-rate_half", "one")
    found = [(c["setting"], c["chosen"], c["selection"], c["value"]) for c in result["candidates"]]
    assert found == [("one", True, 0.5, 0.5), ("two", True, 0.8, 0.8), ("two", False, 0.1, 0.1)]


# --------------------------------------------------------------------------------------------------- off-policy sweeps

ARMS = {  # name -> updates on a rollout batch, share of right answers
    "once": (1, 0.9),
    "two": (2, 0.3),
    "four": (4, 0.8),
    "eight": (8, 0.6),
    "sixteen": (16, 0.5),
}


def write_sweep(study: Study, experiment: str = SWEEP, diverged: tuple[str, ...] = (), **shares: float) -> Study:
    for arm, (updates, share) in ARMS.items():
        share = shares.get(arm, share)
        judged = 0.85 - share / 10  # in reverse order, and not to rank by
        own = {"overrides": {"epochs_per_rollout_batch": updates}, "updates_per_rollout_batch": updates}
        write_run(arm, share, arm in diverged, judged, experiment=experiment, **own)
    return with_arms(study, experiment, {arm: {"epochs_per_rollout_batch": updates} for arm, (updates, _) in ARMS.items()})


@pytest.mark.parametrize(
    ("best_few", "pinned", "changes", "winner", "ranking"),
    [
        (1, None, {}, "once", ["four"]),  # an on-policy arm may win, but is not ranked
        (9, None, {}, "once", ["four", "eight", "sixteen", "two"]),
        # Runs that diverged come last; where too few others are left they fill it up, so that later stages can run.
        (2, None, {"diverged": ("four", "sixteen")}, "once", ["eight", "two"]),
        (2, None, {"diverged": ("four", "eight", "sixteen")}, "once", ["two", "four"]),
        (2, None, {"diverged": tuple(ARMS)}, "once", ["four", "eight"]),
        (2, "two", {}, "two", ["two", "four"]),
        (2, ["once", "sixteen", "two"], {"diverged": ("sixteen",)}, "once", ["sixteen", "two"]),  # as in another study
        (2, "two", {"diverged": ("two", "four")}, "two", ["two", "eight"]),
        (2, None, {"once": 0.1, "two": 0.79}, "two", ["two", "four"]),  # it wins as the earlier arm, within one error of four
    ],
)
def test_a_sweep_ranks_its_best_off_policy_arms(
    study: Study, best_few: int, pinned: str | list[str] | None, changes: dict[str, Any], winner: str, ranking: list[str]
) -> None:
    """The winner, if it is one of them, then by mean."""
    study = write_sweep(study, **changes)
    changed = {"selection.best_few": best_few, "selection.pinned": {SWEEP: pinned} if pinned else {}}
    result = select(with_values(study, changed), SWEEP)
    expected = [{"arm": arm, "overrides": {"epochs_per_rollout_batch": ARMS[arm][0]}} for arm in ranking]
    assert (result["winner"], result["off_policy_ranking"]) == (winner, expected)


def test_only_sweeps_that_others_go_on_with_are_ranked(study: Study) -> None:
    assert set(RANKED_BY.values()) == {"grpo_off_policy_sweep_broad", "grpo_off_policy_sweep_focused"}
    for experiment in [*RANKED_BY.values(), "grpo_learning_rate", "leaderboard"]:
        result = select(write_sweep(study, experiment), experiment)
        assert ("off_policy_ranking" in result) == (experiment in RANKED_BY.values())


# ------------------------------------------------------------------------------------------------------ the two files


def test_the_winner_file_stays_while_only_losing_arms_change(study: Study) -> None:
    write_arms(low=0.1, middle=0.5, high=0.2)
    before = select(study, EXPERIMENT)
    values = {"learning_rate": 1e-4}
    assert winner_file(before) == {"experiment": EXPERIMENT, "winner": "middle", "overrides": values, "before": BEFORE}
    write_arms(low=0.15, middle=0.55)
    write_run("high", 0.3, diverged=True)
    after = select(study, EXPERIMENT)
    assert before["candidates"] != after["candidates"]
    assert json.dumps(winner_file(after)) == json.dumps(winner_file(before))
    # Nor does it say how the winner won.
    assert json.dumps(winner_file(select(pinned_to(study, "middle"), EXPERIMENT))) == json.dumps(winner_file(before))
    write_arms(high=0.8)
    assert winner_file(select(study, EXPERIMENT))["winner"] == "high"


def test_selections_of_the_experiments_before_are_read(mini_study: Study) -> None:
    def write(experiment: str, *before: dict[str, Any]) -> dict[str, Any]:
        content = {"experiment": experiment, "winner": "low", "overrides": {}}
        Path("reports/select").mkdir(parents=True, exist_ok=True)
        Path(f"reports/select/{experiment}.json").write_text(json.dumps(content | {"before": before}))
        return content

    assert read_selections(mini_study, "grpo_learning_rate") == []
    with pytest.raises(UserError, match=r"grpo_learning_rate\.json.*select@grpo_learning_rate"):
        read_selections(mini_study, "grpo_baselines")
    first = write("grpo_learning_rate")
    assert read_selections(mini_study, "grpo_baselines") == [first]
    second = write("grpo_baselines", first)
    assert read_selections(mini_study, "grpo_length_normalization") == [first, second]
