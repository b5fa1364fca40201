"""examples/group_size.yaml: an experiment added to a study by its entry and its stage, up to the report."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from pipeline_parts import ROOT, lock, sh
from ruamel.yaml import YAML

EXAMPLE = ROOT / "examples/group_size.yaml"

pytestmark = pytest.mark.slow


def part(text: str, key: str) -> str:
    """The lines below a top-level key of the example, as they would be copied."""
    return re.split(rf"^{key}:.*\n", text, flags=re.M)[1].partition("\n\n")[0].rstrip() + "\n"


def add(path: Path, lines: str, before: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, lines + before))


def test_an_experiment_is_its_entry_and_its_stage(finished: Path, tmp_path: Path) -> None:
    folder, example = tmp_path / "clone", EXAMPLE.read_text()
    shutil.copytree(finished, folder, symlinks=True)
    add(folder / "studies/base.yaml", part(example, "experiments"), "  grpo_baselines:\n")
    used = sh(folder, "grpo", "study", "use", "smoke")
    assert "dvc.yaml: experiments.grpo_group_size has no stage" in used.stdout + used.stderr
    unmade = sh(folder, "grpo", "study", "check", check=False)
    assert unmade.returncode == 2 and part(example, "stages") in unmade.stderr  # it prints the very stage that is to be added

    add(folder / "dvc.yaml", part(example, "stages") + "\n", "  grpo_baselines:\n")
    sh(folder, "grpo", "study", "check")
    changed = sh(folder, "git", "diff", "--name-only").stdout.split()
    assert sorted(changed) == ["dvc.yaml", "params.yaml", "studies/base.yaml"]  # params.yaml is what `study use` writes

    before = lock(folder)
    ran = sh(folder, "dvc", "repro").stdout
    trained = re.findall(r"^> grpo train (.+)$", ran, re.M)
    assert trained == ["grpo_group_size group_8 --seed 0", "grpo_group_size group_4 --seed 0"]
    after = lock(folder)
    assert all(after[name] == before[name] for name in before if name.startswith(("grpo_", "sft_", "select@")))

    winner = json.loads((folder / "reports/select/grpo_learning_rate.json").read_text())["overrides"]
    for size in (8, 4):
        config = YAML(typ="safe").load((folder / f"data/runs/grpo_group_size/group_{size}/0/config.yaml").read_text())["config"]
        assert config["group_size"] == {"value": size, "from": f"arm group_{size}"}
        assert {key: config[key]["value"] for key in winner} == winner
    text = (folder / "reports/sections/grpo_group_size.md").read_text()
    assert "Group size (`grpo_group_size`)\n" in text
    assert {row["experiment"] for row in csv.DictReader((folder / "reports/results.csv").open())} >= {"grpo_group_size"}
    for made in ("tables/grpo_group_size.md", "figures/grpo_group_size.svg", "curves/grpo_group_size.csv"):
        assert (folder / "reports" / made).stat().st_size > 100
    assert "up to date" in sh(folder, "dvc", "status").stdout
