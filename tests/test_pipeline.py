"""The smoke study for real, from a fresh copy of the repository: DVC and Snakemake, repeated, changed, killed and compared."""

from __future__ import annotations

import csv
import re
import shutil
import time

import pytest
from pipeline_parts import digests, fresh_clone, lock, sh
from ruamel.yaml import YAML

from grpo.experiments import BUILDS_ON, EXPERIMENTS, needed_selections
from grpo.study import load_study

STAGES = 65  # 8 before training, 35 runs, 16 selections, the kissing number, 5 of the report
REPORT = {"claims", "tables", "figures", "timing", "writeup"}

pytestmark = pytest.mark.slow


def test_the_study_makes_what_the_readme_promises(finished):
    expected = [
        "reports/writeup.md",
        "reports/results.csv",
        "reports/summary.json",
        "reports/tables/zero_shot.md",
        "reports/tables/grpo_learning_rate.md",
        "reports/figures/math_baseline.png",
        "reports/tables/best_of_n.md",
        "reports/figures/best_of_n.png",
        "reports/figures/grpo_learning_rate.png",
        *(f"reports/figures/{experiment}.png" for experiment in EXPERIMENTS),
        *(f"reports/tables/{experiment}.md" for experiment in EXPERIMENTS),
        "reports/tables/claims.md",
        "reports/sft_dataset.json",
        "reports/keyword_dataset.json",
        "reports/kissing_number.json",
        "reports/figures/kissing_number.png",
        "reports/figures/sft_examples.png",
        "reports/timing/times.csv",
        "reports/timing/methods.md",
        "reports/timing/methods.png",
        "reports/timing/grpo_off_policy_sweep_focused.png",
        "reports/timing/grpo_async_offpolicy.png",
        "reports/timing/time_breakdown.png",
        "reports/timing/time_breakdown.md",
        "reports/figures/staleness.png",
        "reports/select/grpo_baselines.json",
        "data/math_baseline/r1_zero_examples.md",
        "data/runs/grpo_learning_rate/3e-4-0/config.yaml",
        "data/runs/grpo_learning_rate/3e-4-0/metrics.json",
        "data/runs/grpo_learning_rate/3e-4-0/history.csv",
        "data/runs/grpo_learning_rate/3e-4-0/rollouts.jsonl",
        "data/runs/grpo_learning_rate/3e-4-0/outcomes.jsonl",
        "data/checkpoints/grpo_learning_rate/3e-4-0/best/metadata.json",
        "data/checkpoints/sft_experiment/all-0/step-2/metadata.json",
        "data/checkpoints/expert_iteration_experiment/questions_16-rollouts_4-epochs_1-0/last/metadata.json",
        "data/checkpoints/grpo_keyword_inclusion/grpo-0/last/metadata.json",
        "data/keyword/dataset/validation.jsonl",
        "data/sft_dataset/train.jsonl",
        "data/kissing_number/program.py",
        "data/timing/kissing_number/conversation_log.json",
        "data/timing/grpo_learning_rate/3e-4-0.json",
    ]
    assert [name for name in expected if not (finished / name).stat().st_size] == []
    assert len(lock(finished)) == STAGES
    text = (finished / "reports/writeup.md").read_text()
    assert "not in dvc.lock yet" not in text and "not tracked" not in text


LEARNERS = {
    "padded microbatches": ({"max_tokens_per_microbatch": None}, 1e-4),
    "two processes": ({"processes": 2}, 1e-4),
    "compiled": ({"compile": True}, 1e-4),
    "8-bit moments": ({"optimizer": "adamw_8bit"}, 1e-6),
    "starting weights offloaded": ({"offload_reference": True, "gradient_checkpointing": True}, 1e-6),
    "bfloat16": ({"dtype": "bfloat16"}, None),
}


@pytest.mark.parametrize("way", LEARNERS)
def test_a_run_begins_the_same_however_the_learner_works(finished, tmp_path, way):
    """The first step's rollouts are those of the default learner, and so is its gradient as far as the precision goes."""
    changes, tolerance = LEARNERS[way]
    folder = fresh_clone(tmp_path)
    for name in ("dataset", "model"):
        shutil.copytree(finished / "data" / name, folder / "data" / name)
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    params["learner"].update(changes)
    params["grpo"]["measure_kl"] = True
    yaml.dump(params, folder / "params.yaml")
    sh(folder, "grpo", "train", "grpo_learning_rate", "3e-4")
    rows = [
        next(csv.DictReader((clone / "data/runs/grpo_learning_rate/3e-4-0/history.csv").open())) for clone in (folder, finished)
    ]
    assert float(rows[0]["kl/per_token"]) == pytest.approx(0, abs=1e-6)
    if tolerance is not None:  # in bfloat16 the samples differ
        assert rows[0]["train/reward"] == rows[1]["train/reward"]
        for name in ("gradient_norm", "token_entropy"):
            assert float(rows[0][name]) == pytest.approx(float(rows[1][name]), rel=tolerance)
    assert (folder / "data/checkpoints/grpo_learning_rate/3e-4-0/last/model.safetensors").exists()


def test_checkpoints_load_with_transformers(finished):
    from transformers import AutoModelForCausalLM

    for kind in ("last", "best"):
        model = AutoModelForCausalLM.from_pretrained(finished / "data/checkpoints/grpo_learning_rate/3e-4-0" / kind)
        assert type(model).__name__ == "Qwen2ForCausalLM"


def test_without_lag_a_run_on_ray_ends_with_the_weights_of_the_synchronous_one(finished):
    runs = ("grpo_colocate/one_update-0", "grpo_async_offpolicy/lag_0-0")
    one, other = ((finished / "data/checkpoints" / run / "last/model.safetensors").read_bytes() for run in runs)
    assert one == other
    assert digests(finished)[f"data/runs/{runs[0]}/outcomes.jsonl"] == digests(finished)[f"data/runs/{runs[1]}/outcomes.jsonl"]
    history = csv.DictReader((finished / "data/runs/grpo_async_offpolicy/lag_1-0/history.csv").open())
    assert [row["lag_max"] for row in history] == ["0", "1", "1"]  # the first batch is never stale


def test_both_tools_draw_the_whole_chain(finished):
    drawn = sh(finished, "dvc", "dag", "--dot").stdout, sh(finished, "snakemake", "--profile", "local", "--dag").stdout
    for experiment in EXPERIMENTS:
        assert all(f"select{separator}{experiment}" in text for separator, text in zip("@_", drawn, strict=True))
        for before in needed_selections(experiment):
            edge = rf'"select@{before}" -> "{experiment}@'
            assert re.search(edge, drawn[0]), edge


def test_an_equal_arm_is_not_trained_twice(finished):
    twin = YAML(typ="safe").load((finished / "data/runs/grpo_baselines/reinforce_with_baseline-0/config.yaml").read_text())
    assert twin["same_as"].startswith("grpo_learning_rate/")
    assert [p.name for p in (finished / "data/checkpoints/grpo_baselines/reinforce_with_baseline-0").iterdir()] == [
        "metadata.json"
    ]
    for name in ("metrics.json", "history.csv", "validation.csv", "rollouts.jsonl", "outcomes.jsonl"):
        folder = finished / "data/runs"
        assert (folder / "grpo_baselines/reinforce_with_baseline-0" / name).read_bytes() == (
            folder / twin["same_as"] / name
        ).read_bytes()


def test_a_second_repro_does_nothing(finished):
    start = time.perf_counter()
    result = sh(finished, "dvc", "repro")
    print(f"dvc repro with nothing to do: {time.perf_counter() - start:.1f} s")
    assert "Running stage" not in result.stdout
    assert "up to date" in result.stdout


def test_a_run_trained_again_comes_back_byte_for_byte(finished):
    before = digests(finished)
    runs = [
        "grpo_learning_rate@3e-4-0",
        "grpo_kl_divergence@best-0",
        "sft_experiment@all-0",
        "expert_iteration_experiment@questions_16-rollouts_8-epochs_2-0",
        "grpo_sft_initialization@sft_final-0",
        "grpo_keyword_inclusion@grpo-0",
    ]
    ran = sh(finished, "dvc", "repro", "--force", "--single-item", *runs).stdout
    for experiment, run in (name.split("@") for name in runs):
        assert f"> grpo train {experiment} {run.removesuffix('-0')} --seed 0" in ran
    assert digests(finished) == before
    sh(finished, "dvc", "repro")
    sh(finished, "git", "commit", "-qam", "again")


def test_snakemake_from_scratch_gives_the_same_lock(finished, tmp_path):
    folder = fresh_clone(tmp_path)
    start = time.perf_counter()
    sh(folder, "snakemake", "--profile", "local")
    print(f"smoke study through snakemake: {time.perf_counter() - start:.0f} s")
    assert lock(folder) == lock(finished)
    result = sh(folder, "snakemake", "--profile", "local")
    assert "Nothing to be done" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("experiment", "arm", "old", "new"),
    [
        ("grpo_learning_rate", "1e-3", '"1e-3": {learning_rate: 1e-3}', '"1e-3": {learning_rate: 2e-3}'),
        ("sft_experiment", "filtered", "filtered: {filtered: true}", "filtered: {filtered: true, examples: 8}"),
        ("grpo_off_policy_sweep_broad", "epochs_4-batch_8", "2, epochs_per_rollout_batch: 4, train_batch_size: 8", None),
    ],
)
def test_changing_one_arm_makes_that_arm_and_what_follows_stale(finished, experiment, arm, old, new):
    params = finished / "params.yaml"
    before = params.read_text()
    assert before.count(old) == 1
    params.write_text(before.replace(old, new or old.replace("2,", "1,", 1)))
    try:
        assert f"experiments.{experiment}.arms.{arm}." in sh(finished, "dvc", "params", "diff").stdout
        lines = sh(finished, "dvc", "status").stdout.splitlines()
    finally:
        params.write_text(before)
    stale = {line.rstrip(":") for line in lines if line and not line.startswith((" ", "\t"))}
    assert stale == {f"{experiment}@{arm}-0", f"select@{experiment}"} | REPORT


def test_metrics_diff_shows_what_a_pinned_rate_changed(finished):
    params = finished / "params.yaml"
    before = params.read_text()
    winner = "3e-4" if '"winner": "1e-3"' in (finished / "reports/select/grpo_learning_rate.json").read_text() else "1e-3"
    params.write_text(before.replace("pinned: {}", f'pinned: {{grpo_learning_rate: "{winner}"}}'))
    try:
        ran = sh(finished, "dvc", "repro").stdout
        # Fine-tuning, expert iteration and the keyword task build on no winner.
        trained = {name for name in EXPERIMENTS if f"> grpo train {name} " in ran}
        assert trained == {name for name in EXPERIMENTS if "grpo_learning_rate" in BUILDS_ON[name]}
        difference = sh(finished, "dvc", "metrics", "diff").stdout
        assert "grpo_learning_rate.winner" in difference and winner in difference
        assert (
            f"Pinned by hand in `params.yaml`:** grpo_learning_rate: {winner}" in (finished / "reports/writeup.md").read_text()
        )
    finally:
        params.write_text(before)
        sh(finished, "git", "checkout", "-q", ".")
        sh(finished, "dvc", "checkout", "-q")


def test_a_changed_arm_that_does_not_win_trains_nothing_downstream(finished):
    params = finished / "params.yaml"
    before = params.read_text()
    winner = "1e-3" if '"winner": "1e-3"' in (finished / "reports/select/grpo_learning_rate.json").read_text() else "3e-4"
    loser = {"1e-3": "3e-4", "3e-4": "1e-3"}[winner]
    changed = before.replace("pinned: {}", f'pinned: {{grpo_learning_rate: "{winner}"}}')
    params.write_text(changed.replace(f'"{loser}": {{learning_rate: {loser}}}', f'"{loser}": {{learning_rate: 7e-4}}'))
    try:
        ran = sh(finished, "dvc", "repro").stdout
    finally:
        params.write_text(before)
        sh(finished, "git", "checkout", "-q", ".")
        sh(finished, "dvc", "checkout", "-q")
    assert f"> grpo train grpo_learning_rate {loser}" in ran
    assert f"> grpo train grpo_learning_rate {winner}" not in ran
    assert all(f"> grpo train {name} " not in ran for name in EXPERIMENTS if name != "grpo_learning_rate")
    assert "> grpo writeup" in ran


def test_plots_show_makes_a_page(finished):
    sh(finished, "dvc", "plots", "show", "--out", "plots_page")
    page = (finished / "plots_page/index.html").read_text()
    assert "grpo_learning_rate" in page


def test_a_study_that_leaves_experiments_out_gets_its_report(tmp_path):
    """Two of sixteen are made, of models that have hardly been trained."""
    folder = fresh_clone(tmp_path)
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    made = ["grpo_learning_rate", "grpo_keyword_inclusion"]
    left_out = [name for name in EXPERIMENTS if name not in made]
    for name in left_out:
        params["experiments"][name]["arms"] = {}
    params["select_in"] = made
    params["model"]["steps"], params["kissing_number"], params["evaluation"]["best_of_n"]["prompts"] = 20, None, []
    params["keyword"]["model"] |= {"steps": 20, "steps_in_full": 10}
    yaml.dump(params, folder / "params.yaml")
    start = time.perf_counter()
    sh(folder, "dvc", "repro")
    print(f"two experiments of the smoke study through dvc repro: {time.perf_counter() - start:.0f} s")

    runs = {"grpo_learning_rate@3e-4-0", "grpo_learning_rate@1e-3-0", "grpo_keyword_inclusion@grpo-0"}
    stages = {name for name in lock(folder) if "@" in name}
    assert stages == runs | {f"select@{name}" for name in made}
    text = (folder / "reports/writeup.md").read_text()
    opening = text.partition("**The number that counts**")[0]
    assert "**Left out** of this study" in opening
    assert [name for name in EXPERIMENTS if f"`{name}`" in opening] == left_out
    assert [name for name in EXPERIMENTS if f"(`{name}`)\n" in text] == made  # the sections
    claims = (folder / "reports/tables/claims.md").read_text().splitlines()[2:]
    assert not any(f" | {name} | " in row for name in left_out for row in claims)
    assert not re.search("kissing|best_of_n|Best@N|sft_dataset", text.removeprefix(opening))
    assert any(" | grpo_learning_rate | " in row and "left out" not in row for row in claims)
    assert {path.stem for path in (folder / "reports/figures").glob("*.png")} & set(EXPERIMENTS) == set(made)
    shown = sh(folder, "dvc", "plots", "show", "--out", "page")
    assert "failed" not in shown.stdout + shown.stderr
    page = (folder / "page/index.html").read_text()
    assert "Validation answer reward, learning rate" in page and "Validation answer reward, leaderboard" not in page
    assert "up to date" in sh(folder, "dvc", "status").stdout

    params["experiments"]["grpo_learning_rate"]["arms"] = {}
    yaml.dump(params, folder / "params.yaml")
    refused = sh(folder, "grpo", "study", "check", check=False)
    assert refused.returncode == 2
    assert "select_in: must name each experiment with arms once; grpo_learning_rate has no arms" in refused.stderr


@pytest.mark.parametrize("study", ["math-h100", "math-24gb", "gsm8k"])
def test_real_studies_list_their_stages(study, tmp_path):
    folder = fresh_clone(tmp_path)
    sh(folder, "grpo", "study", "use", study)
    listed = sh(folder, "dvc", "repro", "--dry", "--force").stdout
    values = load_study(folder / "params.yaml")
    for experiment, settings in values.experiments.items():
        for arm in settings.arms:
            for seed in values.seeds:
                assert f"grpo train {experiment} {arm} --seed {seed}" in listed
