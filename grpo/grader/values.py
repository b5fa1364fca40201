"""Evaluation of expression trees at one point: exact fractions for rational values, mpmath numbers for others.

Every operation first spends some of an :class:`Effort`, which bounds the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import comb, isqrt, prod
from typing import Any

from grpo.grader.expression import Node

_MAX_BITS = 60_000  # of a fraction's numerator or denominator; 2004! has 19,000
_MAX_MIXED_BITS = 3_000  # of a fraction in an operation with an irrational number
_MAX_LOG = 100_000.0  # largest logarithm of the value of a power or exponential


class Undefined(Exception):
    """The expression has no value at this point."""


class TooCostly(Exception):
    """The evaluation would take more time or memory than allowed."""


class TooLarge(TooCostly):
    """A value at this point is too large; at another point it may not be."""


class Effort:
    """Remaining computation, in units of about a microsecond."""

    def __init__(self, units: float) -> None:
        self.units = units

    def spend(self, units: float) -> None:
        self.units -= units
        if self.units < 0:
            raise TooCostly


@lru_cache(maxsize=32)
def context(digits: int) -> Any:
    """An mpmath context for a precision, as other code may use the global one."""
    import mpmath  # type: ignore[import-untyped]

    context = mpmath.MPContext()
    context.dps = digits
    return context


class Evaluator:
    """Evaluates trees at one point (name -> value) in an mpmath context."""

    def __init__(self, point: Mapping[str, Fraction], context: Any, effort: Effort) -> None:
        self.point = dict(point)
        self.context = context
        self.effort = effort
        self.bits = 0
        self.may_be_complex = not point

    def value(self, tree: Node) -> Any:
        kind = tree[0]
        self.effort.spend(2)
        if kind == "num":
            return self.checked(tree[1])
        if kind == "var":
            return self.point[tree[1]]
        if kind == "const":
            return self.constant(tree[1])
        if kind == "term":
            raise TooCostly  # an unknown term has no value
        if kind == "series":
            return self.series(*tree[1:])
        if kind == "unknown":
            return self.unknown(tree[1], [self.value(part) for part in tree[2:]])
        values = [self.value(part) for part in tree[1:]]
        return self.measured(getattr(self, kind)(*values) if kind in _BINARY else self.function(kind, values[0]))

    def measured(self, value: Any) -> Any:
        """Return ``value`` and record its size, which determines the digits needed."""
        if not isinstance(value, Fraction) and value:
            self.bits = max(self.bits, abs(int(self.context.mag(value))))
            if self.bits > _MAX_MIXED_BITS:
                raise TooLarge
        return value

    def real(self, value: Any) -> Any:
        """Convert a fraction to an mpmath number; other values stay."""
        if not isinstance(value, Fraction):
            return value
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if bits > _MAX_MIXED_BITS:
            raise TooLarge
        self.bits = max(self.bits, bits)
        return self.context.mpf(value.numerator) / value.denominator

    def checked(self, value: Fraction) -> Fraction:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > 2 * _MAX_BITS:
            raise TooLarge
        self.effort.spend(bits * bits * 2e-6)
        return value

    def constant(self, name: str) -> Any:
        if name == "i":
            self.may_be_complex = True
            return self.context.mpc(0, 1)
        return +self.context.pi if name == "pi" else +self.context.e

    def combine(self, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return self.checked(operation(a, b))
        return operation(self.real(a), self.real(b))

    def add(self, a: Any, b: Any) -> Any:
        return self.combine(operator.add, a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self.combine(operator.mul, a, b)

    def div(self, a: Any, b: Any) -> Any:
        if not b:
            raise Undefined
        return self.combine(operator.truediv, a, b)

    def pow(self, a: Any, b: Any) -> Any:
        if isinstance(b, Fraction) and b.denominator == 1:
            return self.integer_power(a, b.numerator)
        if not a:
            if isinstance(b, Fraction) and b > 0:
                return Fraction(0)
            raise Undefined
        if isinstance(b, Fraction) and (isinstance(a, (Fraction, self.context.mpc)) or a < 0):
            return self.root(self.integer_power(a, b.numerator), Fraction(b.denominator))
        base, exponent = self.real(a), self.real(b)
        if not self.may_be_complex and base < 0:
            raise Undefined
        self.effort.spend(80)
        if abs(exponent) * (abs(self.context.log(abs(base))) + 4) > _MAX_LOG:
            raise TooLarge
        return self.context.power(base, exponent)

    def integer_power(self, a: Any, n: int) -> Any:
        if not a and n <= 0:
            raise Undefined
        if not a or n == 0:
            return Fraction(n == 0)
        if isinstance(a, Fraction):
            bits = max(a.numerator.bit_length(), a.denominator.bit_length())
            if a not in (1, -1) and bits * abs(n) > _MAX_BITS * 1.5:
                raise TooLarge
            return self.checked(a ** (n if abs(n) < 2**20 else n % 2))
        if abs(n) > 10_000 or abs(n) * abs(float(self.context.log(abs(a)))) > _MAX_LOG:
            raise TooLarge
        self.effort.spend(20)
        return a**n

    def root(self, a: Any, degree: Any) -> Any:
        """The real root, also of a negative number if the degree is odd; else the principal root."""
        if not (isinstance(degree, Fraction) and degree.denominator == 1 and 1 <= degree <= 10_000):
            raise TooLarge
        n = int(degree)
        self.effort.spend(10)
        if isinstance(a, Fraction) and n == 2 and a >= 0:
            upper, lower = isqrt(a.numerator), isqrt(a.denominator)
            if upper * upper == a.numerator and lower * lower == a.denominator:
                return Fraction(upper, lower)
        value = self.real(a)
        if isinstance(value, self.context.mpc):
            return self.context.root(value, n)
        if value < 0 and n % 2:
            return -self.context.root(-value, n)
        if value < 0 and not self.may_be_complex:
            raise Undefined
        return self.context.root(value if value >= 0 else self.context.mpc(value), n)

    def binomial(self, a: Any, b: Any) -> Any:
        n, k = (self.natural(x, 3000) for x in (a, b))
        return self.checked(Fraction(comb(n, k)))

    def natural(self, value: Any, largest: int) -> int:
        if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
            raise Undefined
        if value > largest:
            raise TooLarge
        self.effort.spend(float(value) ** 2 / 20_000)
        return int(value)

    def function(self, name: str, a: Any) -> Any:
        if name in {"neg", "abs"}:
            return -a if name == "neg" else abs(a)
        if name in {"factorial", "factorial2"}:
            return self.checked(Fraction(prod(range(self.natural(a, 2100), 0, -1 if name == "factorial" else -2))))
        if name in {"floor", "ceil"}:
            if isinstance(a, Fraction):
                return Fraction(-(-a // 1) if name == "ceil" else a // 1)
            if isinstance(a, self.context.mpc):
                raise Undefined
            if abs(a - self.context.nint(a)) < max(abs(a), 1) * self.context.mpf(10) ** (8 - self.context.dps):
                raise TooCostly  # too few digits to decide whether it is a whole number
            return Fraction(int(self.context.ceil(a) if name == "ceil" else self.context.floor(a)))
        if isinstance(a, Fraction) and a == 0 and name in _AT_ZERO:
            return Fraction(_AT_ZERO[name])
        self.effort.spend(60)
        return self.transcendental(name, self.real(a))

    def transcendental(self, name: str, x: Any) -> Any:
        context = self.context
        if name in {"ln", "log", "lg"}:
            if not x or (not self.may_be_complex and x < 0):
                raise Undefined
        elif abs(x) > _MAX_LOG and name != "arctan":
            raise TooLarge
        beyond = abs(x) > 1 if name in {"arcsin", "arccos", "arctanh"} else name == "arccosh" and x < 1
        if beyond and not self.may_be_complex:
            raise Undefined
        if name == "tanh":  # 1 - tanh(x) is as small as exp(-2x)
            self.bits = max(self.bits, int(abs(x)) * 3)
        if name in _POLES:
            below = getattr(context, _POLES[name])(x)
            if abs(below) < context.mpf(10) ** (8 - context.dps):
                raise Undefined
        return getattr(context, _MPMATH_NAMES.get(name, name.replace("arc", "a")))(x)

    def unknown(self, name: str, arguments: list[Any]) -> Any:
        """Evaluate an unknown function, for which any function without symmetries may stand."""
        shift, total = abs(self.point[name + "()"]), Fraction(1)
        for argument in arguments:
            value = self.add(self.mul(total, argument), self.pow(argument, Fraction(3)))
            total = self.div(self.add(value, shift), self.add(self.mul(argument, argument), 1 + shift))
        return total

    def series(self, name: str, index: str, low: Node, high: Node, body: Node) -> Any:
        first, last = self.value(low), self.value(high)
        if not all(isinstance(end, Fraction) and end.denominator == 1 for end in (first, last)) or last - first > 2000:
            raise TooLarge
        total: Any = Fraction(0 if name == "sum" else 1)
        combine = self.add if name == "sum" else self.mul
        outer = self.point
        for k in range(int(first), int(last) + 1):
            self.point = outer | {index: Fraction(k)}
            total = combine(total, self.value(body))
        self.point = outer
        return total


_BINARY = frozenset(("add", "mul", "div", "pow", "root", "binomial"))
_AT_ZERO = dict.fromkeys(("sin", "tan", "arcsin", "arctan", "sinh", "tanh"), 0)
_AT_ZERO |= dict.fromkeys(("cos", "sec", "exp", "cosh", "cis"), 1)
_POLES = {"tan": "cos", "sec": "cos", "cot": "sin", "csc": "sin"}
_MPMATH_NAMES = {"cis": "expj", "log": "log10", "lg": "log10"}
