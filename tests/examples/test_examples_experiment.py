"""examples/group_size.yaml: an experiment is one file of the user's, wherever it lies, up to the report."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from pipeline_parts import ROOT, fresh_clone, lock, sh
from ruamel.yaml import YAML

pytestmark = pytest.mark.slow

NEEDED = {"dataset main", "model main", "training_inputs", "train grpo_learning_rate 3e-4", "train grpo_learning_rate 1e-3"}
OWN = {"train grpo_group_size group_8", "train grpo_group_size group_4"}


def use_example(clone: Path) -> None:
    """Make the example, shortened as the smoke study is, the active study, from a folder outside the clone."""
    lab = clone.parent / "our lab"
    lab.mkdir()
    text = (ROOT / "examples/group_size.yaml").read_text()
    (lab / "group_size.yaml").write_text(text.replace("extends: mini", "extends: smoke"))
    sh(clone, "grpo", "study", "use", "../our lab/group_size.yaml")
    assert sh(clone, "git", "diff", "--name-only").stdout.split() == ["params.yaml"]  # which is what `study use` writes


def commands(output: str) -> set[str]:
    """What `dvc repro` ran."""
    return set(re.findall(r"^> grpo (.+?)(?: --seed all)?$", output, re.M))


def test_its_selection_needs_the_selection_before_it_and_nothing_else(tmp_path: Path) -> None:
    folder = fresh_clone(tmp_path / "clone")
    use_example(folder)
    would_run = commands(sh(folder, "dvc", "repro", "--dry", "select@grpo_group_size").stdout)
    assert would_run == NEEDED | OWN | {"select grpo_learning_rate", "select grpo_group_size"}


def test_added_to_a_study_that_has_run_it_trains_its_own_arms_and_comes_into_the_report(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    shutil.copytree(finished, folder, symlinks=True)
    before = lock(folder)
    use_example(folder)
    ran = commands(sh(folder, "dvc", "repro").stdout)
    assert {command for command in ran if command.startswith("train ")} == OWN
    after = lock(folder)
    assert all(after[name] == before[name] for name in before if name.startswith(("train@", "select@")))
    assert "Group size (`grpo_group_size`)\n" in (folder / "reports/sections/grpo_group_size.md").read_text()
    winner = json.loads((folder / "reports/select/grpo_learning_rate.json").read_text())["overrides"]
    for size in (8, 4):
        config = YAML(typ="safe").load((folder / f"data/runs/grpo_group_size/group_{size}/0/config.yaml").read_text())["config"]
        assert config["group_size"] == {"value": size, "from": f"arm group_{size}"}
        assert {key: config[key]["value"] for key in winner} == winner
    assert {row["experiment"] for row in csv.DictReader((folder / "reports/results.csv").open())} >= {"grpo_group_size"}
    for made in ("tables/grpo_group_size.md", "figures/grpo_group_size.svg", "curves/grpo_group_size.csv"):
        assert (folder / "reports" / made).stat().st_size > 100
    assert "up to date" in sh(folder, "dvc", "status").stdout
