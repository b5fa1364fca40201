"""examples/group_size.yaml: an experiment is one file of the user's, wherever it lies, up to the report."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from pipeline_parts import ROOT, lock, sh
from ruamel.yaml import YAML

pytestmark = pytest.mark.slow

OWN = ("group_8", "group_4")
NEEDED = {
    *("training_inputs", "dataset@main", "model@main", "select@grpo_learning_rate", "select@grpo_group_size"),
    *(f"train@grpo_learning_rate-{arm}" for arm in ("3e-4", "1e-3")),
    *(f"train@grpo_group_size-{arm}" for arm in OWN),
}


def use_example(clone: Path) -> None:
    """Make the example, shortened as the smoke study is, the active study, from a folder outside the clone."""
    lab = clone.parent / "our lab"
    lab.mkdir()
    text = (ROOT / "examples/group_size.yaml").read_text()
    (lab / "group_size.yaml").write_text(text.replace("extends: mini", "extends: smoke"))
    sh(clone, "grpo", "study", "use", "../our lab/group_size.yaml")
    assert sh(clone, "git", "diff", "--name-only").stdout.split() == [
        "params.yaml",
        "stages.yaml",
    ]  # which are what `study use` writes


def test_added_to_a_study_that_has_run_it_trains_its_own_arms_and_comes_into_the_report(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    shutil.copytree(finished, folder, symlinks=True)
    before = lock(folder)
    use_example(folder)
    # What `dvc repro select@grpo_group_size` runs where there is nothing: all that it needs, and nothing else.
    assert set(re.findall(r'"(.+?)"', sh(folder, "dvc", "dag", "--dot", "select@grpo_group_size").stdout)) == NEEDED
    ran = sh(folder, "dvc", "repro").stdout
    assert set(re.findall(r"^> grpo (train .+)$", ran, re.M)) == {f"train grpo_group_size {arm} --seed all" for arm in OWN}
    after = lock(folder)
    assert all(after[name] == before[name] for name in before if name.startswith(("train@", "select@")))
    assert json.loads((folder / "reports/record.json").read_text())["experiments"]["grpo_group_size"]["title"] == "Group size"
    winner = json.loads((folder / "reports/select/grpo_learning_rate.json").read_text())["overrides"]
    for size in (8, 4):
        config = YAML(typ="safe").load((folder / f"data/runs/grpo_group_size/group_{size}/0/config.yaml").read_text())["config"]
        assert config["group_size"] == {"value": size, "from": f"arm group_{size}"}
        assert {key: config[key]["value"] for key in winner} == winner
    assert {row["experiment"] for row in csv.DictReader((folder / "reports/results.csv").open())} >= {"grpo_group_size"}
    for made in ("tables/grpo_group_size.md", "figures/grpo_group_size.svg"):
        assert (folder / "reports" / made).stat().st_size > 100
    assert "up to date" in sh(folder, "dvc", "status").stdout
