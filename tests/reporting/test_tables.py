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
    experiment_table,
    further_tables,
    results_table,
    tables_of,
    write_tables,
)
from grpo.results.evidence import Evidence
from grpo.results.runs import by_arm
from grpo.study import paths
from grpo.study.schema import Study

LORA = "grpo_lora"
REPOSITORY = Path(__file__).parents[2]


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


def test_the_committed_record_gives_the_committed_tables() -> None:
    """Byte for byte: arms, starts that differ, rates, zero-shot outcomes, estimates from samples, and claims."""
    found = tables_of(json.loads((REPOSITORY / paths.RECORD).read_text()))
    committed = {path.stem: path.read_text() for path in (REPOSITORY / paths.TABLES).glob("*.md")}
    assert found == committed and {"zero_shot", "best_of_n", "claims", f"{LORA}-rates"} <= found.keys()


def test_the_winner_is_bold_and_collapsed_runs_are_counted() -> None:
    """An arm alone has no distance; a start is shown where starts differ, and only the chosen arms are."""
    below = {"value": 0.125, "low": 0.05, "high": 0.2}
    other = arm("b", 0.5, below=below, start=0.4, collapsed=["r/1"])
    head, a, b = cells(experiment_table(entry(arm("a", 0.63), other, arm("tried", 0.1, chosen=False))))
    assert head[:4] == ["arm", "at start", "answer reward at the end (95%)", "below the leader"]
    assert a == ["**a**", "0.100", "0.630 (0.580 to 0.680)", "leads", "0.900", "0.700", "21.0", "0 of 2"]
    assert b == ["b", "0.400", "0.500 (0.450 to 0.550)", "0.125 (0.050 to 0.200)", "0.900", "0.556", "21.0", "1 of 2"]
    head, row = cells(experiment_table(entry(arm("a", 0.5))))
    assert row[0] == "a" and not any("below" in cell or "start" in cell for cell in head)


def test_arms_that_all_stand_for_themselves_have_no_table_of_rates() -> None:
    rates = [arm(f"{rate}", 0.5, learning_rate=rate, overrides={"learning_rate": rate}) for rate in (1e-4, 3e-4)]
    assert further_tables(entry(*rates))["rates"] == further_tables(entry(arm("a", 0.7)))["rates"] == ""


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
