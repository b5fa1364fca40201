"""The smoke study for real, from a fresh copy of the repository: what it makes, what is stale, DVC's experiments."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from pipeline_parts import digests, fresh_clone, lock, sh
from ruamel.yaml import YAML
from study_parts import EXPERIMENTS, needed_selections

FIGURES = ("overview", "contrasts", "math_baseline", "best_of_n")
STAGES = 57  # 9 before training, 26 that train, 17 selections, KL, the kissing number, three of the report


@pytest.mark.slow
def test_the_study_makes_what_the_readme_promises(finished):
    runs = "data/runs/grpo_learning_rate/3e-4/0"
    expected = {
        "reports": ["index.html", "writeup.md", "record.json", "results.csv", "summary.json", "timing.csv", "timing.svg"],
        "reports/metrics": [f"{name}.json" for name in ("kissing_number", *EXPERIMENTS)],
        "reports/tables": [f"{name}.md" for name in ("zero_shot", "best_of_n", "claims", *EXPERIMENTS)],
        "reports/figures": [f"{name}.svg" for name in (*FIGURES, *EXPERIMENTS)],
        "reports/curves": ["leaderboard.svg", "grpo_off_policy_sweep_focused.svg", *(f"{name}.csv" for name in EXPERIMENTS)],
        "reports/select": ["grpo_baselines.json"],
        "reports/dataset": ["sft/main.json", "keyword.json"],
        "data/math_baseline": ["r1_zero_examples.md"],
        runs: ["config.yaml", "metrics.json", "history.csv", "rollouts.jsonl", "outcomes.jsonl"],
        "data/checkpoints/grpo_learning_rate/3e-4/0/best": ["metadata.json"],
        "data/checkpoints/sft_experiment/all/0/step-2": ["metadata.json"],
        "data/checkpoints/expert_iteration_experiment/questions_16-rollouts_8-epochs_2/0/last": ["metadata.json"],
        "data/checkpoints/grpo_keyword_inclusion/grpo/0/last": ["metadata.json"],
        "data/dataset/keyword": ["validation.jsonl"],
        "data/sft_dataset/main": ["train.jsonl"],
        "data/kissing_search": ["program.py"],
        "data/timing": ["kissing_number/conversation_log.json", "grpo_learning_rate/3e-4/0/timing.json"],
    }
    files = [finished / folder / name for folder, names in expected.items() for name in names]
    assert [path for path in files if not path.stat().st_size] == []
    assert len(lock(finished)) == STAGES
    runs_of_timing = pd.read_csv(finished / "reports/timing.csv")
    assert runs_of_timing[["lock", "mlflow_run_id", "commit"]].notna().all(axis=None)


@pytest.mark.slow
def test_nothing_is_left_to_do_and_both_tools_draw_the_whole_chain(finished, tmp_path):
    assert "up to date" in sh(finished, "dvc", "status").stdout
    result = sh(finished, "snakemake", "--profile", "local")
    assert "Nothing to be done" in result.stdout + result.stderr
    drawn = sh(finished, "dvc", "dag", "--dot").stdout, sh(finished, "snakemake", "--profile", "local", "--dag").stdout
    for experiment in EXPERIMENTS:
        assert all(f"select{separator}{experiment}" in text for separator, text in zip("@_", drawn, strict=True))
        for before in needed_selections(experiment)[-1:]:  # whose selection holds the others
            edge = rf'"select@{before}" -> "train@{experiment}["-]'
            assert re.search(edge, drawn[0]), edge
    shown = sh(finished, "dvc", "plots", "show", "--out", str(tmp_path))
    assert "failed" not in shown.stdout + shown.stderr
    page = (tmp_path / "index.html").read_text()
    assert all(page.count(f"reports_figures_{name}.svg") == 1 for name in EXPERIMENTS), "each figure once"


CHANGES = [  # experiment, arm, and what becomes of it in params.yaml
    ("grpo_learning_rate", "1e-3", "'1e-3': {learning_rate: 0.001}", "'1e-3': {learning_rate: 2e-3}"),
    ("sft_experiment", "filtered", "filtered: {filtered: true}", "filtered: {filtered: true, examples: 8}"),
    ("grpo_off_policy_sweep_broad", "epochs_4-batch_8", "4-batch_8: {n_grpo_steps: 2", "4-batch_8: {n_grpo_steps: 1"),
]


@pytest.mark.slow
def test_changed_arms_and_their_selections_are_stale(finished):
    params = finished / "params.yaml"
    before = changed = params.read_text()
    for _, _, old, new in CHANGES:
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    params.write_text(changed)
    try:
        difference = sh(finished, "dvc", "params", "diff").stdout
        lines = sh(finished, "dvc", "status").stdout.splitlines()
    finally:
        params.write_text(before)
    assert all(f"experiments.{experiment}.arms.{arm}." in difference for experiment, arm, _, _ in CHANGES)
    stale = {line.rstrip(":") for line in lines if line and not line.startswith((" ", "\t"))}
    of_arms = {f"select@{experiment}" for experiment, _, _, _ in CHANGES}
    of_arms |= {
        "train@grpo_learning_rate-1e-3",
        "train@sft_experiment",
        "train@grpo_off_policy_sweep_broad",
    }  # two in one stage
    assert stale == of_arms | {"tables", "training_inputs"}  # which gives each experiment what it gave it before


def reports(folder):
    """relative path -> content of every file below reports."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("reports/**/*")) if path.is_file()}


@pytest.mark.nightly
def test_a_fresh_clone_with_pulled_results_makes_the_same_report(finished, tmp_path):
    """Results kept in a DVC remote: who clones the repository and pulls them makes the report anew, and trains nothing."""
    author, storage, reader = tmp_path / "author", tmp_path / "storage", tmp_path / "reader"
    shutil.copytree(finished, author, symlinks=True)
    sh(author, "dvc", "remote", "add", "-d", "storage", str(storage))
    sh(author, "git", "commit", "-qam", "where the results are kept")
    sh(author, "dvc", "push")
    sh(tmp_path, "git", "clone", "-q", str(author), str(reader))
    runs, written = digests(author), reports(author)
    shutil.rmtree(author)  # from here on there is the remote alone

    assert sorted(path.name for path in (reader / "data").iterdir()) == [
        "README.md", "kissing_number", "question_only.prompt", "r1_zero.prompt",
    ]  # fmt: skip
    sh(reader, "dvc", "pull")
    assert digests(reader) == runs
    assert "up to date" in sh(reader, "dvc", "status").stdout
    repeated = sh(reader, "dvc", "repro").stdout
    assert "Running stage" not in repeated and "up to date" in repeated
    assert not (reader / "mlflow.db").exists()

    stages = YAML(typ="safe").load(reader / "dvc.lock")["stages"]
    outs = [out for name in ("tables", "figures", "writeup") for out in stages[name]["outs"]]
    made_by_report = [name for name in written if f"{name}/".startswith(tuple(f"{out['path']}/" for out in outs))]
    assert {"reports/writeup.md", "reports/figures/leaderboard.svg", "reports/tables/claims.md"} <= set(made_by_report)
    for name in made_by_report:
        (reader / name).unlink()
    for stage in ("tables", "figures", "writeup"):  # what `make report` does
        ran = sh(reader, "dvc", "repro", "--force", "--single-item", stage).stdout
        assert [line for line in ran.splitlines() if line.startswith("> ")] == [f"> grpo {stage}"]
    assert reports(reader) == written
    assert digests(reader) == runs
    assert sh(reader, "git", "status", "--porcelain").stdout == ""


PART = ("expert_iteration_experiment", "grpo_learning_rate", "grpo_keyword_inclusion")


@pytest.mark.slow
def test_dvc_from_scratch_gives_the_same_results(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fresh_clone(tmp_path)
    sh(tmp_path, "dvc", "repro", "math_baseline", *(f"select@{experiment}" for experiment in PART))
    finished = request.getfixturevalue("finished")  # only now: meanwhile another process may be making it
    made, files = lock(tmp_path), digests(tmp_path)
    assert len(made) == 13 and made.items() <= lock(finished).items()
    assert {name.split("/")[2] for name in files} == set(PART) and files.items() <= digests(finished).items()


@pytest.mark.nightly
def test_a_hyperparameter_and_a_value_of_an_arm_can_be_set(finished: Path, tmp_path: Path) -> None:
    folder, name = shutil.copytree(finished, tmp_path / "clone", symlinks=True), "grpo_keyword_inclusion"
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    del params["experiments"][name]["arms"]["grpo"]["learning_rate"]  # so that the study's own holds
    yaml.dump(params, folder / "params.yaml")
    sh(folder, "git", "commit", "-qam", "the study's rate")

    settings = ("grpo.learning_rate=2e-4", f"experiments.{name}.arms.grpo.n_grpo_steps=2")
    sh(folder, "dvc", "exp", "run", *(part for setting in settings for part in ("-S", setting)), f"select@{name}")
    config = yaml.load(folder / f"data/runs/{name}/grpo/0/config.yaml")["config"]
    assert (config["n_grpo_steps"]["value"], config["learning_rate"]["value"]) == (2, 2e-4)
