r"""Equality of expressions by their values: exact fractions where possible, else many digits, at chosen points.

Two expressions in elementary functions are equal if they agree at several generic rational points, and different if they differ
at one point. So no simplification is needed, and the time is bounded.

Irrational values are equal if they agree to working precision and also with twice as many digits. There is no absolute
tolerance. Variables are real: points at which a root or logarithm is not real are left out. Expressions without variables, or
with the imaginary unit, may be complex. Variables in factorials, binomials and the bounds of sums are natural numbers, and so
are n, m and k in floors, ceilings and exponents of negative numbers.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import prod
from typing import Any

from grpo.grader.expression import Node, operands, parse, variables
from grpo.grader.values import Effort, Evaluator, TooCostly, TooLarge, Undefined, context

_DIGITS = 50
_ENOUGH_POINTS = 5
_FEWEST_POINTS = 3
_MAX_VARIABLES = 8
# Kinds of nodes that may make an expression piecewise, such as |x-1000|.
_PIECEWISE = frozenset(("abs", "floor", "ceil", "root", "pow"))
_WHOLE = frozenset("nmk")
_FAILURES = (Undefined, TooCostly, ArithmeticError, ValueError, NotImplementedError)


def same_value(left: str, right: str, effort: Effort) -> bool | None:
    """Whether two normalised texts are expressions with the same value; None if one cannot be read or evaluated."""
    left_tree, right_tree = parse(left), parse(right)
    if left_tree is None or right_tree is None:
        return None
    pair = _Pair(left_tree, right_tree, effort)
    if len(pair.names) > _MAX_VARIABLES:
        return None
    try:
        return pair.agree_everywhere() if pair.names else pair.agree({})
    except Undefined:
        return False
    except _FAILURES:
        return None


def ratio(left: Node, right: Node, effort: Effort) -> int | None:
    """1 or -1 if ``left`` is a constant positive or negative multiple of ``right``, 0 if not, None if unknown.

    Both must depend on the same variables, at least one.
    """
    pair = _Pair(left, right, effort)
    if not 0 < len(pair.names) <= _MAX_VARIABLES or variables(pair.left) != variables(pair.right):
        return 0
    try:
        return pair.ratio()
    except _FAILURES:
        return None


def number(text: str, effort: Effort) -> Fraction | None:
    """The real value of an expression without variables, rounded to 40 digits if irrational; None if it has none."""
    tree = parse(text)
    if tree is None or variables(tree):
        return None
    try:
        value = Evaluator({}, context(_DIGITS), effort).value(tree)
        return value if isinstance(value, Fraction) else Fraction(context(_DIGITS).nstr(value, 40)) if value.imag == 0 else None
    except (*_FAILURES, TypeError):
        return None


# At every other point all variables are positive.
_SCALES = [Fraction(scale) for scale in ("1", "1", "1/2", "1/3", "4", "2/3", "40", "6", "1/9", "17", "120", "1/2", "300")]
_LARGEST_SCALE = 10**30
_STEPPED_POINTS = 100  # consecutive numbers, beyond the usual periods of floors


class _Points:
    """Test points: near ones, until enough are defined, and far ones for piecewise expressions.

    They are pseudo-random with the two expressions as the seed, so that no expression can be right at these points only. Signs
    and sizes vary, so that roots, logarithms and inverse functions are defined at some of them. Natural numbers follow each
    other.
    """

    def __init__(self, left: Node, right: Node, names: list[str]) -> None:
        self.names = names
        self.trees = (left, right)
        self.chance = random.Random(hashlib.sha256(repr(self.trees).encode()).digest())
        self.natural = sorted(_natural(left) | _natural(right))
        stepped = any(f"('{kind}'," in repr(self.trees) for kind in ("floor", "ceil"))
        self.enough = (_STEPPED_POINTS if stepped else len(_SCALES)) if self.natural else _ENOUGH_POINTS

    def near(self) -> Iterator[dict[str, Fraction]]:
        if self.natural:
            yield from map(self.following, range(self.enough))
            return
        for index, scale in enumerate(_SCALES):
            yield self.point(scale, 0 if index % 2 == 0 else self.chance.choice((255, 85, 170)))

    def point(self, scale: Fraction, signs: int) -> dict[str, Fraction]:
        values = {}
        for k, name in enumerate(self.names):
            value = scale * Fraction(self.chance.randint(6, 18), self.chance.choice((7, 11, 13)))
            values[name] = -value if (signs >> k) & 1 else value
        for name in self.natural:
            values[name] = Fraction(round(abs(values[name])))
        return values

    def following(self, step: int) -> dict[str, Fraction]:
        """A point of natural numbers: one variable takes every value in turn, the others random values of the same range."""
        values = self.point(_SCALES[step % len(_SCALES)], 0 if step % 2 == 0 else 170)
        turn = self.natural[step % len(self.natural)]
        numbers = {name: Fraction(self.chance.randint(1, self.enough)) for name in self.natural}
        return values | numbers | {turn: Fraction(1 + step // len(self.natural))}

    def far(self) -> Iterator[tuple[dict[str, Fraction], bool]]:
        """Points beyond the ends of pieces, which depend on the constants; True for a point beyond all of them."""
        constants: set[Fraction] = set()
        if not _survey(("pair", *self.trees), constants):
            return
        largest = prod((1 + constant for constant in constants), start=Fraction(3))
        if largest > _LARGEST_SCALE:
            raise TooCostly
        for scale in [largest, 1 / largest, *(c for c in sorted(constants, reverse=True)[:4] if c > 20)]:
            for stretched, signs in ((scale, 0), (scale, 255), (4 * scale, 0)):
                yield self.point(stretched, signs), stretched == largest


def _natural(tree: Node) -> frozenset[str]:
    """Names of the variables that must be natural numbers."""
    kind = tree[0]
    if kind == "series":
        return variables(tree[3]) | variables(tree[4]) | (_natural(tree[5]) - {tree[2]})
    letters = frozenset[str]().union(*map(_natural, operands(tree)))
    if kind in {"factorial", "factorial2", "binomial"}:
        letters |= variables(tree)
    elif kind in {"floor", "ceil"}:
        letters |= variables(tree) & _WHOLE
    elif kind == "pow" and tree[1][0] == "neg" and tree[1][1][0] == "num":
        letters |= variables(tree[2]) & _WHOLE
    return letters


def _survey(tree: Node, constants: set[Fraction], inside: bool = False) -> bool:
    """Whether the tree is piecewise; adds the sizes of constants inside pieces to ``constants``."""
    if not variables(tree):
        if inside:
            size = Fraction(float(abs(Evaluator({}, context(_DIGITS), Effort(500)).value(tree))))
            constants.add(max(size, 1 / size) if size else size)
        return False
    has_pieces = tree[0] in _PIECEWISE
    if tree[0] == "pow":  # x^{0.5} is a root; x^2 and 2^x have no pieces.
        has_pieces = not variables(tree[2]) and (tree[2][0] != "num" or tree[2][1].denominator != 1)
    inside |= has_pieces
    for part in operands(tree):
        has_pieces |= _survey(part, constants, inside)
    return has_pieces


class _Pair:
    """Two expressions to compare at points."""

    def __init__(self, left: Node, right: Node, effort: Effort) -> None:
        self.left, self.right, self.effort = left, right, effort
        self.names = sorted(variables(left) | variables(right))

    def agree_everywhere(self) -> bool | None:
        points = _Points(self.left, self.right, self.names)
        defined = 0
        for point in points.near():
            if defined >= points.enough:
                break
            try:
                if not self.agree(point):
                    return False
                defined += 1
            except (Undefined, TooLarge):
                continue
        for point, decides in points.far():
            try:
                if not self.agree(point):
                    return False
            except Undefined:
                continue
            except TooLarge:
                if decides:
                    raise
        return True if defined >= _FEWEST_POINTS else None

    def agree(self, point: Mapping[str, Fraction]) -> bool:
        """Compare at one point, by the rules in the module's docstring."""
        difference, size, bits = self.difference(point, _DIGITS)
        if isinstance(difference, Fraction):
            return difference == 0
        digits = _digits(bits)
        if digits > _DIGITS:
            difference, size, _ = self.difference(point, digits)
        within = difference <= size * _tolerance(digits - 12)
        if difference > size * _tolerance(3) > _tolerance(6):
            return False
        if within and point:
            return True
        again, size, _ = self.difference(point, 2 * digits)
        if again <= size * _tolerance(2 * digits - 12):
            return True
        # After a cancellation to zero, the difference shrinks further with more digits.
        return bool(again <= difference * _tolerance(digits // 2))

    def difference(self, point: Mapping[str, Fraction], digits: int) -> tuple[Any, Any, int]:
        """|left - right|, the larger absolute value, and the bits of the largest fraction."""
        evaluator = Evaluator(point, context(digits), self.effort)
        values = [evaluator.value(self.left), evaluator.value(self.right)]
        if all(isinstance(value, Fraction) for value in values):
            return abs(values[0] - values[1]), Fraction(0), 0
        first, second = (evaluator.real(value) for value in values)
        return abs(first - second), max(abs(first), abs(second)), evaluator.bits

    def ratio(self) -> int | None:
        choice = _Points(self.left, self.right, self.names)
        points = [*choice.near(), *(point for point, _ in choice.far())]
        quotients, bits = self.quotients(points, _DIGITS)
        digits = _digits(bits)
        if quotients and digits > _DIGITS:
            quotients, _ = self.quotients(points, digits)
        if quotients is None:
            return 0
        if len(quotients) < _FEWEST_POINTS:
            return None
        first = quotients[0]
        numbers = Evaluator({}, context(digits), self.effort)
        for quotient in quotients[1:]:
            is_exact = isinstance(quotient, Fraction) and isinstance(first, Fraction)
            tolerance = 0 if is_exact else abs(numbers.real(first)) * _tolerance(digits - 15)
            if abs(numbers.combine(operator.sub, quotient, first)) > tolerance:
                return 0
        return None if isinstance(first, context(digits).mpc) else 1 if first > 0 else -1

    def quotients(self, points: list[dict[str, Fraction]], digits: int) -> tuple[list[Any] | None, int]:
        """Quotients at points at which both sides are defined and not zero (None if only one is zero), and the bits needed."""
        quotients, bits = [], 0
        for point in points:
            try:
                evaluator = Evaluator(point, context(digits), self.effort)
                over, under = evaluator.value(self.left), evaluator.value(self.right)
            except (Undefined, TooLarge):
                continue
            bits = max(bits, evaluator.bits)
            if bool(over) != bool(under):
                return None, bits
            if over:
                quotients.append(evaluator.div(over, under))
        return quotients, bits


def _digits(bits: int) -> int:
    """Digits for numbers of ``bits``, so that constants as small as 1e-18 do not vanish."""
    return _DIGITS + (int(bits * 0.302) + 10 if bits > 60 else 0)


def _tolerance(digits: int) -> Any:
    return context(_DIGITS).mpf(10) ** -digits
