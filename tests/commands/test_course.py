"""`make test-course`: a course's unit tests, here small ones written in their form, run against this package."""

from __future__ import annotations

from pathlib import Path

import pytest
from course import run

TESTS = """
import torch

from .adapters import (
    run_compute_policy_gradient_loss as compute_policy_gradient_loss,
    run_masked_normalize as masked_normalize,
    run_parse_mmlu_response as parse_mmlu_response,
)


def test_no_baseline(scale):
    loss, _ = compute_policy_gradient_loss(torch.full((1, 2), -0.5), "no_baseline", torch.tensor([[scale]]), None, None, None)
    assert loss.tolist() == [[1.0, 1.0]]


def test_masked_normalize():
    assert masked_normalize(tensor=torch.ones(2, 2), mask=torch.eye(2), dim=-1, normalize_constant=4.0).tolist() == [0.25, 0.25]


def test_of_the_optional_part():
    assert parse_mmlu_response({}, "The answer is B.") == "B"
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course's repository, as a student has it before the assignment: its adapters raise NotImplementedError."""
    tests = tmp_path / "course/tests"
    tests.mkdir(parents=True)
    (tests / "test_grpo.py").write_text(TESTS)
    (tests / "conftest.py").write_text("import pytest\n\n\n@pytest.fixture\ndef scale():\n    return 2.0\n")
    (tests / "adapters.py").write_text("def run_masked_normalize(*arguments):\n    raise NotImplementedError\n")
    return tmp_path / "course"


@pytest.mark.slow
def test_a_courses_tests_run_against_this_package(course: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (course / "tests/adapters.py").read_text()
    assert run(course) == 0
    out = capfd.readouterr().out
    assert "2 passed, 1 skipped" in out and "run_parse_mmlu_response" in out
    assert (course / "tests/adapters.py").read_text() == before
    (course / "tests/test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    assert run(course / "tests") == 1
