"""The cells of tables, results.csv and summary.json, from a record small enough to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_parts import run, store, store_general, study_of
from study_parts import with_values

from grpo.reporting import record as recording
from grpo.reporting.tables import (
    best_of_n_table,
    claims_table,
    experiment_table,
    further_tables,
    results_table,
    write_tables,
    zero_shot_table,
)
from grpo.results.evidence import Evidence
from grpo.results.runs import by_arm
from grpo.study import paths
from grpo.study.schema import Study

LORA = "grpo_lora"


def cells(table: str) -> list[list[str]]:
    """The cells of a table without the line below its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def arm(name: str, value: float, **changes: Any) -> dict[str, Any]:
    return {
        "arm": name, "label": name, "setting": name, "chosen": True, "learning_rate": 1e-3, "overrides": {name: 1},
        "runs": ["r/0", "r/1"], "collapsed": [], "value": value, "low": value - 0.05, "high": value + 0.05, "selection": 0.5,
        "start": 0.1, "format": 0.9, "given_form": value / 0.9, "length": 21.0, "below": None,
    } | changes  # fmt: skip


def entry(*arms: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"arms": list(arms), "winner": "a", "leader": "a", "title": "t", "extra": extra}


def test_the_cells_of_an_experiments_table() -> None:
    below = {"value": 0.125, "low": 0.05, "high": 0.2}
    other = arm("b", 0.5, below=below, collapsed=["r/1"])
    head, a, b = cells(experiment_table(entry(arm("a", 0.63), other, arm("tried", 0.1, chosen=False))))
    assert dict(zip(head, a, strict=True)) == {
        "arm": "**a**",
        "answer reward at the end (95%)": "0.630 (0.580 to 0.680)",
        "below the leader": "leads",
        "right form": "0.900",
        "right, given the form": "0.700",
        "tokens": "21.0",
        "collapsed": "0 of 2",
    }
    assert b == ["b", "0.500 (0.450 to 0.550)", "0.125 (0.050 to 0.200)", "0.900", "0.556", "21.0", "1 of 2"]


def test_a_column_for_starts_that_differ_and_none_for_one_arms_distance() -> None:
    head, first, second = cells(experiment_table(entry(arm("a", 0.5), arm("b", 0.5, start=0.4, below=arm("", 0.1)))))
    assert head[1] == "at start" and (first[1], second[1]) == ("0.100", "0.400")
    head, _ = cells(experiment_table(entry(arm("a", 0.5))))
    assert not any("below" in cell or "start" in cell for cell in head)


def test_rates_tried_stand_in_their_own_table() -> None:
    """Also those that were not chosen; a setting with one rate, or arms that all stand for themselves, have no such table."""
    tried = {"setting": "r", "label": "LoRA rank 1, rate 2e-3"}
    low = arm("r-rate_2", 0.7, learning_rate=2e-3, **tried)
    high = arm("r-rate_5", 0.0, learning_rate=5e-3, chosen=False, collapsed=["r/0"], selection=0.01, **tried)
    _, first, second = cells(further_tables(entry(arm("a", 0.8), high, low))["rates"])
    assert first == ["LoRA rank 1", "2e-3", "chosen", "0.500", "0.700 (0.650 to 0.750)", "0 of 2"]
    assert second == ["LoRA rank 1", "5e-3", "", "0.010", "0.000 (-0.050 to 0.050)", "1 of 2"]
    rates = [arm(f"{rate}", 0.5, learning_rate=rate, overrides={"learning_rate": rate}) for rate in (1e-4, 3e-4)]
    assert further_tables(entry(*rates))["rates"] == further_tables(entry(low))["rates"] == ""


def test_tasks_of_a_mixture_and_scores_on_the_whole_set() -> None:
    sets = [{"set": "hard", "arm": "a", "first": 0.125, "last": 0.5, "runs": 2}]
    whole = [{"run": "e/a/0", "value": 0.5, "low": 0.4, "high": 0.6, "problems": 96, "steps": 3, "cut": True}]
    found = further_tables(entry(arm("a", 0.5), mixture=sets, leaderboard=whole))
    assert cells(found["sets"])[1] == ["hard", "a", "0.125", "0.500", "2"]
    assert cells(found["leaderboard"])[1] == ["e/a/0", "0.500 (0.400 to 0.600)", "96", "3", "time limit"]


def test_tasks_of_a_mixture_are_measured(workdir: Path, mini_study: Study) -> None:
    """Means of two seeds at the first and the last value; a task that was not drawn has none."""
    store_general()
    sums = {"use": "arithmetic", "train_size": 8, "validation_size": 8, "levels": 1, "seed": 0}
    study = study_of(mini_study, **{LORA: {"a": {}}})
    study = with_values(study, {"tasks.main": {"use": "mixture", "tasks": {"easy": sums, "rare": sums}}})
    nan = float("nan")
    columns = [{"val/easy/answer_reward": [0.25 * seed, nan, 0.25 * seed], "val/rare/answer_reward": nan} for seed in (0, 1)]
    runs = [run("a", [0.0, 0.5, 1.0], seed, LORA, validation=columns[seed]) for seed in (0, 1)]
    for one in runs:
        store(one)
    found = recording.record_of(study, {LORA: Evidence(LORA, by_arm(runs))}, [])
    extra = found["experiments"][LORA]["extra"]
    assert extra["mixture"] == [{"set": "easy", "arm": "a", "first": 0.125, "last": 0.125, "runs": 2}]


def test_the_base_models_tables() -> None:
    share = {"value": 0.25, "low": 0.0625, "high": 0.5, "problems": 4}
    baseline = {
        prompt: {"problems": 4, "categories": counted, "accuracy": share, "response_length": 8.25}
        for prompt, counted in (("p", {"right": 1, "wrong": 3}), ("q", {"right": 4}))
    }
    assert cells(zero_shot_table(baseline))[1:] == [
        ["p", "4", "1", "3", "0.250 (0.062 to 0.500)", "8.2"],
        ["q", "4", "4", "0", "0.250 (0.062 to 0.500)", "8.2"],
    ]
    kinds = dict.fromkeys(("pass", "best", "majority"), share)
    assert cells(best_of_n_table({"p": {"n": {"8": kinds}}}))[1] == ["p", "8", *["0.250 (0.062 to 0.500)"] * 3]


def test_claims_say_what_was_reported_and_what_was_measured() -> None:
    claim = {"statement": "s | t", "experiment": "e", "reported": {"x-2025": ".3", "y": "no"}, "measured": "m", "reason": "r"}
    (row,) = cells(claims_table([claim | {"verdict": "agrees"}]).replace("\\|", "/"))[1:]
    assert row == ["s / t", "e", "x-2025: .3<br>y: no", "m", "**agrees**<br>r"]


def test_results_and_summary(workdir: Path, mini_study: Study) -> None:
    store_general()
    study = study_of(mini_study, **{LORA: {"a": {}, "b": {}}})
    runs = [run("a", [0.1, 0.5], seed, LORA, token_entropy=[0.1]) for seed in (0, 1)]
    runs += [run("b", [0.1, 0.9], 0, LORA, gradient_norm=[7.0]), run("b", [0.9, 0.0], 1, LORA)]
    for one in runs:
        store(one)
    found = json.loads(json.dumps(recording.record_of(study, {LORA: Evidence(LORA, by_arm(runs))}, [])))
    rows = results_table(study, found).set_index(["arm", "seed"])
    assert rows["end"].tolist() == pytest.approx([0.5, 0.5, 0.9, 0.0]) and rows["collapsed"].tolist() == [False] * 3 + [True]
    assert rows.loc[("b", 0), "max/gradient_norm"] == 7.0 and rows.loc[("a", 1), "last/token_entropy"] == 0.1
    write_tables(study, found)
    assert json.loads(paths.SUMMARY.read_text()) == {"end": 0.5, "winner": LORA, "zero_shot": 0.25}
    assert {path.stem for path in paths.TABLES.iterdir()} == {LORA, "zero_shot"}
