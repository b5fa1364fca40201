"""The smoke study for real, from a fresh copy of the repository: what it makes, what is stale, DVC's experiments."""

import csv
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from pipeline_parts import ROOT, digests, fresh_clone, lock, sh
from ruamel.yaml import YAML
from study_parts import EXPERIMENTS, needed_selections

from grpo.common.yaml_file import parse_yaml

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


LEARNERS = {
    "compiled": ({"compile": True}, 1e-4),
    "in less memory": ({"optimizer": "adamw_8bit", "gradient_checkpointing": True}, 1e-6),
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", LEARNERS)
def test_a_run_begins_the_same_however_the_learner_works(finished, tmp_path, way):
    """The first step's rollouts are those of the default learner, and so is its gradient as far as the precision goes."""
    changes, tolerance = LEARNERS[way]
    for name in ("dataset", "model"):
        shutil.copytree(finished / "data" / name, tmp_path / "data" / name)
    yaml = YAML()
    params = yaml.load(finished / "params.yaml")
    params["learner"].update(changes)
    params["grpo"] |= {"n_grpo_steps": 1}
    params["evaluation"]["problems"] = 8
    yaml.dump(params, tmp_path / "params.yaml")
    sh(tmp_path, "grpo", "train", "grpo_learning_rate", "3e-4")
    histories = [folder / "data/runs/grpo_learning_rate/3e-4/0/history.csv" for folder in (tmp_path, finished)]
    rows = [next(csv.DictReader(history.open())) for history in histories]
    assert rows[0]["train/reward"] == rows[1]["train/reward"]
    for name in ("gradient_norm", "token_entropy"):
        assert float(rows[0][name]) == pytest.approx(float(rows[1][name]), rel=tolerance)
    assert (tmp_path / "data/checkpoints/grpo_learning_rate/3e-4/0/last/model.safetensors").exists()


@pytest.mark.slow
def test_nothing_is_left_to_do_and_both_tools_draw_the_whole_chain(finished):
    assert "up to date" in sh(finished, "dvc", "status").stdout
    result = sh(finished, "snakemake", "--profile", "local")
    assert "Nothing to be done" in result.stdout + result.stderr
    drawn = sh(finished, "dvc", "dag", "--dot").stdout, sh(finished, "snakemake", "--profile", "local", "--dag").stdout
    for experiment in EXPERIMENTS:
        assert all(f"select{separator}{experiment}" in text for separator, text in zip("@_", drawn, strict=True))
        for before in needed_selections(experiment)[-1:]:  # whose selection holds the others
            edge = rf'"select@{before}" -> "train@{experiment}["-]'
            assert re.search(edge, drawn[0]), edge


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


MADE = ["grpo_learning_rate", "grpo_baselines", "grpo_keyword_inclusion"]
LEFT_OUT = [name for name in EXPERIMENTS if name not in MADE]


@pytest.fixture(scope="module")
def fewer(finished, tmp_path_factory):
    """The study with three of its sixteen experiments, nothing of the others left, and its report made anew."""
    folder = tmp_path_factory.mktemp("fewer") / "clone"
    shutil.copytree(finished, folder, symlinks=True)
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    for name in LEFT_OUT:
        params["experiments"][name]["arms"] = {}
    params["kissing_number"], params["evaluation"]["best_of_n"]["prompts"] = None, []
    yaml.dump(params, folder / "params.yaml")
    sh(folder, "grpo", "study", "check")
    for path in [*folder.glob("data/**/*"), *folder.glob("reports/**/*")]:
        if path.exists() and (path.stem in LEFT_OUT or path.name in LEFT_OUT):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    ran = sh(folder, "dvc", "repro").stdout
    assert {line.split()[2] for line in ran.splitlines() if line.startswith("> grpo ")} == {
        "tables",
        "figures",
        "writeup",
        "best_of_n",
        "kissing_number",
        "training_inputs",
    }
    sh(folder, "git", "add", "-A")
    sh(folder, "git", "commit", "-qm", "fewer experiments")
    return folder


@pytest.mark.nightly
def test_a_study_that_leaves_experiments_out_gets_its_report(fewer):
    runs = {"train@grpo_learning_rate-3e-4", "train@grpo_learning_rate-1e-3", "train@grpo_keyword_inclusion-grpo"}
    runs |= {f"train@grpo_baselines-{arm}" for arm in ("reinforce_with_baseline", "no_baseline")}
    stages = {name for name in lock(fewer) if "@" in name and not name.startswith(("dataset@", "model@", "sft_dataset@"))}
    assert stages == runs | {f"select@{name}" for name in MADE}
    text = (fewer / "reports/writeup.md").read_text()
    left_out = next(line for line in text.splitlines() if line.startswith("Left out of this study: "))
    titles = {name: entry["title"] for name, entry in parse_yaml(ROOT / "studies/base.yaml")["experiments"].items()}
    assert left_out == f"Left out of this study: {', '.join(titles[name] for name in LEFT_OUT)}."
    assert list(json.loads((fewer / "reports/record.json").read_text())["experiments"]) == MADE
    assert [name for name in EXPERIMENTS if f'<details id="{name}"' in (fewer / "reports/index.html").read_text()] == MADE
    claims = (fewer / "reports/tables/claims.md").read_text().splitlines()[2:]
    assert not any(f" | {name} | " in row for name in LEFT_OUT for row in claims)
    assert any(" | grpo_learning_rate | " in row and "left out" not in row for row in claims)
    assert {path.stem for path in (fewer / "reports/figures").glob("*.svg")} & set(EXPERIMENTS) == set(MADE)
    shown = sh(fewer, "dvc", "plots", "show", "--out", "page")
    assert "failed" not in shown.stdout + shown.stderr
    page = (fewer / "page/index.html").read_text()
    assert all(page.count(f"reports_figures_{name}.svg") == 1 for name in MADE), "each figure once"
    assert "up to date" in sh(fewer, "dvc", "status").stdout


def trained(output: str) -> set[str]:
    """The runs that `dvc repro` trained, as EXPERIMENT ARM."""
    return set(re.findall(r"^> grpo train (\S+ \S+) --seed all$", output, re.M))


@pytest.mark.nightly
def test_a_winner_pinned_by_hand_and_an_arm_that_does_not_win(fewer, tmp_path):
    """Another winner trains what builds on it; then another value of the loser's trains that arm, and nothing downstream."""
    folder = tmp_path / "clone"
    shutil.copytree(fewer, folder, symlinks=True)
    params = folder / "params.yaml"
    loser = "3e-4" if '"winner": "3e-4"' in (folder / "reports/select/grpo_learning_rate.json").read_text() else "1e-3"
    winner = {"1e-3": "3e-4", "3e-4": "1e-3"}[loser]
    params.write_text(params.read_text().replace("pinned: {}", f'pinned: {{grpo_learning_rate: "{winner}"}}'))
    ran = sh(folder, "dvc", "repro").stdout
    assert trained(ran) == {f"grpo_baselines {arm}" for arm in ("reinforce_with_baseline", "no_baseline")}
    difference = sh(folder, "dvc", "metrics", "diff").stdout
    of_winner = r"grpo_learning_rate\.json +winner +(\S+) +(\S+)"
    assert re.findall(of_winner, difference) == [(loser, winner)]
    assert f"Pinned by hand in grpo_learning_rate: {winner}." in (folder / "reports/writeup.md").read_text()

    before = params.read_text()
    params.write_text(re.sub(rf"'{loser}': {{learning_rate: .*}}", f"'{loser}': {{learning_rate: 7e-4}}", before))
    assert params.read_text() != before
    ran = sh(folder, "dvc", "repro", "select@grpo_baselines").stdout
    assert trained(ran) == {f"grpo_learning_rate {loser}"}


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


SEEDS = {"here": 2, "apart": 3, "queued": 4}  # the setting that each experiment changes
STAGE = "kissing_number"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    """A clone whose code says where it is, so that it can be told from the code that is installed."""
    folder = fresh_clone(tmp_path)
    with (folder / "grpo/commands/kissing_search.py").open("a") as file:
        file.write('\nprint("the code of", __file__)\n')
    sh(folder, "git", "commit", "-qam", "its own code")
    yield folder
    sh(folder, "dvc", "queue", "stop", "--kill", check=False)


def experiment(folder: Path, name: str, *how: str) -> str:
    return sh(folder, "dvc", "exp", "run", *how, "-n", name, "-S", f"+kissing_number.seed={SEEDS[name]}", STAGE).stdout


@pytest.mark.nightly
def test_runs_of_experiments_are_kept_wherever_they_ran(workspace: Path) -> None:
    from mlflow.tracking import MlflowClient

    experiment(workspace, "here")
    sh(workspace, "git", "checkout", "-q", ".")
    copy = f"the code of {workspace}/.dvc/tmp/exps/"
    assert copy in experiment(workspace, "apart", "--temp")
    experiment(workspace, "queued", "--queue")
    sh(workspace, "dvc", "queue", "start")
    deadline = time.monotonic() + 600
    while "Running" in (status := sh(workspace, "dvc", "queue", "status").stdout) or "Queued" in status:
        assert time.monotonic() < deadline, status
        time.sleep(2)
    assert status.count("Success") == 1, status
    assert copy in sh(workspace, "dvc", "queue", "logs", "queued").stdout

    client = MlflowClient(f"sqlite:///{workspace}/mlflow.db")
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(everywhere, f"tags.experiment = '{STAGE}'")
    found = {run.data.tags["dvc_experiment"]: run for run in runs}
    assert set(found) == set(SEEDS) and len(runs) == len(SEEDS)
    rows = json.loads(sh(workspace, "dvc", "exp", "show", "--json").stdout)
    (committed,) = (row for row in rows if row["rev"] != "workspace")
    shown = {one["name"]: one["data"] for experiment in committed["experiments"] for one in experiment["revs"]}
    for name, run in found.items():
        assert run.info.status == "FINISHED"
        assert run.data.params["seed"] == str(SEEDS[name])
        assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"conversation_log.json", "program.py"}
        data = shown[name]
        assert data["params"]["params.yaml"]["data"]["kissing_number"]["seed"] == SEEDS[name]
        measured = data["metrics"]["reports/metrics/kissing_number.json"]["data"]["end"]
        assert measured == run.data.metrics["best_with_committed_program"]


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
