"""The tables of an experiment and the rows of results.csv, from made-up runs whose cells can be found by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_parts import arm_result, collapse, each, record, result, run
from study_parts import ROOT, with_values

from grpo.common.yaml_file import parse_yaml
from grpo.reporting import rollouts, sections, tables, what_it_would_take
from grpo.reporting.discussion import numbers_of
from grpo.reporting.figures import curve_table
from grpo.reporting.tables import KINDS, details_table, experiment_table, further_sets_table, mixture_table, result_row
from grpo.reporting.timing import times_of_arms
from grpo.results.findings import AGREES, DISAGREES, ArmResult, Verdict, VerdictName
from grpo.results.runs import Run, mean_curve
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import AlsoEvaluated

EXPERIMENT = "grpo_baselines"


def verdict(name: VerdictName) -> Verdict:
    return Verdict("id", "e", "s", name, "r", reported={"x-2025": "yes"}, measured="1")


def made_up(arm: str, *rewards: float, seed: int = 0, **options: Any) -> Run:
    """A run that is evaluated after every step; all problems have the same reward."""
    history = {"steps": 2, "gradient_norm": [0.5 + seed, 2.25 - seed], "token_entropy": [0.9, 0.1 + 0.2 * seed]}
    return run(arm, [each(reward) for reward in rewards], seed, "grpo_baselines", every=1, **history | options)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]


def numbers_of_arms(study: Study, runs: list[Run], *arms: ArmResult, last_k: int = 1) -> dict[str, Any]:
    return numbers_of(study, runs, result(*arms, last_k=last_k))


def test_rewards_on_further_sets_and_on_the_tasks_of_a_mixture(mini_study: Study) -> None:
    """Means of two seeds at the first and the last value; a set that was not due, and a task never drawn, have none."""
    sums = {"use": "arithmetic", "train_size": 8, "validation_size": 8, "levels": 1, "seed": 0}
    also = {"hard": AlsoEvaluated(**sums, problems=4)}
    main = {"use": "mixture", "tasks": {"easy": sums, "rare": sums}}
    study = with_values(mini_study, {"tasks.main": main, "evaluation.also": also})
    runs = [made_up(arm, 0.0, 0.5, 1.0, seed=seed) for arm in ("a", "b") for seed in (0, 1)]
    for place, one in enumerate(runs):
        one.validation["val/also/hard/answer_reward"] = [0.25 * (place % 2), np.nan, 0.5]
        one.validation["val/easy/answer_reward"] = [0.0, 1.0, 0.25 * place]
        one.validation["val/rare/answer_reward"] = [np.nan] * 3
    assert cells(further_sets_table(study, runs))[2:] == [["hard", arm, "0.125", "0.500", "2"] for arm in ("a", "b")]
    assert cells(mixture_table(study, runs))[2:] == [["easy", "a", "0.000", "0.125", "2"], ["easy", "b", "0.000", "0.625", "2"]]
    assert further_sets_table(mini_study, runs) == mixture_table(mini_study, runs) == ""


def test_the_cells_of_an_experiments_table(mini_study: Study) -> None:
    """Reward is the form's share times the accuracy given the form; a collapsed run is counted separately."""
    formed = {"forms": [0.5, 0.8, 1.0], "validation": {"val/response_length": [9.0, 20.0, 22.0]}}
    runs = [run("a", [0.25, 0.5, 0.75], seed, **formed) for seed in (0, 1)]
    runs += [run("b", [0.25, 0.5, 0.5], 0), run("b", [0.25, 0.5, 0.0], 1, diverged=16)]
    fallen = collapse("b", 1, "divergence")
    found = numbers_of_arms(
        mini_study, runs, arm_result("a", 0.625), arm_result("b", 0.5, (0.125, 0.05, 0.2), fallen), last_k=2
    )
    head, _, a, b = cells(experiment_table(found))
    assert dict(zip(head, a, strict=True)) == {
        "arm": "**a**",
        "at start": "0.100",
        "answer reward, mean of the last 2 evaluations (95% over runs and problems)": "0.625 (0.575 to 0.675)",
        "below a": "leads",
        "form right": "0.900",
        "answer right, given the form": "0.694",  # .625 / .9
        "response length": "21.0",
        "runs that collapsed": "0 of 2",
    }
    assert b == ["b", "0.100", "0.500 (0.450 to 0.550)", "0.125 (0.050 to 0.200)", "1.000", "0.500", "20.0", "1 of 2"]


def test_the_cells_that_explain_an_arm(mini_study: Study) -> None:
    runs = [
        run("a", [0.25, 0.5, 0.75], seed, token_entropy=[0.9, 0.1 + 0.2 * seed], gradient_norm=[0.5, 2.25]) for seed in (0, 1)
    ]
    found = numbers_of_arms(mini_study, runs, arm_result("a", 0.75, start=0.25))
    head, _, a = cells(details_table(found, {"a": (60.4, 0.125)}))
    assert dict(zip(head, a, strict=True)) == {
        "arm": "a",
        "best (step)": "0.750 (16)",
        "token entropy in training": "0.200",  # of .1 and .3, at the last step
        "gradient norm, median": "1.38",
        "largest": "2.25",
        "seconds": "60",
        "GPU-hours": "0.12",
    }
    assert "GPU-hours" not in details_table(found, {"a": (60.4, 0.0)})


def test_one_arm_has_no_distance_to_a_leader(mini_study: Study) -> None:
    table = cells(experiment_table(numbers_of_arms(mini_study, [run("a", [0.25, 0.5])], arm_result("a", 0.5, seeds=1))))
    assert len({len(row) for row in table}) == 1
    assert not any("below" in cell or "collapsed" in cell for cell in table[0])


def test_runs_with_fewer_evaluations_are_named_with_the_reason(mini_study: Study) -> None:
    """A run that was stopped early averages the evaluations it has, unlike what the column's head says."""
    runs = [run("a", [0.25, 0.5, 0.75, 0.75]), run("a", [0.25, 0.5], 1, cut=4)]
    runs += [run("b", [0.25, 0.5, 0.0], diverged=6), run("b", [0.25, 0.5, 0.5, 0.5], 1)]
    arms = arm_result("a", 0.5), arm_result("b", 0.25, (0.25, 0.2, 0.3), collapse("b"))
    table = experiment_table(numbers_of_arms(mini_study, runs, *arms, last_k=3))
    assert table.endswith(
        " |\n\nFewer evaluations than 3 count in: grpo_learning_rate/a/1 (1, time limit at step 4); "
        "grpo_learning_rate/b/0 (2, diverged at step 6).\n"
    )
    table = experiment_table(numbers_of_arms(mini_study, runs[:1], arm_result("a", 0.5, seeds=1), last_k=3))
    assert "Fewer" not in table and table.endswith(" |\n")


@pytest.mark.parametrize(("last_k", "reward", "counted"), [(1, 1.0, 1), (2, 0.625, 2), (9, 0.5, 3)])
def test_a_row_of_the_results_says_how_many_evaluations_counted(
    last_k: int, reward: float, counted: int, mini_study: Study
) -> None:
    row = result_row(with_values(mini_study, {"selection.last_k": last_k}), made_up("a", 0.0, 0.25, 0.25, 1.0))
    assert (row["answer_reward"], row["last_k"], row["evaluations_counted"]) == (pytest.approx(reward), last_k, counted)
    assert (row["last/token_entropy"], row["max/gradient_norm"]) == (0.1, 2.25)
    assert (row["experiment"], row["arm"], row["seed"], row["identity"], row["same_as"]) == (EXPERIMENT, "a", 0, "a-0", "")


def test_a_curve_is_the_mean_over_seeds() -> None:
    first, second = made_up("a", 0.0, 0.5), made_up("a", 0.0, 1.0, seed=1)
    assert mean_curve([first, second], "val/answer_reward").to_dict() == {0: 0.0, 1: 0.75}
    drawn = curve_table([first, second])
    assert drawn.to_dict("list") == {
        "arm": ["a"] * 4, "seed": [0, 0, 1, 1], "step": [0, 1, 0, 1], "answer_reward": [0.0, 0.5, 0.0, 1.0],
    }  # fmt: skip


def test_seconds_are_of_the_run_that_was_trained_and_of_all_seeds(mini_study: Study, workdir: Path) -> None:
    for name, seconds in (("grpo_baselines/a/0", 0.0), ("grpo_learning_rate/x/0", 36.0), ("grpo_baselines/a/1", 72.0)):
        path = paths.run_timing(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        timing = {"total_s": seconds, "phases": {}, "steps": [], "mlflow_run_id": "", "same_as": None}
        path.write_text(json.dumps(timing | {"git_commit": "", "git_changed": "false", "hardware": {}}))
    runs = [made_up("a", 0.0, 0.5), made_up("a", 0.0, 0.5, seed=1)]
    runs[0].config["same_as"] = "grpo_learning_rate/x/0"
    assert times_of_arms(with_values(mini_study, {"resources.train.gpus": 2}), runs) == {"a": (108.0, pytest.approx(0.06))}


def test_the_summary_counts_verdicts_and_takes_the_most_samples(mini_study: Study, workdir: Path) -> None:
    interval = {"value": 0.25, "low": 0.125, "high": 0.5, "problems": 4}
    shares = {"categories": {"right": 1, "wrong": 3}, "answer_reward": 0.25, "accuracy": interval, "response_length": 8.0}
    parts = {f"accuracy_by_{by}": {"1": interval} for by in ("level", "subject")}
    baseline = {prompt: shares | parts | {"problems": 4} for prompt in mini_study.evaluation.zero_shot_prompts}
    kinds = {n: {kind: {"value": value, "low": 0.0, "high": 1.0} for kind in KINDS} for n, value in (("1", 0.25), ("8", 0.75))}
    sampled = {prompt: {"n": kinds} for prompt in mini_study.evaluation.best_of_n.prompts}
    claims = [verdict(name) for name in (AGREES, DISAGREES, AGREES)]
    unknown = {"undecided": []}
    tables.write_tables(record(mini_study, {}, *claims, baseline=baseline, sampled=sampled, unknown=unknown))
    summary = json.loads(paths.SUMMARY.read_text())
    assert summary["claims"] == {"agrees": 2, "disagrees": 1}
    assert summary["best_of_n"]["r1_zero"] == {"pass_at_8": 0.75, "best_at_8": 0.75, "majority_at_8": 0.75}
    assert summary["zero_shot"]["r1_zero"] == 0.25


def test_an_entry_of_the_leaderboard_is_scored_on_the_whole_set(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "time_row", lambda *_: {"seconds": 12.5})
    run = made_up("a", 0.0, 0.5, cut=3)
    run.metrics.update({"full/answer_reward": 0.5, "full/problems": 96, "steps": 3})
    run.config["config"] = {"wall_clock_limit_s": {"value": 60.0}}
    entry = sections.leaderboard_entry(mini_study, run)
    assert entry["score"] == "0.500 (0.402 to 0.598)"  # Wilson: 1.96 / (2 sqrt(96 + 1.96^2)) = .098 to both sides
    assert {key: entry[key] for key in ("problems", "steps", "seconds", "limit", "cut")} == {
        "problems": 96, "steps": 3, "seconds": 12.5, "limit": 60.0, "cut": True,
    }  # fmt: skip


def test_samples_before_and_after_are_the_winners(workdir: Path) -> None:
    columns = {"prompt": "p", "response": "r", "ground_truth": "1", "reward": 1.0, "token_entropy": 0.5}
    columns |= {"format_reward": 1.0, "answer_reward": 1.0}
    for arm in ("a", "b"):
        folder = Path(f"data/runs/{EXPERIMENT}/{arm}/0")
        folder.mkdir(parents=True)
        records = [{"step": step, "problem": f"{arm}{i}", **columns} for step in (0, 5, 10) for i in range(4)]
        records[8]["response"], records[9]["answer_reward"] = "4 - 5 = 1.", 0.0  # right by a wrong step; wrong
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = rollouts.before_and_after(f"{EXPERIMENT}/b/0")
    assert [(record["step"], record["problem"]) for record in shown] == [(0, "b2"), (0, "b3"), (10, "b2"), (10, "b3")]


def test_a_selection_and_the_report_are_made_again_when_the_code_changes_that_computes_them() -> None:
    stages = parse_yaml(ROOT / "dvc.yaml")["stages"]
    assert "grpo/results" in stages["select"]["do"]["deps"]
    assert {"grpo/reporting", "grpo/results"} <= set(stages["report"]["deps"])


def test_the_hours_of_missing_runs() -> None:
    """Three seeds are there of five: two more of each arm, 1,800 and 5,400 s; the command makes a third arm's too."""
    row = {"experiments": ["e", "f"], "arms": ["a", "b"], "seeds": [0, 1, 2], "seeds_needed": 5, "needs_runs_of": ["e", "f"]}
    seconds = {"e/a": 1800.0, "e/c": 900.0, "f/b": 5400.0, "g/a": 1e9}
    assert what_it_would_take.hours(row, seconds) == (4.0, 4.5)
    assert what_it_would_take.hours(row | {"seeds_needed": 3}, seconds) == (0.0, 0.0)
    assert what_it_would_take.hours(row | {"seeds_needed": 2}, seconds) == (0.0, 0.0)  # not less than none
    assert what_it_would_take.hours(row | {"seeds_needed": None}, seconds) is None
    assert what_it_would_take.hours(row, seconds | {"f/b": 0.0}) == (1.0, 1.5)  # taken over from an equal run
