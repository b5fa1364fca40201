"""A part of the smoke study from scratch through DVC: the files that Snakemake makes of it, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_parts import digests, fresh_clone, lock, sh

pytestmark = pytest.mark.slow

PART = ("expert_iteration_experiment", "grpo_learning_rate", "grpo_keyword_inclusion")


def test_dvc_from_scratch_gives_the_same_results(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fresh_clone(tmp_path)
    sh(tmp_path, "dvc", "repro", "math_baseline", *(f"select@{experiment}" for experiment in PART))
    finished = request.getfixturevalue("finished")  # only now: meanwhile another process may be making it
    made, files = lock(tmp_path), digests(tmp_path)
    assert len(made) == 13 and made.items() <= lock(finished).items()
    assert {name.split("/")[2] for name in files} == set(PART) and files.items() <= digests(finished).items()
