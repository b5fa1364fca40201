"""Exact verification of kissing configurations in dimension 11.

A set C of non-zero integer vectors with min |x - y| >= max |x| over distinct x, y in C proves that the kissing number is at
least |C|: scaled to equal length, the vectors are centers of unit balls that touch one ball and do not overlap. All arithmetic
is exact, in integers.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from grpo.common.errors import library_errors
from grpo.discovery.sandbox import Limits, ProgramError, run_program

DIMENSION = 11
MOST_POINTS = 868  # upper bound on the kissing number in dimension 11 (de Laat and Leijenhorst 2024)
_Point = Annotated[list[StrictInt], Field(min_length=DIMENSION, max_length=DIMENSION)]
_POINTS = TypeAdapter(Annotated[list[_Point], Field(min_length=1)])


@dataclass(frozen=True)
class Verification:
    """The verdict on a set of points."""

    num_points: int  # number of points, valid or not
    dimension: int | None  # their common dimension; None if they have none
    validity: float  # 1.0 if they prove that the kissing number is at least ``num_points``, else 0.0
    combined_score: float  # ``num_points`` if they are valid, else 0.0
    message: str  # the reason why they are not valid, else ""


def verify_program(program: Path, limits: Limits = Limits()) -> Verification:  # noqa: B008 - it is frozen
    """Run a program in the sandbox and check its points; any misbehaviour of the program gives a verdict.

    Raises UserError if the file cannot be read.
    """
    with library_errors(lambda why: f"{program}: cannot be read ({why}). Name a file with a Python program."):
        source = program.read_bytes()
    return verify_text(source, limits, program.name)


def verify_text(text: str | bytes, limits: Limits = Limits(), name: str = "program.py") -> Verification:  # noqa: B008
    """Verify the text of a program, as :func:`verify_program` does."""
    try:
        source = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return check_points(run_program(source, limits, name))
    except ProgramError as error:
        return _invalid(str(error))


def check_points(points: object) -> Verification:
    """Check exactly whether points prove a lower bound on the kissing number.

    ``points``: lists of integers of any size, as read from JSON; any other value gets a verdict that says what it is.
    """
    if not isinstance(points, list):
        return _invalid(f"The points are {reprlib.repr(points)}, expected a list of lists of integers")
    if len(points) > MOST_POINTS:  # first, as the checks below take long for many points
        return _invalid(f"{len(points)} points are more than {MOST_POINTS}, the proven upper bound", len(points))
    lengths = {len(point) if isinstance(point, list) else None for point in points}
    common = lengths.pop() if len(lengths) == 1 else None
    try:
        problem = _problem_of_distances(_POINTS.validate_python(points))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{index}]" for index in first["loc"])
        problem = f"points{place}: {first['msg']}, but it is {reprlib.repr(first['input'])}"
    if problem:
        return _invalid(problem, len(points), common)
    return Verification(len(points), common, 1.0, float(len(points)), "")


def _invalid(message: str, num_points: int = 0, dimension: int | None = None) -> Verification:
    return Verification(num_points, dimension, 0.0, 0.0, message)


def _problem_of_distances(points: list[list[int]]) -> str:
    """The zero vector, or the closest pair of points if its distance is below the largest norm, as a message; else ""."""
    norms, distances = _squares(points)
    if not norms.all():
        return f"Point {int(norms.argmin())} is the zero vector"
    if len(points) == 1:
        return ""
    longest = int(norms.argmax())
    rows, columns = np.triu_indices(len(points), 1)
    pair = int(distances[rows, columns].argmin())
    i, j = int(rows[pair]), int(columns[pair])
    if distances[i, j] >= norms[longest]:
        return ""
    return (
        f"Minimum squared distance {distances[i, j]} < maximum squared norm {norms[longest]}: points {i} {points[i]} and {j}"
        f" {points[j]} are that near to each other, and point {longest} {points[longest]} has that norm"
    )


def _squares(points: list[list[int]]) -> tuple[Any, Any]:
    """All squared norms, shape (n,), and squared distances, shape (n, n), exactly: |x|^2 + |y|^2 - 2 xy.

    Uses 64-bit integers if no sum overflows (4 dimension max|x_i|^2 bounds all of them), else Python's integers.
    """
    largest = max(abs(entry) for point in points for entry in point)
    array = np.array(points, dtype=np.int64 if 4 * DIMENSION * largest**2 < 2**63 else object)
    products = array @ array.T
    norms = products.diagonal()
    return norms, norms[:, None] + norms[None, :] - 2 * products
