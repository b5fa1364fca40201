"""data/kissing_number/evaluator.py, as the homework calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EVALUATOR = Path(__file__).parents[2] / "data/kissing_number/evaluator.py"
TWO = [[2, *[0] * 10], [-2, *[0] * 10]]


@pytest.mark.parametrize(
    ("points", "code", "lines"),
    [
        (TWO, 0, ["num_points: 2", "dimension: 11", "validity: 1.0"]),
        (
            [*TWO, [1, *[0] * 10]],
            1,
            ["num_points: 3", "dimension: 11", "validity: 0.0", "message: Minimum squared distance 1 < maximum squared norm 4"],
        ),
    ],
)
def test_it_prints_what_the_verifier_found(points: list[list[int]], code: int, lines: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"points = {points}\n")
    done = subprocess.run([sys.executable, EVALUATOR, program], capture_output=True, text=True, check=False)
    printed = done.stdout.splitlines()
    assert done.returncode == code
    assert len(printed) == len(lines)
    assert all(got.startswith(line) for got, line in zip(printed, lines, strict=True))
