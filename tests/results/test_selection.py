"""Selection of an experiment's winner from made-up run folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
from report_parts import run
from study_parts import RANKED_BY, with_values

from grpo.common.errors import UserError
from grpo.results.runs import mean_of_last
from grpo.results.selection import read_result, select, winner_file
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
    """Three arms, one seed, the last two evaluations count."""
    return with_arms(mini_study, EXPERIMENT, {name: {"learning_rate": rate} for name, rate in RATES.items()})


def with_arms(study: Study, experiment: str, arms: dict[str, Any]) -> Study:
    selection = {"selection.last_k": 2, "selection.best_few": 2, "selection.pinned": {}}
    of = f"experiments.{experiment}"
    return with_values(study, {"seeds": [0], f"{of}.arms": arms, f"{of}.tie": "first", **selection})


def pinned_to(study: Study, arm: str, experiment: str = EXPERIMENT) -> Study:
    return with_values(study, {"selection.pinned": {experiment: arm}})


def right(share: float, shift: int = 0) -> list[int]:
    """The first ``share`` of the problems are answered right, counted from problem ``shift``."""
    return [int((i - shift) % N < share * N) for i in range(N)]


def write_run(
    arm: str,
    evaluations: list[list[int]],
    seed: int = 0,
    experiment: str = EXPERIMENT,
    overrides: dict[str, Any] | None = None,
    updates: int = 1,
    diverged: int | None = None,
) -> None:
    """A finished run's folder. The first evaluation is the untrained policy's."""
    rewards = [np.array(outcomes, dtype=float) for outcomes in evaluations]
    made = run(arm, rewards, seed, experiment, steps=1, diverged=diverged, updates=updates)
    made.config.update(overrides=overrides or {"learning_rate": RATES[arm]}, before=BEFORE)
    run_folders.write_run(made)


def always(share: float, shift: int = 0) -> list[list[int]]:
    """An untrained evaluation without a right answer, and two of ``share``."""
    return [right(0), right(share, shift), right(share, shift)]


def write_arms(seed: int = 0, diverged: int | None = None, **shares: float) -> None:
    for arm, share in shares.items():
        write_run(arm, always(share), seed, diverged=diverged)


# ------------------------------------------------------------------------------------------------------ what counts


def test_the_best_mean_of_the_last_evaluations_wins(study: Study) -> None:
    write_run("low", [right(s) for s in (0.1, 0.9, 0.2, 0.3)])
    write_run("middle", [right(s) for s in (0.1, 0.2, 0.5, 0.6)])
    write_run("high", [right(s) for s in (0.1, 0.5, 0.8, 0.1)])  # best at one time, and in the mean of all but the last
    result = select(study, EXPERIMENT)
    assert (result["winner"], result["leader"], result["tied"]) == ("middle", "middle", ["high"])
    assert result["overrides"] == {"learning_rate": 1e-4}
    assert result["pinned"] is False
    assert (result["metric"], result["last_k"]) == ("val/answer_reward", 2)
    assert result["reason"].startswith("leads, but cannot be told from high")
    assert result["value"] == pytest.approx(0.55)
    # Of the 200 problems 100 are right twice and 20 once: the mean's standard error is .4729 / sqrt(200) = .0334. One run has
    # an assumed standard deviation of .045 beside it; together .0561, and t has 9 degrees of freedom: 2.262.
    assert (result["low"], result["high"]) == pytest.approx((0.4232, 0.6768), abs=0.0002)

    low, middle, high = result["candidates"]
    assert [c["arm"] for c in (low, middle, high)] == ["low", "middle", "high"]
    assert [c["value"] for c in (low, middle, high)] == pytest.approx([0.25, 0.55, 0.45])
    assert middle["behind"] is None
    assert low["behind"]["value"] == pytest.approx(0.3) and high["behind"]["value"] == pytest.approx(0.1)
    assert low["behind"]["low"] > 0 > high["behind"]["low"]
    assert low["runs"] == [
        {
            "run": f"{EXPERIMENT}/low/0",
            "seed": 0,
            "identity": "low-0",
            "value": pytest.approx(0.25),
            "diverged_step": None,
            "diverged_reason": "",
        }
    ]
    assert low["diverged"] == []
    start = read_result(study, EXPERIMENT).arms[0].start  # one policy, whatever the runs: only problems vary
    assert (start.value, start.se) == (pytest.approx(0.1), pytest.approx((0.1 * 0.9 / 199) ** 0.5))
    json.dumps(result)  # it is written as JSON


@pytest.mark.parametrize(
    ("last_k", "expected"),
    [(1, [1, 0, 0]), (2, [1, 0.5, 0]), (3, [2 / 3, 1 / 3, 1 / 3]), (9, [2 / 3, 1 / 3, 1 / 3])],
)
def test_mean_of_each_problem_over_the_last_k(last_k: int, expected: list[float]) -> None:
    outcomes = np.array([[1, 1, 1], [0, 0, 1], [1, 1, 0], [1, 0, 0]], dtype=float)
    assert mean_of_last(outcomes, last_k) == pytest.approx(np.array(expected))


def test_a_run_without_any_evaluation_after_the_untrained_one_is_damaged(study: Study) -> None:
    """The mean of nothing would be a NaN, and every comparison with it false."""
    for arm in RATES:
        write_run(arm, always(0.3) if arm != "middle" else [right(0.2)])
    with pytest.raises(UserError, match=r"middle/0/outcomes.jsonl.*no evaluation after that of the untrained model"):
        select(study, EXPERIMENT)


def test_an_arm_counts_by_the_mean_over_its_seeds(study: Study) -> None:
    for arm, pair in {"low": (0.8, 0.2), "middle": (0.7, 0.68), "high": (0.5, 0.5)}.items():
        for seed, share in zip((3, 8), pair, strict=True):
            write_run(arm, always(share), seed)
    result = select(study.model_copy(update={"seeds": [3, 8]}), EXPERIMENT)
    low, middle, high = result["candidates"]
    assert result["leader"] == "middle"
    assert [c["value"] for c in (low, middle, high)] == pytest.approx([0.5, 0.69, 0.5])
    assert [(run["run"], run["value"]) for run in low["runs"]] == [
        (f"{EXPERIMENT}/low/3", pytest.approx(0.8)),
        (f"{EXPERIMENT}/low/8", pytest.approx(0.2)),
    ]
    # `low` and `high` are as far behind, but of the former's two runs one was better than both of the leader's.
    assert result["tied"] == ["low"]
    assert high["behind"]["low"] > 0 > low["behind"]["low"]


def test_a_missing_run_is_named_with_its_stage(study: Study) -> None:
    write_arms(low=0.1, high=0.1)
    with pytest.raises(UserError, match=r"middle/0: no finished run.*dvc repro train@grpo_learning_rate-middle-0"):
        select(study, EXPERIMENT)
    write_arms(middle=0.1)
    with pytest.raises(UserError, match=r"low/7: no finished run.*dvc repro train@grpo_learning_rate-low-7"):
        select(study.model_copy(update={"seeds": [0, 7]}), EXPERIMENT)


# ------------------------------------------------------------------------------------------------------------- ties

# Share of right answers, and the problem from which on they are counted. 0.60 and (0.58, 80) differ by 2 points, but each is
# right on 38% and 40% of the problems at which the other fails.
TIE = {"low": (0.1, 0), "middle": (0.58, 80), "high": (0.60, 0)}
LEADER_FIRST = {"low": (0.1, 0), "middle": (0.60, 0), "high": (0.58, 80)}
ALL_TIED = {"low": (0.57, 140), "middle": (0.60, 0), "high": (0.58, 80)}
ALIKE = dict.fromkeys(RATES, (0.5, 0))


@pytest.mark.parametrize(
    ("arms", "tie", "winner", "leader", "tied", "reason"),
    [
        (TIE, "first", "middle", "high", ["middle"], r"cannot be told from high, which leads with 0\.600; .*earlier.*wins"),
        (TIE, "leader", "high", "high", ["middle"], "leads, but cannot be told from middle; no arm is simpler .* leader wins"),
        (LEADER_FIRST, "first", "middle", "middle", ["high"], r"leads, but cannot be told from high; .*earlier.*wins"),
        (ALL_TIED, "first", "low", "middle", ["low", "high"], r"cannot be told from middle, .*\(nor can high\)"),
        (ALIKE, "first", "low", "low", ["middle", "high"], "leads, but cannot be told from middle, high"),
    ],
)
def test_of_tied_arms_the_earlier_wins_and_the_reason_says_so(
    study: Study, arms: dict[str, tuple[float, int]], tie: str, winner: str, leader: str, tied: list[str], reason: str
) -> None:
    for arm, (share, shift) in arms.items():
        write_run(arm, always(share, shift))
    result = select(with_values(study, {f"experiments.{EXPERIMENT}.tie": tie}), EXPERIMENT)
    assert (result["winner"], result["leader"], result["tied"]) == (winner, leader, tied)
    assert result["overrides"] == {"learning_rate": RATES[winner]} and result["value"] == pytest.approx(arms[winner][0])
    assert re.match(reason, result["reason"]) and not (arms["low"][0] < 0.2 and "low" in result["reason"])
    for candidate in result["candidates"]:
        assert candidate["arm"] == leader or (candidate["behind"]["low"] <= 0) == (candidate["arm"] in tied)


# ------------------------------------------------------------------------------------------------------- divergence


def test_an_arm_of_which_a_run_diverged_cannot_win(study: Study) -> None:
    for seed in (0, 1):
        write_arms(seed, low=0.2, middle=0.5)
        write_arms(seed, high=0.9, diverged=15 if seed else None)
    result = select(study.model_copy(update={"seeds": [0, 1]}), EXPERIMENT)
    assert (result["winner"], result["leader"], result["tied"]) == ("middle", "middle", [])
    assert result["reason"].endswith("; left out because a run collapsed: high")
    high = result["candidates"][2]
    assert high["diverged"] == [f"{EXPERIMENT}/high/1"]
    assert [run["diverged_step"] for run in high["runs"]] == [None, 15]
    assert high["runs"][1]["diverged_reason"] == "answer reward under its start"
    assert high["behind"]["value"] == pytest.approx(-0.4)


def test_an_arm_that_diverged_is_not_tied_either(study: Study) -> None:
    write_run("low", always(0.59, shift=80), diverged=10)
    write_arms(middle=0.2, high=0.6)
    result = select(study, EXPERIMENT)
    assert (result["winner"], result["tied"]) == ("high", [])


def test_where_all_arms_diverged_the_best_still_wins(study: Study) -> None:
    write_arms(low=0.2, middle=0.5, high=0.3, diverged=5)
    result = select(study, EXPERIMENT)
    assert (result["winner"], result["leader"]) == ("middle", "middle")
    assert all(candidate["diverged"] for candidate in result["candidates"])


# ---------------------------------------------------------------------------------------------------------- by hand


def test_a_pinned_arm_wins_and_the_reason_names_the_leader(study: Study) -> None:
    write_arms(low=0.1, middle=0.5, high=0.2)
    result = select(pinned_to(study, "high"), EXPERIMENT)
    assert (result["winner"], result["leader"], result["pinned"]) == ("high", "middle", True)
    assert (result["value"], result["overrides"]) == (pytest.approx(0.2), {"learning_rate": 1e-3})
    assert re.search(r"pinned by hand.*although middle leads \(0\.500\)", result["reason"])
    result = select(pinned_to(study, "middle"), EXPERIMENT)
    assert (result["winner"], result["pinned"]) == ("middle", True)
    assert re.search(r"pinned by hand.*which also leads", result["reason"])


# --------------------------------------------------------------------------------------------------- off-policy sweeps

ARMS = {  # name -> updates on a rollout batch, share of right answers
    "once": (1, 0.9),
    "two": (2, 0.3),
    "four": (4, 0.8),
    "eight": (8, 0.6),
    "sixteen": (16, 0.5),
}


def write_sweep(
    study: Study, experiment: str = SWEEP, shares: dict[str, float] | None = None, diverged: tuple[str, ...] = ()
) -> Study:
    for arm, (updates, share) in ARMS.items():
        share = (shares or {}).get(arm, share)
        own = {"epochs_per_rollout_batch": updates}
        write_run(arm, always(share), 0, experiment, own, updates, diverged=5 if arm in diverged else None)
    return with_arms(study, experiment, {arm: {"epochs_per_rollout_batch": updates} for arm, (updates, _) in ARMS.items()})


def ranking(study: Study) -> list[str]:
    return [arm["arm"] for arm in select(study, SWEEP)["off_policy_ranking"]]


@pytest.mark.parametrize(
    ("best_few", "expected"),
    [(1, ["four"]), (3, ["four", "eight", "sixteen"]), (9, ["four", "eight", "sixteen", "two"])],
)
def test_a_sweep_ranks_its_best_off_policy_arms_by_their_means(study: Study, best_few: int, expected: list[str]) -> None:
    study = write_sweep(study)
    result = select(with_values(study, {"selection.best_few": best_few}), SWEEP)
    assert result["winner"] == "once"  # an on-policy arm may win, but is not ranked
    assert result["candidates"][1]["behind"]["level"] == pytest.approx(1 - 2 * (1 - 0.95**0.25))  # one of four contrasts
    overrides = [{"epochs_per_rollout_batch": ARMS[arm][0]} for arm in expected]
    assert result["off_policy_ranking"] == [
        {"arm": arm, "overrides": own} for arm, own in zip(expected, overrides, strict=True)
    ]


def test_arms_that_diverged_come_last_in_the_ranking(study: Study) -> None:
    """Where too few others are left they fill it up, so that later stages have something to run."""
    assert ranking(write_sweep(study, diverged=("four", "sixteen"))) == ["eight", "two"]
    assert ranking(write_sweep(study, diverged=("four", "eight", "sixteen"))) == ["two", "four"]
    off_policy = ("two", "four", "eight", "sixteen")
    assert ranking(write_sweep(study, diverged=off_policy)) == ["four", "eight"]
    assert ranking(write_sweep(study, diverged=("once", *off_policy))) == ["four", "eight"]


def test_arms_that_collapsed_without_divergence_come_last_too(study: Study) -> None:
    study = write_sweep(study, shares={"eight": 0.35, "sixteen": 0.2})
    write_run("four", [right(0), right(0.95), right(0.4), right(0.4)], 0, SWEEP, {"epochs_per_rollout_batch": 4}, 4)
    assert ranking(study) == ["eight", "two"]


def test_a_pinned_arm_leads_the_ranking(study: Study) -> None:
    study = write_sweep(study)
    assert ranking(pinned_to(study, "two", SWEEP)) == ["two", "four"]
    assert ranking(pinned_to(study, "once", SWEEP)) == ["four", "eight"]  # not off-policy
    study = write_sweep(study, diverged=("two", "four"))
    assert ranking(pinned_to(study, "two", SWEEP)) == ["two", "eight"]


def test_an_off_policy_winner_stands_first_in_the_ranking(study: Study) -> None:
    """It wins a tie as the simpler arm, and what later experiments build on is the same by rank and by winner."""
    study = write_sweep(study, shares={"once": 0.1, "two": 0.79})
    result = select(study, SWEEP)
    assert (result["leader"], result["winner"]) == ("four", "two")
    assert [arm["arm"] for arm in result["off_policy_ranking"]] == ["two", "four"]


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
    write_arms(high=0.3, diverged=5)
    after = select(study, EXPERIMENT)
    assert before["candidates"] != after["candidates"]
    assert json.dumps(winner_file(after)) == json.dumps(winner_file(before))
    # Nor does it say how the winner won.
    assert json.dumps(winner_file(select(pinned_to(study, "middle"), EXPERIMENT))) == json.dumps(winner_file(before))
    write_arms(high=0.8)
    assert winner_file(select(study, EXPERIMENT))["winner"] == "high"


def test_a_sweeps_winner_file_changes_with_its_ranking_only(study: Study) -> None:
    def file(**shares: float) -> str:
        return json.dumps(winner_file(select(write_sweep(study, shares=shares), SWEEP)))

    before = file()
    assert file(two=0.1, sixteen=0.2) == before  # below the best two
    assert file(four=0.75, eight=0.65) == before  # the same order
    assert file(four=0.6, eight=0.8) != before
    assert file(sixteen=0.7) != before


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
