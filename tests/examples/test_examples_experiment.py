"""examples/group_size.yaml: an experiment is one file of the user's, wherever it lies."""

from __future__ import annotations

from pathlib import Path

from study_parts import ROOT, Grpo

from grpo.study.effective import effective_run
from grpo.study.schema import load_study


def test_it_adds_its_arms_to_a_study_and_they_start_from_the_winner(workdir: Path, grpo: Grpo) -> None:
    lab = workdir / "our lab"
    lab.mkdir()
    (lab / "group_size.yaml").write_text((ROOT / "examples/group_size.yaml").read_text())
    code, _, error = grpo("study", "use", str(lab / "group_size.yaml"))
    assert code == 0, error
    study = load_study()
    assert study.needed_selections("grpo_group_size") == ["grpo_learning_rate"]
    winner = {"experiment": "grpo_learning_rate", "winner": "low", "overrides": {"learning_rate": 5e-4}}
    for size in (8, 4):
        run = effective_run(study, "grpo_group_size", f"group_{size}", study.seeds[0], [winner])
        assert (run.config.group_size, run.sources["group_size"]) == (size, f"arm group_{size}")
        assert (run.config.learning_rate, run.sources["learning_rate"]) == (5e-4, "winner of grpo_learning_rate (low)")
    assert {"grpo_learning_rate", "grpo_group_size"} <= {row["experiment"] for row in study.runs_table().values()}
