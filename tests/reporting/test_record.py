"""The record from made-up runs, and the tables and files from it; seconds; machines leave their trace in those alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_parts import run, solved, store, store_general, study_of
from study_parts import ROOT, with_values

from grpo.commands import stages
from grpo.commands.recompute import rows_of_file
from grpo.commands.verify import differences
from grpo.common.errors import UserError
from grpo.reporting import record as recording
from grpo.reporting.charts import styles
from grpo.reporting.curves import curves_table, draw_over_seconds, reach
from grpo.reporting.record import plain, winner_of
from grpo.reporting.tables import further_tables, results_table, tables_of, write_tables
from grpo.reporting.timing import core_seconds, draw_timing, steady_steps, timing_table, write_timing
from grpo.reporting.writeup import cost, report_card
from grpo.results.runs import ExperimentRuns, Run, by_arm, read_runs
from grpo.study import paths
from grpo.study.kept import stages_in_lock
from grpo.study.schema import Study, load_study

SWEEP, LORA, SFT = "grpo_learning_rate", "grpo_lora", "sft_experiment"
ASYNCHRONOUS = "grpo_async_offpolicy"
RATES: dict[str, dict[str, Any]] = {"1e-4": {"learning_rate": 1e-4}, "3e-4": {"learning_rate": 3e-4}}


def record_of(study: Study, *runs: Run) -> dict[str, Any]:
    """The record of a study with these runs, with no claim judged; the general result files must be there."""
    of: dict[str, list[Run]] = {}
    for one in runs:
        of.setdefault(one.experiment, []).append(one)
    arms = {name: {arm: {"learning_rate": 1e-3} for arm in by_arm(own)} for name, own in of.items()}
    study = study_of(study, **arms)
    for one in runs:
        store(one)
    return recording.record_of(study, {name: ExperimentRuns(name, by_arm(own)) for name, own in of.items()}, [])


@pytest.fixture
def general(workdir: Path) -> Path:
    store_general()
    return workdir


def arms_of(study: Study, *runs: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record_of(study, *runs)["experiments"][SWEEP]["arms"]
    return found


def both_seeds(arm: str, *rewards: float, **options: Any) -> list[Run]:
    return [run(arm, list(rewards), seed, **options) for seed in (0, 1)]


# ---------------------------------------------------------------------------------------------------------------- arms


def test_form_length_and_accuracy_given_the_form(general: Path, mini_study: Study) -> None:
    """Accuracy is of answers, whatever reward compares runs."""
    runs = both_seeds("a", 0.1, 0.6, forms=[0.4, 0.8], validation={"val/response_length": [9.0, 20.0]})
    (arm,) = arms_of(mini_study, *runs)
    assert (arm["format"], arm["given_form"], arm["length"]) == pytest.approx((0.8, 0.75, 20.0))  # .6 / .8
    assert (arm["at_start"]["format"], arm["at_start"]["given_form"]) == pytest.approx((0.4, 0.25))
    for place, of in enumerate(runs):
        metrics, validation = of.metrics | {"best/reward": 0.7}, of.validation.assign(**{"val/reward": [0.3, 0.7]})
        runs[place] = replace(of, metric="reward", metrics=metrics, validation=validation)
    found = recording._arm(ExperimentRuns(SWEEP, {"a": runs}), "a", "a")
    assert (found["given_form"], found["start"]) == pytest.approx((0.75, 0.3))
    shares = [recording._share(*of) for of in ((0.5, 0.4), (0.0, 0.0), (None, 0.5), (0.4, 0.4), (0.0, 0.5))]
    assert shares == [None, None, None, 1.0, 0.0]  # rewarded without the form; no form; not measured
    runs[1].config["same_as"] = "e/a/1"
    assert found["same_as"] is None
    assert recording._arm(ExperimentRuns(SWEEP, {"a": runs}), "a", "a")["same_as"] == [None, "e/a/1"]


def test_levels_of_training_metrics(general: Path, mini_study: Study) -> None:
    """First and last eighth of 16 steps, mean over runs; the largest value is that of any run."""
    steps = np.arange(1.0, 17.0)
    (arm,) = arms_of(mini_study, *(run("a", [0.1, 0.5], seed, steps=16, gradient_norm=steps + seed) for seed in (0, 1)))
    assert arm["metrics"]["gradient_norm"] == {"first": 2.0, "last": 16.0, "smallest": 1.5, "largest": 17.0}
    few = [run("a", [0.1, 0.5], steps=3, every=3, m=[1.0, 2.0, 6.0])]  # of less than eight steps: one
    assert recording._levels(few, "m") == {"first": 1.0, "last": 6.0, "smallest": 1.0, "largest": 6.0}
    assert recording._levels([*few, run("a", [0.1, 0.5], 1)], "m") is None  # not all have it


def test_values_for_json() -> None:
    found = plain({1: (math.nan, np.float64(0.5), np.array([1, 2])), "b": [math.inf, None, "x"]})
    assert found == {"1": [None, 0.5, [1, 2]], "b": [None, None, "x"]}
    json.dumps(found, allow_nan=False)


# ----------------------------------------------------------------------------------------------------------- the study


def test_the_headline_is_chosen_by_the_problems_that_do_not_judge(general: Path, mini_study: Study) -> None:
    """Winners without a collapse that start from the base model come first; the shown mean is not the largest of several."""

    def split(arm: str, experiment: str, selecting: float, judging: float, **options: Any) -> list[Run]:
        rewards = np.concatenate([solved(selecting), solved(judging)])
        return [
            replace(one, last=rewards, selection_problems=100)
            for one in (run(arm, [0.1, selecting], seed, experiment, **options) for seed in (0, 1))
        ]

    found = record_of(
        mini_study,
        *split("a", SWEEP, 0.7, 0.5),
        *split("b", LORA, 0.6, 0.9),
        *split("c", "grpo_sft_initialization", 0.9, 0.9, values={"start_from": "sft_experiment/all/last"}),
        *split("d", "grpo_baselines", 0.9, 0.9, diverged=8),
        *split("all", SFT, 0.95, 0.9, metrics={"examples": 8}),
    )
    assert found["headline"]["experiment"] == SWEEP
    assert found["headline"]["value"] == pytest.approx(0.5) and found["headline"]["problems"] == 100
    claims = [{"experiment": name, "own": own} for name, own in ((LORA, False), (SWEEP, True), (SWEEP, True))]
    assert recording.own_experiments([LORA, SWEEP, "own"], claims) == [SWEEP]
    assert recording.own_experiments([LORA, SWEEP, "own"], claims[:1]) == ["own"]


def test_a_study_of_ones_own_leads_with_its_experiment_and_its_names(general: Path, mini_study: Study) -> None:
    """Though another one ends higher. Arms of the handouts are named by what they are, an author's by the author."""
    study = mini_study.model_copy(update={"by_design": ["always", {"own": "with it"}, {LORA: "without it"}]})
    other = {"loss_type": "no_baseline", "reward": "mine:partial"}
    own = [*both_seeds("exact", 0.1, 0.5, experiment="own"), *both_seeds("partial", 0.1, 0.6, experiment="own", values=other)]
    found = record_of(study, *both_seeds("1e-4", 0.1, 0.9), *both_seeds("3e-4", 0.1, 0.8, values={"learning_rate": 3e-4}), *own)
    assert found["headline"]["experiment"] == "own" and found["headline"]["label"] == "partial"
    labels = {name: [arm["label"] for arm in entry["arms"]] for name, entry in found["experiments"].items()}
    assert labels == {SWEEP: ["rate 1e-3", "rate 3e-4"], "own": ["exact", "partial"]}
    assert found["by_design"] == ["always", "with it"]
    assert found["experiments"]["own"]["settings"] == {
        "learning_rate": [1e-3], "loss_type": [None, "no_baseline"], "reward": [None, "mine:partial"]
    }  # fmt: skip
    rows = tables_of(found)["settings"].splitlines()
    assert rows[-1].count("mine:partial") == 1 and "exact: nothing; partial: nothing" in rows[-1]
    timing = pd.DataFrame({"run": ["own/exact/0"], "total_s": [3.0]})
    assert report_card(study, found, timing).count("| own: ") == 2
    counts = {"metrics": {"examples": 8}, "values": {"filtered": False}}
    tuned = [*both_seeds("few", 0.1, 0.2, experiment=SFT, **counts), *both_seeds("all", 0.1, 0.75, experiment=SFT, **counts)]
    card = report_card(study, record_of(study, *own, *tuned), timing).splitlines()
    assert len(card) == 6 and "| 0.750 (" in card[-1], "head, base, both own arms, and the winner of the other method"


def test_the_report_card_has_each_method_and_samples_are_bounded(general: Path, mini_study: Study) -> None:
    counts = {"metrics": {"examples": 8}, "values": {"filtered": False}}
    found = record_of(mini_study, *both_seeds("a", 0.1, 0.5), *both_seeds("all", 0.1, 0.75, experiment=SFT, **counts))
    names = [run for entry in found["experiments"].values() for arm in entry["arms"] for run in arm["runs"]]
    timing = pd.DataFrame({"run": names, "total_s": [{"sft": 3.0, "grp": 10.0}[name[:3]] for name in names]})
    rows = [[cell.strip() for cell in line.split("|")] for line in report_card(mini_study, found, timing).splitlines()[3:]]
    assert {(row[2][:5], row[-2]) for row in rows} == {("0.750", "3.0"), ("0.500", "10.0")}
    examples = found["baseline"]["r1_zero"]["examples"]
    assert {category: len(shown) for category, shown in examples.items()} == {"right": 1, "wrong": 2}
    assert len(examples["wrong"][0]["response"]) < 2000 < 5000
    samples = found["experiments"][SWEEP]["samples"]
    assert [(one["step"], one["problem"]) for one in samples] == [(0, "p0"), (0, "p1"), (8, "p0"), (8, "p1")]
    path = paths.RUNS / samples[0]["run"] / "rollouts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, reward in zip(rows, (1.0, 1.0, 0.0, 0.0, 0.5, 1.0), strict=True):  # at the end only p2 is right
        row |= {"answer_reward": reward, "response": "x" * 2000 + "end"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = recording.samples(samples[0]["run"])
    assert [(one["step"], one["problem"]) for one in shown] == [(0, "p0"), (0, "p2"), (8, "p0"), (8, "p2")]
    assert {(len(one["response"]), one["response"][-3:]) for one in shown} == {(1200, "end")}


# -------------------------------------------------------------------------------------------- single kinds of experiments


def extra_of(study: Study, *runs: Run) -> dict[str, Any]:
    extra: dict[str, Any] = record_of(study, *runs)["experiments"][runs[0].experiment]["extra"]
    return extra


def test_kinds_of_responses_and_a_score_on_the_whole_set(general: Path, mini_study: Study) -> None:
    kinds = {"val/lists_only": [0.5, 0.0], "val/repeats_prompt": 0.0, "val/is_sentence": [0.25, 1.0]}
    whole = {"full/answer_reward": 0.5, "full/problems": 96}
    extra = extra_of(mini_study, *both_seeds("a", 0.1, 0.5, validation=kinds, cut=8, metrics=whole))
    assert extra["kinds"]["lists_only"] == {"before": 0.5, "after": 0.0} and extra["kinds"]["is_sentence"]["after"] == 1.0
    (found, _) = extra["leaderboard"]
    # Wilson: 1.96 / (2 sqrt(96 + 1.96^2)) = .098 to both sides
    assert (found["low"], found["high"]) == (pytest.approx(0.402, abs=1e-3), pytest.approx(0.598, abs=1e-3))
    assert found["cut"] and found["problems"] == 96
    assert not recording._full(run("a", [0.1, 0.5], metrics=whole))["cut"]


def test_staleness_and_use_of_the_replay_buffer(general: Path, mini_study: Study) -> None:
    lags = {"lag_mean": [0.0, 2.0], "lag_max": [0, 3], "clip_fraction": [0.0, 0.1], "steps": 2}
    left = {"replay/left": [5, 30], "replay/uses_mean": [9.0, 1.0], "replay/never_drawn": [0.9, 0.2]}
    apart = {"max_policy_lag": 1, "replay_capacity": 4, "replay_max_age": None}
    buffered = both_seeds("buffer", 0.1, 0.5, experiment=ASYNCHRONOUS, values={"asynchronous": apart}, **(lags | left))
    one = both_seeds("one", 0.1, 0.4, experiment=ASYNCHRONOUS, values={"asynchronous": None})
    (found,) = extra_of(mini_study, *buffered, *one)["staleness"].values()
    assert (found["lag_mean"], found["clip_fraction"], found["lag_max"]) == (1.0, pytest.approx(0.05), 3)
    assert found["uses_mean"] == 1.0 and found["never_drawn"] == pytest.approx(0.2)
    for one in buffered:
        one.config["config"]["asynchronous"]["value"] = apart | {"replay_capacity": 1}
    (found,) = recording._staleness(ExperimentRuns(ASYNCHRONOUS, {"a": buffered})).values()
    assert found["lag_max"] == 3 and "uses_mean" not in found, "no buffer"


# ------------------------------------------------------------------------------------------------------- the whole report


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_only_the_files_of_times_differ_between_machines(
    general: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same results with other seconds, ids, commits and hardware."""
    study = study_of(mini_study, **{SWEEP: RATES})
    monkeypatch.setattr(stages, "load_study", lambda: study)
    made = {}
    for seconds in (1.0, 2.5):
        for arm, end in (("1e-4", 0.3), ("3e-4", 0.6)):
            for seed in study.seeds:
                store(run(arm, [0.1, 0.2, end], seed, values=RATES[arm]), seconds, alone=seed == 0)
        write: tuple[Callable[[], None], ...] = (stages.tables, stages.figures)
        for stage in write:
            stage()
        made[seconds] = files(Path("reports"))
    first, second = made.values()
    assert first.keys() == second.keys()
    of_times = {"timing.csv", "timing.svg", f"curves/{SWEEP}.csv", "curves/reach.csv"}
    assert {name for name, content in first.items() if second[name] != content} == of_times
    assert {"record.json", "results.csv", "summary.json", f"figures/{SWEEP}.svg", f"tables/{SWEEP}.md"} <= first.keys()
    record = json.loads(first["record.json"])
    assert winner_of(record["experiments"][SWEEP])["label"] == record["headline"]["label"] == "rate 3e-4"
    assert not any(word in first["record.json"].decode() for word in ("id-1", "GHz", '_s"'))


def test_the_committed_report_follows_from_its_record_and_that_from_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte: tables, write-up with its comments, and page, by the code of today; numbers by other code."""
    monkeypatch.chdir(ROOT)
    study, rows = load_study(), rows_of_file(paths.OUTCOMES)
    assert differences(study, rows)[0] == [] and len(rows) > 200


def test_tasks_of_a_mixture_are_measured(workdir: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of two seeds at the first and the last value; a task that was not drawn has none."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    store_general()
    sums = {"use": "arithmetic", "train_size": 8, "validation_size": 8, "levels": 1, "seed": 0}
    study = study_of(mini_study, **{LORA: {"a": {}}})
    study = with_values(study, {"tasks.main": {"use": "mixture_task:Mixture", "tasks": {"easy": sums, "rare": sums}}})
    nan = float("nan")
    columns = [{"val/easy/answer_reward": [0.25 * seed, nan, 0.25 * seed], "val/rare/answer_reward": nan} for seed in (0, 1)]
    runs = [run("a", [0.0, 0.5, 1.0], seed, LORA, validation=columns[seed]) for seed in (0, 1)]
    for one in runs:
        store(one)
    found = recording.record_of(study, {LORA: ExperimentRuns(LORA, by_arm(runs))}, [])
    extra = found["experiments"][LORA]["extra"]
    assert extra["mixture"] == [{"set": "easy", "arm": "a", "first": 0.125, "last": 0.125, "runs": 2}]
    assert "| 0.125 | 0.125 | 2 |" in further_tables(found["experiments"][LORA])["sets"]


def test_results_and_summary(workdir: Path, mini_study: Study) -> None:
    store_general()
    study = study_of(mini_study, **{LORA: {"a": {}, "b": {}}})
    runs = [run("a", [0.1, 0.5], seed, LORA, token_entropy=[0.1]) for seed in (0, 1)]
    runs += [run("b", [0.1, 0.9], 0, LORA, gradient_norm=[7.0]), run("b", [0.9, 0.0], 1, LORA)]
    for one in runs:
        store(one)
    found = json.loads(json.dumps(recording.record_of(study, {LORA: ExperimentRuns(LORA, by_arm(runs))}, [])))
    rows = results_table(study, found).set_index(["arm", "seed"])
    assert rows["end"].tolist() == pytest.approx([0.5, 0.5, 0.9, 0.0]) and rows["collapsed"].tolist() == [False] * 3 + [True]
    assert rows.loc[("b", 0), "max/gradient_norm"] == 7.0 and rows.loc[("a", 1), "last/token_entropy"] == 0.1
    write_tables(study, found)
    assert json.loads(paths.SUMMARY.read_text()) == {"end": 0.5, "winner": LORA, "zero_shot": 0.25}
    assert {path.stem for path in paths.TABLES.iterdir()} == {LORA, "zero_shot", "settings"}


# ---------------------------------------------------------------------------------------------------------------------- seconds


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
    return with_values(study_of(mini_study, **arms), {"resources.train.gpus": 2, "resources.alone.gpus": 2})


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
    assert gpus == 2 and first["gpu_hours"] == pytest.approx(20 / 3600 * gpus, abs=1e-4)


def test_expert_iteration_samples_a_group_for_each_question(workdir: Path, mini_study: Study) -> None:
    """Four steps of 16 questions, 8 responses each, in 4 s a step."""
    name, values = "expert_iteration_experiment", {"ei_batch_size": 16, "group_size": 8}
    store(run("few", [0.1, 0.3, 0.5], experiment=name, values=values, every=2, steps=4), 4.0, alone=True)
    write_timing(with_values(study_of(mini_study, **{name: {"few": {}}}), {"seeds": [0]}))
    (row,) = pd.read_csv(paths.TIMING_TABLE).to_dict("records")
    assert (row["samples"], row["samples_per_s"]) == (4 * 16 * 8, 16 * 8 / 4)


def test_a_formula_of_a_foreign_run_is_not_computed(study: Study) -> None:
    path, formula = paths.run_timing(f"{COLOCATE}/one/1"), '=HYPERLINK("http://evil.example")'
    path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(("mlflow_run_id", "started"), formula)))
    path = paths.run_timing(f"{COLOCATE}/one/0")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"git_changed": "true", "restarts": {"a": 2, "b": 1}}))
    write_timing(study)
    rows = pd.read_csv(paths.TIMING_TABLE)
    assert rows["commit"].astype(str).tolist()[:2] == ["2222222222 + changes", "2222222222"]
    assert rows["restarts"].tolist()[:2] == [3, 0]
    assert list(rows["mlflow_run_id"]).count(f"'{formula}") == 1 and not any(rows["started"] == formula)
    with pytest.raises(UserError, match=r"timing\.csv: damaged \(Invalid isoformat"):
        cost(rows)


def test_speed_is_compared_with_the_first_arm_in_one_process(study: Study) -> None:
    """8 samples a step: one process takes 2 s, the asynchronous arm 1 s."""
    write_timing(study)
    timing = pd.read_csv(paths.TIMING_TABLE)
    tuned = timing.iloc[:1].assign(experiment="sft_experiment", label="all examples", samples=0, samples_per_s=math.nan)
    with_tuned = timing_table(pd.concat([tuned, timing]))  # the first row samples nothing, so nothing is compared with it
    assert "nan" not in with_tuned and "speedup over one" in with_tuned and "| 2.00 |" in with_tuned
    assert "GPU-hours" in with_tuned and "GPU-hours" not in timing_table(timing.assign(gpu_hours=0.0))
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
    path = paths.run_timing(f"{COLOCATE}/one/1")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cuda"}))
    assert core_seconds(of[COLOCATE]["one"][1]).loc[8] == 16.0  # of a GPU its seconds
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cpu"}))
    table = curves_table(read_runs(study, COLOCATE))
    columns = ["arm", "seed", "step", "answer_reward", "format_reward", "response_length", "token_entropy", "gradient_norm"]
    assert [*table.columns] == [*columns, "core_seconds"] and len(table) == 8
    assert table.iloc[1].tolist() == ["one", 0, 8, 0.5, 1.0, 20.0, 0.5, 0.25, 32.0]
    assert table["token_entropy"].isna().tolist() == [True, False] * 4  # before training there is none
    arms = [{"arm": arm, "label": arm, "chosen": True} for arm in of[COLOCATE]]
    (axes,) = draw_over_seconds({"arms": arms}, of[COLOCATE], styles(of[COLOCATE])).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [([0.0, 32.0], [0.1, 0.5])] * 2


def test_half_of_the_rise_counts_runs_that_were_alone_and_stopped_runs_to_the_end() -> None:
    """Starts at .1, the highest end .7: the level is .4. Beside it, test_verify.py has other code of the same."""
    of = {
        ("a", 0): ([0.1, 0.2, 0.6], [0.0, 10.0, 30.0]),
        ("a", 1): ([0.1, 0.4, 0.8], [0.0, 20.0, 60.0]),  # the mean, .1, .3, .7, is at .4 a quarter of the way from 4 to 8
        ("early", 0): ([0.1, 0.5], [0.0, 10.0]),  # it keeps .5
        ("early", 1): ([0.1, 0.1, 0.5], [0.0, 10.0, 20.0]),  # the mean, .1, .3, .5, is at .4 half of the way
        ("never", 0): ([0.3, 0.1], [0.0, 10.0]),
        ("fell", 0): ([0.1, 0.9, 0.2], [0.0, 10.0, 20.0]),  # its .9 is no end
    }
    rows = [
        {"arm": arm, "seed": seed, "step": 4 * place, "answer_reward": reward, "core_seconds": seconds}
        for (arm, seed), columns in of.items()
        for place, (reward, seconds) in enumerate(zip(*columns, strict=True))
    ]
    found = reach(pd.DataFrame(rows), ["a", "early"], {("a", 0)})
    assert [[*one.values()] for one in found] == [["a", 0.4, 5.0, 15.0], ["early", 0.4, 6.0, 12.5]]
    assert [*reach(pd.DataFrame(rows), ["a", "never"], set())[1].values()] == ["never", 0.4, None, None]
    assert [*reach(pd.DataFrame(rows), ["a", "fell"], set())[1].values()] == ["fell", 0.4, 1.5, 3.75]
    assert reach(pd.DataFrame(rows), ["never"], set()) == [], "no arm rises"
    assert reach(pd.DataFrame(rows), ["a"], set())[0]["core_seconds"] == 22.5  # 15 + (45 - 15) / 4


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
