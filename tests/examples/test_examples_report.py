"""The study of a task of one's own that docs/extending.md prints, as it stands there, runs to the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_parts import clone_with_study, run_to_the_report


@pytest.mark.nightly
def test_a_study_of_a_task_of_ones_own_in_a_folder_outside_the_project(tmp_path: Path) -> None:
    place = "../our lab"
    shorter = "models: {main: {steps: 40}}\n"
    run_to_the_report(clone_with_study(tmp_path / "clone", "extending.md", "backwards", place, shorter), place)
