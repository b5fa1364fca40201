"""The studies that the docs print, as they stand there, run to the report. (That of a taskset: tests/adapters.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_parts import clone_with_study, run_to_the_report
from model_parts import tiny_checkpoint

pytestmark = pytest.mark.slow


def test_a_study_of_a_task_of_ones_own_in_a_folder_outside_the_project(tmp_path: Path) -> None:
    place = "../our lab"
    shorter = "models: {main: {steps: 40}}\n"
    run_to_the_report(clone_with_study(tmp_path / "clone", "extending.md", "backwards", place, shorter), place)


def test_a_study_that_asks_in_chats_only(tmp_path: Path) -> None:
    folder = clone_with_study(tmp_path / "clone", "settings.md", "digits")
    tiny_checkpoint(folder / "my-model", "llama", "like_llama3", ["Say number 12 in digits.", "You are a calculator."])
    run_to_the_report(folder)
