"""Exact verification of kissing configurations.

A set C of non-zero integer vectors with min |x - y| >= max |x| over distinct x, y in C proves that the kissing number is at
least |C|: scaled to equal length, the vectors are centers of unit balls that touch one ball and do not overlap. All arithmetic
is exact, in integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo.common.errors import UserError, reason
from grpo.discovery.sandbox import Limits, run_program

MOST_POINTS = {11: 868}  # dimension -> upper bound (de Laat and Leijenhorst 2024)
MAX_PROGRAM_MB = 1.0
START_SHOWN = 12  # characters of a string in a message
PRINTED_SHOWN = 500  # characters of a program's output in a message


@dataclass(frozen=True)
class Verification:
    """The verdict on a set of points.

    Attributes:
        num_points: number of points, valid or not.
        dimension: their common dimension; None if they have none.
        validity: 1.0 if they prove that the kissing number is at least ``num_points``, else 0.0.
        combined_score: ``num_points`` if they are valid, else 0.0.
        message: the reason why they are not valid, else "".
    """

    num_points: int
    dimension: int | None
    validity: float
    combined_score: float
    message: str


def verify_program(program: Path, limits: Limits = Limits()) -> Verification:  # noqa: B008 - it is frozen
    """Run a program in the sandbox and check its points; any misbehaviour of the program gives a verdict.

    Raises:
        UserError: the file is missing, unreadable or not a file.
    """
    try:
        if program.exists() and not program.is_file():
            raise UserError(f"{program}: not a file. Name a file with a Python program.")
        source = program.read_bytes()
    except OSError as error:
        raise UserError(f"{program}: cannot be read ({reason(error)}). Name a file with a Python program.") from error
    return _verify(source, limits, program.name)


def verify_text(text: str, limits: Limits = Limits()) -> Verification:  # noqa: B008 - it is frozen
    """Verify the text of a program, as :func:`verify_program` does."""
    return _verify(text.encode("utf-8", "surrogatepass"), limits, "program.py")


def _verify(source: bytes, limits: Limits, name: str) -> Verification:
    if len(source) > MAX_PROGRAM_MB * 1e6:
        return _invalid(f"The program is larger than {MAX_PROGRAM_MB:g} MB")
    outcome = run_program(source, limits, name)
    if not outcome.failure:
        return check_points(outcome.points)
    printed = "".join(c if c.isprintable() else " " for c in outcome.printed[-PRINTED_SHOWN:]).strip()
    return _invalid(outcome.failure + (f". The end of what it printed: {printed}" if printed else ""))


def check_points(points: object, dimension: int = 11) -> Verification:
    """Check exactly whether points prove a lower bound on the kissing number.

    Args:
        points: lists of integers of any size, as read from JSON; any other value gets a verdict that says what it is.
    """
    if not isinstance(points, list):
        return _invalid(f"The points are {_kind(points)}, expected a list of lists of integers")
    most = MOST_POINTS.get(dimension)
    if most is not None and len(points) > most:  # first, as the checks below take long for many points
        return _invalid(
            f"{len(points)} points are more than {most}, the proven upper bound on the kissing number in dimension {dimension} "
            "(de Laat and Leijenhorst 2024), so they cannot be valid",
            len(points),
        )
    lengths = {len(point) if isinstance(point, list) else None for point in points}
    common = lengths.pop() if len(lengths) == 1 else None
    problem = _problem_of_form(points, dimension) or _problem_of_vectors(points) or _problem_of_distances(points)
    if problem:
        return _invalid(problem, len(points), common)
    return Verification(len(points), dimension, 1.0, float(len(points)), "")


def _invalid(message: str, num_points: int = 0, dimension: int | None = None) -> Verification:
    return Verification(num_points, dimension, 0.0, 0.0, message)


# -------------------------------------------------------------------------------------------------------------- the form


def _problem_of_form(points: list[Any], dimension: int) -> str:
    """The reason why points are not vectors of integers, else ""."""
    if not points:
        return "There are no points: the list is empty"
    for index, point in enumerate(points):
        if not isinstance(point, list):
            return f"Point {index} is {_kind(point)}, expected a list of {dimension} integers"
        if len(point) != dimension:
            others = f"; point 0 has {dimension}" if index else ""
            return f"Point {index} has dimension {len(point)}, expected {dimension}{others}"
        for position, entry in enumerate(point):
            if type(entry) is not int:  # True is an int too
                return f"Point {index}, entry {position} is {_kind(entry)}, expected an integer"
    return ""


def _problem_of_vectors(points: list[list[int]]) -> str:
    """The first point that is zero or a duplicate, as a message; "" if there is none."""
    first: dict[tuple[int, ...], int] = {}
    for index, point in enumerate(points):
        if not any(point):
            return f"Point {index} is the zero vector"
        earlier = first.setdefault(tuple(point), index)
        if earlier != index:
            return f"Points {earlier} and {index} are the same: {point}"
    return ""


def _kind(value: object) -> str:
    """Describe a value from JSON, for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value!r}, a float" if math.isfinite(value) else f"{value!r}"
    if isinstance(value, str):
        return f"the string {value[:START_SHOWN]!r}" if len(value) <= START_SHOWN else f"a string, {value[:START_SHOWN]!r}..."
    if isinstance(value, int):
        return f"the integer {value}"
    return (
        "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"of type {type(value).__name__}"
    )


# --------------------------------------------------------------------------------------------------------- the distances


def _problem_of_distances(points: list[list[int]]) -> str:
    """The closest pair of points, as a message, if its distance is below the largest norm; else ""."""
    norms, distances = _squares(points)
    longest = int(norms.argmax())
    if len(points) == 1:
        return ""
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
    array = np.array(points, dtype=np.int64 if 4 * len(points[0]) * largest**2 < 2**63 else object)
    products = array @ array.T
    norms = products.diagonal()
    return norms, norms[:, None] + norms[None, :] - 2 * products
