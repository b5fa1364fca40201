"""Exact verification of kissing configurations.

A set C of integer vectors other than 0 with min |x - y| >= max |x| over distinct x, y in C proves that the kissing number is
at least |C|: scaled to one length, the vectors are the centers of unit balls that touch one and do not overlap. No number is
rounded here: floats hold only integers below 2^53.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo.common.errors import UserError, reason
from grpo.discovery.sandbox import Limits, run_program

MOST_POINTS = {11: 868}  # de Laat and Leijenhorst 2024: no more balls than that can touch one, by dimension
MAX_PROGRAM_MB = 1.0
LEADING_BITS = 22  # of coordinates: a sum of 32 squares of their differences stays below 2^53, and so is exact as a float
MOST_COMPARED = 1 << 15  # pairs of points of larger integers, of which the nearest is looked for
DIGITS_SHOWN, SQUARE_DIGITS_SHOWN = 40, 200  # of a longer number only the ends are shown
ENDS_SHOWN = 12
PRINTED_SHOWN = 500  # characters


@dataclass(frozen=True)
class Verification:
    """What the verifier says of a set of points.

    Attributes:
        num_points: how many there are, valid or not.
        dimension: that they all have; None if they have none.
        validity: 1.0 if they prove that the kissing number is at least ``num_points``, else 0.0.
        combined_score: ``num_points`` if they are valid, else 0.0.
        message: why they are not valid; "" if they are.
    """

    num_points: int
    dimension: int | None
    validity: float
    combined_score: float
    message: str


def verify_program(program: Path, limits: Limits = Limits()) -> Verification:  # noqa: B008 - it is frozen
    """Run a program in the sandbox and check the points that it gives; whatever it does, the answer is a verdict.

    Raises:
        UserError: the file is missing, unreadable or no file.
    """
    try:
        if program.exists() and not program.is_file():
            raise UserError(f"{program}: not a file. Name a file with a Python program.")
        source = program.read_bytes()
    except OSError as error:
        raise UserError(f"{program}: cannot be read ({reason(error)}). Name a file with a Python program.") from error
    return _verify(source, limits, program.name)


def verify_text(text: str, limits: Limits = Limits()) -> Verification:  # noqa: B008 - it is frozen
    """As :func:`verify_program`, of the text of a program."""
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
        points: a list of lists of integers of any size, as JSON gave them; anything else gets a verdict that says what it is.
    """
    if not isinstance(points, list):
        return _invalid(f"The points are {_kind(points)}, expected a list of lists of integers")
    most = MOST_POINTS.get(dimension)
    if most is not None and len(points) > most:  # before anything takes long
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
    """What keeps points from being vectors of integers; "" if they are."""
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
    """Which point is 0, or there twice; "" if none."""
    first: dict[tuple[int, ...], int] = {}
    for index, point in enumerate(points):
        if not any(point):
            return f"Point {index} is the zero vector"
        earlier = first.setdefault(tuple(point), index)
        if earlier != index:
            return f"Points {earlier} and {index} are the same: {_shown(point)}"
    return ""


def _kind(value: object) -> str:
    """What a value that JSON gave is, for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value!r}, a float" if math.isfinite(value) else f"{value!r}"
    if isinstance(value, str):
        return f"the string {value[:ENDS_SHOWN]!r}" if len(value) <= ENDS_SHOWN else f"a string, {value[:ENDS_SHOWN]!r}..."
    if isinstance(value, int):
        return f"the integer {_digits(value)}"
    return (
        "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"of type {type(value).__name__}"
    )


def _shown(point: list[int]) -> str:
    return f"[{', '.join(map(_digits, point))}]"


def _digits(number: int, most: int = DIGITS_SHOWN) -> str:
    """A number in decimal; of one of more than ``most`` digits the first and the last, at any size."""
    if number.bit_length() < 3 * most:
        return str(number)
    sign, number = "-" * (number < 0), abs(number)
    count = int(number.bit_length() * math.log10(2)) - 1  # at least one digit below the first ones
    while 10**count <= number:
        count += 1
    if count <= most:
        return f"{sign}{number}"
    head, tail = number // 10 ** (count - ENDS_SHOWN), number % 10**ENDS_SHOWN
    return f"{sign}{head}...{tail:0{ENDS_SHOWN}d} ({count} digits)"


# --------------------------------------------------------------------------------------------------------- the distances


def _problem_of_distances(points: list[list[int]]) -> str:
    """Which two distinct points are nearer to each other than another is to 0; "" if none."""
    norms = [sum(entry * entry for entry in point) for point in points]
    longest = max(range(len(points)), key=norms.__getitem__)
    if len(points) == 1:
        return ""
    i, j, nearest, exact = _nearest(points, norms[longest])
    if nearest >= norms[longest]:
        return ""
    low, high = (_digits(square, SQUARE_DIGITS_SHOWN) for square in (nearest, norms[longest]))
    what = "Minimum squared distance" if exact else "Squared distance"
    return (
        f"{what} {low} < maximum squared norm {high}: points {i} {_shown(points[i])} and {j} {_shown(points[j])} are that near"
        f" to each other, and point {longest} {_shown(points[longest])} has that norm"
    )


def _nearest(points: list[list[int]], wanted: int) -> tuple[int, int, int, bool]:
    """The first of the pairs of points with the smallest distance, that distance squared, and True.

    Of large integers only the leading bits are compared first, which leaves few pairs to compare in full. Where it leaves many,
    of which the first is nearer than ``wanted`` (squared) already, that one is returned, and False: to compare all would take
    seconds.
    """
    from scipy.spatial.distance import pdist

    exact = np.array(points, dtype=object)
    moved = exact - exact[0]  # where all are far away and near one another, their leading bits would say nothing
    shift = max(0, int(np.abs(moved).max()).bit_length() - LEADING_BITS)
    squares = pdist((moved >> shift).astype(np.float64), "sqeuclidean")
    near = np.flatnonzero(squares <= _near(int(squares.min()), exact.shape[1], exact=shift == 0))
    rows, columns = (indices[near] for indices in np.triu_indices(len(points), 1))
    if shift == 0:
        near, rows, columns = near[:1], rows[:1], columns[:1]
    first = _squared_distance(points[rows[0]], points[columns[0]])
    if len(near) > MOST_COMPARED and first < wanted:
        return int(rows[0]), int(columns[0]), first, False
    lengths = [_squared_distance(points[i], points[j]) for i, j in zip(rows, columns, strict=True)]
    best = min(range(len(lengths)), key=lengths.__getitem__)
    return int(rows[best]), int(columns[best]), lengths[best], True


def _squared_distance(point: list[int], other: list[int]) -> int:
    return sum((x - y) ** 2 for x, y in zip(point, other, strict=True))


def _near(smallest: int, dimension: int, exact: bool) -> int:
    """Up to which square of leading bits a vector may be the shortest one, where ``smallest`` is the smallest such square.

    What was cut off each coordinate of a difference lies between -1 and 1 (in units of the last bit kept), so it changes a
    length by less than r = sqrt(dimension). With m the smallest square, the shortest vector is shorter than sqrt(m) + r, and
    its leading bits are shorter than sqrt(m) + 2 r. Squared: m + 4 sqrt(m dimension) + 4 dimension.
    """
    return smallest if exact else smallest + 4 * (math.isqrt(smallest * dimension) + 1) + 4 * dimension
