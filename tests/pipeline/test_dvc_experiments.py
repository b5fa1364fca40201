"""Experiments of DVC (`dvc exp run`) with DVC itself: in the workspace, in a copy, and from the queue."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_parts import fresh_clone, sh
from ruamel.yaml import YAML

pytestmark = pytest.mark.nightly

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
    """What `dvc exp run` prints."""
    return sh(folder, "dvc", "exp", "run", *how, "-n", name, "-S", f"+kissing_number.seed={SEEDS[name]}", STAGE).stdout


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
