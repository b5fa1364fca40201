"""Seconds: which steps count, what timing.csv has of a run, and comparisons between runs that had the machine alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_parts import run, store, study_of
from study_parts import with_values

from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.reporting.charts import styles
from grpo.reporting.curves import CURVES, REACH, curves_table, draw_over_seconds, reach
from grpo.reporting.labels import table
from grpo.reporting.timing import core_seconds, draw_timing, steady_steps, timing_table, write_timing
from grpo.reporting.writeup import cost, reach_columns
from grpo.results.runs import by_arm, read_runs
from grpo.study import paths
from grpo.study.kept import stages_in_lock
from grpo.study.schema import Study

COLOCATE, ASYNCHRONOUS = "grpo_colocate", "grpo_async_offpolicy"
APART = {"max_policy_lag": 1, "replay_capacity": 1, "replay_max_age": None}
BATCH = {"rollout_batch_size": 8, "train_batch_size": 8, "epochs_per_rollout_batch": 1}


@pytest.mark.parametrize(
    ("lag", "evaluated", "kept"),
    [
        (None, [0], [2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (None, [0, 4, 8, 10], [2, 3, 4, 6, 7, 8, 10]),  # the step that is followed by an evaluation counts itself
        (0, [0, 4, 8, 10], [3, 4, 7, 8]),
        (1, [0, 4, 8, 10], [4, 8]),
        (4, [0, 4, 8, 10], []),
    ],
)
def test_steps_that_no_evaluation_affects(lag: int | None, evaluated: list[int], kept: list[int]) -> None:
    steps = [{"step": step, "step_s": 1.0} for step in range(1, 11)]
    assert [step["step"] for step in steady_steps(steps, evaluated, lag)] == kept


@pytest.fixture
def study(workdir: Path, mini_study: Study) -> Study:
    """Two arms in one process, of which one took over the runs of the other, and an asynchronous one; each first seed alone."""
    for seed in (0, 1):
        options: dict[str, Any] = {"seed": seed, "every": 8, "steps": 8}
        store(run("one", [0.1, 0.5], experiment=COLOCATE, values=BATCH, **options), 2.0, alone=seed == 0)
        taken = run("same", [0.1, 0.5], experiment=COLOCATE, values=BATCH | {"train_batch_size": 4}, **options)
        taken.config["same_as"] = f"{COLOCATE}/one/{seed}"
        store(taken, 0.0)
        apart = run("lag_1", [0.1, 0.5], experiment=ASYNCHRONOUS, values=BATCH | {"asynchronous": APART}, **options)
        store(apart, 1.0, alone=seed == 0)
        path = paths.run_timing(apart.name)
        timing = json.loads(path.read_text())
        for step in timing["steps"]:
            step |= {"waiting_s": 0.125, "generator_waiting_s": 0.25}
        path.write_text(json.dumps(timing))
    arms = {COLOCATE: {"one": {}, "same": {}}, ASYNCHRONOUS: {"lag_1": {}}}
    return with_values(study_of(mini_study, **arms), {"resources.train.gpus": 2})


def test_a_row_for_each_run(study: Study) -> None:
    """A run that was taken over has the seconds of the other one, and its own ids; steps are compared only where alone."""
    out = f"outs:\n    - path: data/runs/{COLOCATE}/one\n      md5: abc.dir\n"
    Path("dvc.lock").write_text(f"schema: '2.0'\nstages:\n  train@one:\n    cmd: x\n    {out}")
    write_timing(study)
    rows = pd.read_csv(paths.TIMING_TABLE, keep_default_na=False).set_index("run")
    assert len(rows) == 6
    first, shared = rows.loc[f"{COLOCATE}/one/0"], rows.loc[f"{COLOCATE}/one/1"]
    assert (first["total_s"], first["rollout_s"], first["evaluation_s"]) == (20.0, 10.0, 2.0)
    assert (first["step_s"], first["step_rollout_s"], first["step_waiting_s"]) == ("2.0", "1.0", "")
    assert float(first["samples_per_s"]) == 4.0 and first["samples"] == 64 and first["training_peak_mb"] == 200
    assert shared["step_s"] == "" and not shared["alone"] and shared["total_s"] == 20.0
    taken = rows.loc[f"{COLOCATE}/same/0"]
    assert (taken["total_s"], taken["mlflow_run_id"], taken["same_as"]) == (20.0, "id-0", f"{COLOCATE}/one/0")
    assert (first["lock"], taken["lock"]) == ("abc.dir", "") and str(first["commit"]) == "2" * 10
    assert json.loads(first["hardware"]) == {"processor": "of 2 GHz", "cores": 2, "memory_gib": 8, "gpus": []} and json.loads(
        first["software"]
    ) == {"torch": "2.0"}
    gpus = study.resources[study.experiments[COLOCATE].resources].gpus
    assert first["gpu_hours"] == pytest.approx(20 / 3600 * gpus, abs=1e-4)


def test_a_formula_of_a_foreign_run_is_not_computed(study: Study) -> None:
    path, formula = paths.run_timing(f"{COLOCATE}/one/1"), '=HYPERLINK("http://evil.example")'
    path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(("mlflow_run_id", "started"), formula)))
    write_timing(study)
    rows = pd.read_csv(paths.TIMING_TABLE)
    assert list(rows["mlflow_run_id"]).count(f"'{formula}") == 1 and not any(rows["started"] == formula)
    with pytest.raises(UserError, match=r"timing\.csv: damaged \(Invalid isoformat"):
        cost(rows)


def test_speed_is_compared_with_the_first_arm_in_one_process(study: Study) -> None:
    """8 samples a step: one process takes 2 s, the asynchronous arm 1 s."""
    write_timing(study)
    head, _, *rows = [line.strip("|").split("|") for line in timing_table(pd.read_csv(paths.TIMING_TABLE)).splitlines()]
    found = [dict(zip(map(str.strip, head), map(str.strip, row), strict=True)) for row in rows]
    assert [(row["step (s)"], row["samples per second"], row["learner waits"]) for row in found] == [
        ("2.000", "4", ""),
        ("2.000", "4", ""),  # taken over from it
        ("1.000", "8", "0.125"),
    ]
    assert [row["speedup over one"] for row in found] == ["1.00", "1.00", "2.00"]
    timing = pd.read_csv(paths.TIMING_TABLE)
    tuned = timing.iloc[:1].assign(experiment="sft_experiment", label="all examples", samples=0, samples_per_s=math.nan)
    with_tuned = timing_table(pd.concat([tuned, timing]))  # the first row samples nothing, so nothing is compared with it
    assert "nan" not in with_tuned and "speedup over one" in with_tuned and "| 2.00 |" in with_tuned
    nobody = timing.assign(alone=False)
    assert timing_table(nobody) == ""


def test_the_figure_has_runs_that_had_the_machine_alone(study: Study) -> None:
    _, bars = draw_timing(study).axes
    assert [text.get_text() for text in bars.get_yticklabels()] == [
        "GRPO, 1 epoch × 8: generator",
        "GRPO, 1 epoch × 8: learner",
    ]


def test_curves_over_core_seconds(study: Study) -> None:
    """Eight steps of 2 s on two cores; an asynchronous run has two processes. What a run took over has that run's seconds."""
    of = {name: by_arm(read_runs(study, name)) for name in (COLOCATE, ASYNCHRONOUS)}
    assert core_seconds(of[COLOCATE]["same"][0]).loc[[0, 4, 8]].tolist() == [0.0, 16.0, 32.0]
    assert core_seconds(of[ASYNCHRONOUS]["lag_1"][0]).loc[8] == 32.0
    table = curves_table(read_runs(study, COLOCATE))
    columns = ["arm", "seed", "step", "answer_reward", "format_reward", "response_length", "token_entropy", "gradient_norm"]
    assert [*table.columns] == [*columns, "core_seconds"] and len(table) == 8
    assert table.iloc[1].tolist() == ["one", 0, 8, 0.5, 1.0, 20.0, 0.5, 0.25, 32.0]
    assert table["token_entropy"].isna().tolist() == [True, False] * 4  # before training there is none
    arms = [{"arm": arm, "label": arm, "chosen": True} for arm in of[COLOCATE]]
    (axes,) = draw_over_seconds({"arms": arms}, of[COLOCATE], styles(of[COLOCATE])).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [([0.0, 32.0], [0.1, 0.5])] * 2


def test_steps_and_core_seconds_to_half_of_the_rise(workdir: Path) -> None:
    """Starts at .1, the highest end .7: the level is .4."""
    of = {
        ("a", 0): ([0.1, 0.2, 0.6], [0.0, 10.0, 30.0]),
        ("a", 1): ([0.1, 0.4, 0.8], [0.0, 20.0, 60.0]),  # the mean, .1, .3, .7, is at .4 a quarter of the way from 4 to 8
        ("early", 0): ([0.1, 0.5], [0.0, 10.0]),  # it keeps .5
        ("early", 1): ([0.1, 0.1, 0.5], [0.0, 10.0, 20.0]),  # the mean, .1, .3, .5, is at .4 half of the way
        ("high", 0): ([0.4, 0.2, 0.3], [0.0, 1.0, 2.0]),
        ("low", 0): ([0.1, 0.2, 0.39], [0.0, 1.0, 2.0]),
    }
    rows = [
        {"arm": arm, "seed": seed, "step": 4 * place, "answer_reward": reward, "core_seconds": seconds}
        for (arm, seed), columns in of.items()
        for place, (reward, seconds) in enumerate(zip(*columns, strict=True))
    ]
    arms = ["a", "early", "high", "low"]
    found = reach(pd.DataFrame(rows), arms, {("a", 0), ("low", 0)})
    assert [[*one.values()] for one in found] == [
        ["a", 0.4, 5.0, 15.0],  # of the run that was alone: 10 + (30 - 10) / 4
        ["early", 0.4, 6.0, 12.5],  # halfway from 10 to (10 + 20) / 2
        ["high", 0.4, 0.0, 0.0],
        ["low", 0.4, None, None],
    ]
    assert reach(pd.DataFrame(rows), ["a"], set())[0]["core_seconds"] == 22.5  # 15 + (45 - 15) / 4
    assert reach(pd.DataFrame(rows), ["high"], set()) == []

    write_text(CURVES / REACH, pd.DataFrame(found, index=["e"] * 4).rename_axis("experiment").to_csv())
    assert table(reach_columns()["e"]).splitlines() == [
        "| steps to 0.400, half of the rise | core-seconds to 0.400 |",
        "| --- | --- |",
        "| 5.0 | 15.0 |",
        "| 6.0 | 12.5 |",
        "| 0.0 | 0.0 |",
        "| not reached | not reached |",
    ]


def test_each_experiment_has_its_own_bars_which_are_means_over_seeds(study: Study) -> None:
    """On GPUs each run has its card alone; a label of one experiment is also one of another."""
    for number, name in enumerate((COLOCATE, "grpo_baselines")):
        for seed, seconds in enumerate((2.0, 4.0)):
            one = run("one", [0.1, 0.5], experiment=name, values=BATCH, seed=seed, every=8, steps=8)
            store(one, seconds * (number + 1), alone=True)
    arms = {COLOCATE: {"one": {}}, "grpo_baselines": {"one": {}}}
    axes = draw_timing(study_of(study, **arms)).axes
    ends = [max(bar.get_x() + bar.get_width() for bar in place.patches) for place in axes]
    assert sorted(ends) == pytest.approx([0.75 * 3.0, 0.75 * 6.0])


def test_a_study_without_such_runs_says_so(workdir: Path, mini_study: Study) -> None:
    study = study_of(mini_study, **{COLOCATE: {"one": {}}})
    for seed in study.seeds:
        store(run("one", [0.1, 0.5], seed, COLOCATE))
    (axes,) = draw_timing(study).axes
    assert "not compared" in axes.texts[0].get_text()


@pytest.mark.parametrize("text", ["- a\n", "schema: '2.0'\n", "stages: []\n"])
def test_a_lock_without_stages_is_no_lock(text: str, workdir: Path) -> None:
    assert stages_in_lock() == {}  # without the file
    Path("dvc.lock").write_text(text)
    with pytest.raises(UserError, match=r"dvc\.lock: has no stages"):
        stages_in_lock()
