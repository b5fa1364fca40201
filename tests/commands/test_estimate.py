"""`grpo plan`: what is taken over, counts that can be worked out by hand, and times from data/timing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from study_parts import ROOT, activate, study_named, with_values

from grpo.commands.estimate import NOTES, plan, work
from grpo.commands.gpu_memory import longest, prompt_lengths
from grpo.common.files import write_json
from grpo.common.records import Problem, write_records
from grpo.study import paths
from grpo.study.schema import Study, load_study

TRAINED = 2 * 1543714304 / 2**30  # GiB of Qwen2.5-Math-1.5B in bfloat16


def taken_over(found: dict[str, Any]) -> dict[str, str]:
    return {run: twin for sums in found["experiments"].values() for run, twin in sums["taken_over"].items()}


@pytest.fixture
def smoke(workdir: Path) -> Study:
    """The smoke study, active in an empty project."""
    activate("smoke", workdir)
    return load_study()


def note_time(run: str, seconds: float, steps: int, same_as: str | None = None) -> None:
    write_json(paths.run_timing(run), {"total_s": seconds, "steps": [{}] * steps, "same_as": same_as})


def test_what_is_taken_over_is_what_training_took_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """reports/ has the results of the default study, with its winners and what each run was the same as."""
    monkeypatch.chdir(ROOT)
    found = taken_over(plan(load_study(), True, None, 2.5))
    with (paths.REPORTS / "timing.csv").open() as file:
        rows = {row["run"]: row["same_as"] for row in csv.DictReader(file)}
    trained = {run: twin for run, twin in rows.items() if twin}
    assert len(trained) > 5
    assert {run: twin for run, twin in found.items() if run in rows} == trained
    # Some of whose arms have the names of another study's but other values.
    other = study_named("gsm8k")
    assert plan(other, True, None, 2.5)["assumed_winners"] == plan(other, False, None, 2.5)["assumed_winners"]


def test_the_counts_of_an_experiment_of_the_real_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rates and three seeds of 200 steps of 256 rollouts on two GPUs; 256 x (200 + 500) tokens take 14 s."""
    monkeypatch.chdir(tmp_path)  # nothing is at hand
    found = plan(study_named("math-2xh100"), False, None, 2.0)
    rates = found["experiments"]["grpo_learning_rate"]
    hours = 15 * 200 * 14 * 712 / 700 / 3600
    counts = {"runs": 15, "steps": 15 * 200, "rollouts": 15 * 200 * 256}
    counts |= {"hours": hours, "gpu_hours": 2 * hours, "cost": 4 * hours}
    assert {key: rates[key] for key in counts} == pytest.approx(counts)
    assert rates["disk_gib"] == pytest.approx(15 * 2 * TRAINED)
    assert rates["time_from"] == ["guess"]
    arms = plan(study_named("math-2xh100"), False, 100.0, 2.5)["experiments"]["grpo_colocate"]
    assert arms["hours"] == pytest.approx(3 * 200 * (100 + 144) / 3600)  # one epoch, and two of which each is 44%
    assert arms["time_from"] == ["given"]
    kept = found["experiments"]["sft_experiment"]["disk_gib"] / TRAINED
    assert kept == pytest.approx(3 * (5 * 2 + 4))  # one arm keeps two more
    slower = plan(study_named("math-2xh100"), False, 30.0, 2.0)["experiments"]["leaderboard"]
    assert slower["hours"] == pytest.approx(11 * 3 * 4)  # its time limit
    assert found["total"]["runs"] == sum(sums["runs"] for sums in found["experiments"].values())


def test_a_larger_model_takes_longer_by_its_parameters(workdir: Path) -> None:
    """Of 7.616 billion parameters 152,064 x 3,584 are an embedding that is only looked up; eight processes share a step."""
    rates = plan(study_named("math-7b-8xh100"), False, None, 2.5)["experiments"]["grpo_learning_rate"]
    seconds = 14 * 712 / 700 * (7615616512 - 152064 * 3584) / 1543714304 / 8
    assert rates["hours"] == pytest.approx(15 * 200 * seconds / 3600)
    assert f"{256 * 700 * 8 * 1543714304 / (14 * 989e12):.1%} of 989 TFLOP/s" in NOTES["guess"]


def test_prompts_count_as_long_as_the_study_has_them(workdir: Path, byte_tokenizer: Any) -> None:
    """A tokenizer of bytes: as many tokens as the template with its question has letters."""
    study = study_named("math-first")
    assert prompt_lengths(study, "main", "question_only") == (200, 200, False)
    assumed = plan(study, True, None, 2.5)["total"]["hours"]
    template = study.task("main").formats["question_only"].template.replace("{question}", "")
    write_records(paths.train("main"), [Problem("a", "x" * 300, "1")])
    write_records(paths.validation("main"), [Problem("b", "x" * 400, "1")])
    byte_tokenizer.save_pretrained(paths.model("main"))
    write_json(paths.dataset_report("main"), {"task": "gsm8k"})  # left by another study
    assert not prompt_lengths(study, "main", "question_only").counted
    write_json(paths.dataset_report("main"), {"task": "math"})
    n = len(template)
    assert prompt_lengths(study, "main", "question_only") == (n + 350, n + 400, True)
    assert longest(study, study.grpo.model_copy(update={"prompt": "question_only"})) == n + 400 + 1024
    counted, r1_zero = plan(study, True, None, 2.5)["total"]["hours"], prompt_lengths(study, "main", "r1_zero").mean
    assert counted / assumed == pytest.approx((r1_zero + 512) / (200 + 512))


def test_dynamic_sampling_is_expected(workdir: Path) -> None:
    """Half of the groups have no signal: of 64 rollouts 32 are sampled anew, then 16."""
    study, steps = study_named("quickstart"), 2 * 40  # two arms
    resampled = study.grpo.model_copy(update={"dynamic_sampling_rounds": 2})
    before, after = (plan(s, False, 100.0, 2.0) for s in (study, study.model_copy(update={"grpo": resampled})))
    assert (before["total"]["rollouts"], after["total"]["rollouts"]) == (steps * 64, steps * (64 + 32 + 16))
    assert work(resampled) / work(study.grpo) == pytest.approx(0.56 * 112 / 64 + 0.44)


def test_a_winner_decides_what_is_taken_over(smoke: Study) -> None:
    pinned = with_values(smoke, {"selection.pinned": {"grpo_baselines": "no_baseline"}})
    found = taken_over(plan(pinned, True, None, 2.5))
    assert found["grpo_baselines/reinforce_with_baseline/0"] == "grpo_learning_rate/3e-4/0"
    assert found["grpo_length_normalization/masked_mean/0"] == "grpo_baselines/no_baseline/0"
    assert "grpo_baselines/no_baseline/0" not in found


def test_measured_times_come_first_from_the_experiment_then_from_like_runs(smoke: Study) -> None:
    note_time("grpo_learning_rate/3e-4/0", 30.0, 3)
    note_time("grpo_baselines/no_baseline/0", 60.0, 3)
    note_time("grpo_baselines/reinforce_with_baseline/0", 0.0, 0, "grpo_learning_rate/3e-4/0")  # tells nothing of times
    found = plan(smoke, True, None, 2.5)["experiments"]
    seconds = {name: sums["hours"] * 3600 for name, sums in found.items()}
    assert seconds["grpo_learning_rate"] == pytest.approx(30 + 30) and seconds["grpo_baselines"] == pytest.approx(60)
    assert seconds["grpo_length_normalization"] == pytest.approx(3 * (30 + 60) / 6)
    assert found["grpo_length_normalization"]["time_from"] == ["measured"]
    assert found["sft_experiment"]["time_from"] == ["unknown"] and found["sft_experiment"]["hours"] == 0
    elsewhere = plan(smoke, False, None, 2.5)["total"]  # another study's times tell nothing
    assert elsewhere["hours"] == 0 and elsewhere["runs_of_unknown_time"] == elsewhere["runs"]


def test_the_command_prints_a_table_or_json(smoke: Study, grpo: Any) -> None:
    code, told, error = grpo("plan")
    assert code == 0 and told.startswith("study smoke, seeds [0]\nexperiment "), error
    (row,) = [line for line in told.splitlines() if line.startswith("grpo_baselines")]
    assert row.split() == ["grpo_baselines", "1", "1", "3", "48", "?", "0.0", "0.00", "0", "unknown"]
    assert "arms that equal earlier runs and take over their results at no cost: grpo_baselines/reinforce_with_baseline" in told
    assert json.loads(grpo("plan", "--json", "--price", "4")[1]) == plan(smoke, True, None, 4.0)
