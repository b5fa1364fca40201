"""Comparison of two normalised answers, part by part: first as mathematics, last as words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cached_property
from typing import Self, TypeVar

from grpo.grader.expression import Node, cleared, parse
from grpo.grader.names import assigned, is_name, letters_of, named_sides, same_name, with_argument_of
from grpo.grader.normalise import RELATION, unwrap_text
from grpo.grader.numeric import number, ratio, same_value
from grpo.grader.quantity import PERCENT, conversion, exact_value, same_amount, same_number, same_quantity, split_unit
from grpo.grader.relations import as_real_set, in_usual_signs, member_of, same_reals
from grpo.grader.split import matrix_rows, parts_of, points_of, split_equations, top_level
from grpo.grader.values import Effort
from grpo.grader.words import based, number_word, same_ratio, same_time, same_words

_MAX_PARTS = 40

_CHAIN = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_DEGREE = "\\text{degree}"
_SUM = re.compile(r"[0-9A-Za-z)}] ?[+-]")
_INVERSE = re.compile(r"[A-Z)]\^(?:\{-1\}|T|\{T\}|\\top|\\intercal)(?![A-Za-z])")
_OPPOSITE = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
_POINTS = re.compile("[A-H]{2,}")  # segments, orders and matrices; VP is PV
_FIGURE = re.compile(r"\\(angle|vec|overrightarrow|overline) ?\{?([A-Z](?: ?[A-Z]){1,2}|[a-z]{2})\}?(?![A-Za-z])")
_EMPTY = frozenset(("\\emptyset", "\\{\\}"))


T = TypeVar("T")


class NeedsAlgebra(BaseException):
    """Only computer algebra can decide. Derives from BaseException, so that the handler of defects does not catch it."""


class Comparison:
    """A comparison of two answers.

    Attributes:
        algebra: compares expressions that this package cannot read; None raises :class:`NeedsAlgebra` instead.
        effort: remaining computation.
        levels: bound on the nesting of lists in lists.
        in_set: whether two elements of sets are compared, where {5} is not 5.
    """

    def __init__(
        self, algebra: Callable[[str, str], bool] | None, effort: Effort, levels: int = 6, in_set: bool = False
    ) -> None:
        self.algebra = algebra
        self.effort = effort
        self.levels = levels
        self.in_set = in_set

    @cached_property
    def inside(self) -> Self:
        """The same comparison, one level of nesting deeper."""
        return self.within(self.levels - 1)

    @cached_property
    def elements(self) -> Self:
        return self.within(self.levels - 1, in_set=True)

    def within(self, levels: int, in_set: bool = False) -> Self:
        return type(self)(self.algebra, self.effort, levels, in_set or self.in_set)

    def same(self, answer: str, truth: str) -> bool:
        """Whether two normalised texts are equal."""
        if not answer or not truth or self.levels == 0:
            return False
        if self.spelt_alike(answer, truth):
            return True
        written_forms = (same_number, same_amount, self.approximation, self.degrees)
        for compare in (*written_forms, self.relation, self.assignments, self.equation, self.matrix, self.parts):
            verdict = compare(answer, truth)
            if verdict is not None:
                return verdict
        return self.single(answer, truth)

    def spelt_alike(self, answer: str, truth: str) -> bool:
        """Whether two texts are identical up to a ``\\text{}`` around one of them."""
        return unwrap_text(answer) == unwrap_text(truth)

    def every(self, pairs: Iterable[tuple[str, str]], comparison: Self | None = None) -> bool:
        """Whether all pairs are equal; pairs that need algebra come last, as another pair may decide."""
        open_question = False
        for answer, truth in pairs:
            try:
                if not (comparison or self.inside).same(answer, truth):
                    return False
            except NeedsAlgebra:
                open_question = True
        if open_question:
            raise NeedsAlgebra
        return True

    def approximation(self, answer: str, truth: str) -> bool | None:
        r"""Compare the exact sides of ``a \\approx b``; a rounded number alone answers no whole number."""
        if "\\approx" not in answer and "\\approx" not in truth:
            return None
        exact, true_exact = self.exact_side(answer), self.exact_side(truth)
        is_rounded = "\\approx" not in truth and "\\approx" in answer and exact[1] and "." not in truth
        return not is_rounded and bool(exact[0] and true_exact[0]) and self.inside.same(exact[0], true_exact[0])

    def exact_side(self, text: str) -> tuple[str, bool]:
        r"""The exact side of ``a \\approx b`` and False; b or ``x=b`` and True if a is missing or a name; "" if they differ."""
        exact, sign, rounded = (part.strip() for part in text.partition("\\approx"))
        body = split_unit(rounded)[0]
        value = exact_value(body)
        if not sign:
            return text, False
        if value is None:
            return "", False
        if not exact or is_name(exact):
            return (f"{exact}={rounded}" if exact else rounded), True
        place = number(unwrap_text(split_unit(split_equations(exact)[-1])[0]), self.effort)
        if place is None:
            return "", False
        rest = (Fraction(place) - value) * 10 ** len(body.partition(".")[2]) * (1 if place > 0 else -1)
        return (exact if -0.500001 < rest < 1 else ""), False  # rounded, or cut off

    def degrees(self, answer: str, truth: str) -> bool | None:
        """Compare sums without their degree signs."""
        if "\\pi" in answer + truth and ("deg" in answer) != ("deg" in truth):
            return False  # a measure in radians
        if _DEGREE not in answer and _DEGREE not in truth:
            return None
        pair = (answer.replace(_DEGREE, ""), truth.replace(_DEGREE, ""))
        if any("\\text" in text for text in pair) or not any(_SUM.search(text) for text in pair):
            return None
        return self.inside.same(*pair)

    def relation(self, answer: str, truth: str) -> bool | None:
        """Decide if one side contains an inequality or names the real line."""
        usual = (in_usual_signs(answer), in_usual_signs(truth))
        if usual != (answer, truth):
            return self.inside.same(*usual)
        if not any(
            RELATION.search(text)
            or (any(mark in text for mark in ("mathbb", "real", "setminus", "\\cup", "number")) and not text[0].isdigit())
            or text == "R"
            for text in (answer, truth)
        ):
            return None
        sets = [as_real_set(text.strip(), self.effort) for text in (answer, truth)]
        if sets[0] is not None and sets[1] is not None:
            names = [found.name for found in sets if found and found.name]
            return (len(names) < 2 or same_name(*names)) and same_reals(sets[0], sets[1])
        if RELATION.search(answer) and RELATION.search(truth):
            if all(len(top_level(text, ",;")) > 1 for text in (answer, truth)):
                return None
            chains = [_CHAIN.search(text) is not None for text in (answer, truth)]
            if any(chains):
                return all(chains) and self.same_chain(answer, truth)
        if "=" not in answer + truth and (exact_value(answer) is not None or exact_value(truth) is not None):
            return False
        members = (member_of(answer), member_of(truth))
        return self.inside.same(*members) if members != (answer, truth) else None

    def same_chain(self, answer: str, truth: str) -> bool:
        """Compare ``a < b < c`` side by side, in both directions, or inequalities that are multiples of each other."""
        operators, true_operators = (_CHAIN.findall(text) for text in (answer, truth))
        sides, true_sides = ([side.strip() for side in _CHAIN.split(text)] for text in (answer, truth))
        flipped = [_OPPOSITE[operator] for operator in reversed(operators)]
        for these, those in ((operators, sides), (flipped, sides[::-1])):
            if these == true_operators and self.every(zip(those, true_sides, strict=True)):
                return True
        allowed = [sign for sign, these in ((1, operators), (-1, flipped)) if these == true_operators]
        if len(operators) != 1 or not allowed:
            return False
        left, right = _difference(sides), _difference(true_sides)
        return left is not None and right is not None and ratio(left, right, self.effort) in allowed

    def assignments(self, answer: str, truth: str) -> bool | None:
        """Compare ``x = 3, y = 4`` by its names; with a bare list or a point, in the order of the text or of the names."""
        (letters, points), (true_letters, true_points) = points_of(answer), points_of(truth)
        if len(points) > 1 or len(true_points) > 1:
            if points and true_points and letters != true_letters:
                return False
            return self.inside.same(",".join(points) or answer, ",".join(true_points) or truth)
        named, true_named = assigned(answer), assigned(truth)
        if named and true_named and dict(named).keys() == dict(true_named).keys():
            return self.every(zip(*([value for _, value in sorted(these)] for these in (named, true_named)), strict=True))
        values = named or true_named
        other = truth if named else answer
        if not values or "=" in other:
            return None
        kind, parts = parts_of(other)
        if kind not in {"set", "()", "[]"}:
            return None
        if len(parts) != len(values) or (kind == "[]" and len(parts) == 2):
            return False
        order = [value for _, value in (sorted(values) if {name for name, _ in values} <= {"x", "y", "z"} else values)]
        return self.every(zip(order, parts, strict=True) if named else zip(parts, order, strict=True))

    def equation(self, answer: str, truth: str) -> bool | None:
        """Decide if one side contains ``=`` outside lists; None if neither does."""
        if "=" not in answer and "=" not in truth:
            return None
        name, sides = named_sides(with_argument_of(truth, answer), sums=True)
        true_name, true_sides = named_sides(truth)
        if len(true_sides) > 1 and self.every((side, true_sides[0]) for side in true_sides[1:]):
            true_sides = true_sides[:1]  # A chain such as 0.56 = 56\%: each of its sides is an answer.
        if (name, len(sides), true_name, len(true_sides)) == ("", 1, "", 1) and true_sides[0] == truth:
            return None  # two lists
        if name and true_name and (not same_name(name, true_name) or f"{name.partition('(')[0]}(" in "".join(true_sides)):
            # y = 3 does not answer x = 3, but x = 2y answers y = x/2. In T(n) = 2T(n-1), T is no factor.
            return self.same_equation(answer, truth)
        if len(true_sides) > 1:
            return "=" in answer and self.same_equation(answer, truth)
        if len(sides) > 1 and true_name and not name:
            return self.same_equation(answer, truth)
        # Every side must be right: of 7 = 8, neither 7 nor 8 may be picked.
        if len(sides) <= 6 and self.every((side, true_sides[0]) for side in sides):
            return True
        return bool(name and true_name) and "(" not in name + true_name and self.same_equation(answer, truth)

    def same_equation(self, answer: str, truth: str) -> bool:
        if _multiplies_vectors(answer + truth):
            return False
        sides, true_sides = (split_equations(_FIGURE.sub(_of_points, text)) for text in (answer, truth))
        if len(sides) != 2 or len(true_sides) != 2:
            return False
        left, right = _difference(sides), _difference(true_sides)
        if left is None or right is None:
            return self.by_algebra(answer, truth)
        if ratio(left, right, self.effort):
            return True
        (top, bottom), (true_top, true_bottom) = cleared(left), cleared(right)
        return bool((bottom or true_bottom) and ratio(top, true_top, self.effort))

    def matrix(self, answer: str, truth: str) -> bool | None:
        rows, true_rows = matrix_rows(answer), matrix_rows(truth)
        if rows is None and true_rows is None:
            return None
        if rows is None or true_rows is None or [len(row) for row in rows] != [len(row) for row in true_rows]:
            return False
        pairs = [pair for row, true_row in zip(rows, true_rows, strict=True) for pair in zip(row, true_row, strict=True)]
        return len(pairs) <= 100 and self.every(pairs)

    def parts(self, answer: str, truth: str) -> bool | None:
        """Compare lists, sets, tuples, intervals and unions part by part; None if neither side is one."""
        kind, parts = parts_of(answer)
        true_kind, true_parts = parts_of(truth)
        if (not kind and parts != [answer]) or (not true_kind and true_parts != [truth]):  # brackets around a single value
            return self.inside.same(answer if kind else parts[0], truth if true_kind else true_parts[0])
        if not kind and not true_kind:
            return None
        for one, other, element in ((kind, true_kind, parts), (true_kind, kind, true_parts)):
            if one == "set" and other not in {"set", "union"} and len(element) == 1:
                other_text = truth if element is parts else answer
                if self.in_set or parts_of(element[0])[0] == "set" or not _EMPTY.isdisjoint((element[0], other_text)):
                    return False
                return self.inside.same(*((element[0], truth) if element is parts else (answer, element[0])))
        if kind != true_kind and not (len(parts) > 2 and {kind, true_kind} == {"()", "[]"}):  # [1,2] may be an interval.
            return False
        if len(parts) != len(true_parts) or len(parts) > _MAX_PARTS:
            return False
        if kind not in {"set", "union", "or", "and"}:
            return self.every(zip(parts, true_parts, strict=True), self.elements)
        is_set = kind == "set" and not (answer[0] == truth[0] == "{")
        comparison = self.elements if is_set else self.inside
        return self.in_any_order(parts, true_parts, lambda a, t: comparison.same(a, t))

    def in_any_order(self, left: list[T], right: list[T], equal: Callable[[T, T], bool]) -> bool:
        rest = list(right)
        for part in sorted(left, key=lambda part: part not in right):  # identical ones first
            match = part if part in rest else next((other for other in rest if equal(part, other)), None)
            if match is None:
                return False
            rest.remove(match)
        return True

    def single(self, answer: str, truth: str) -> bool:
        """Compare two answers that are neither lists nor equations."""
        bare, true_bare = (unwrap_text(text).replace(" ", "") for text in (answer, truth))
        digits, true_digits = based(bare), based(true_bare)
        if digits or true_digits:
            digits_alone = _digits_in_base(unwrap_text(answer), true_digits) or _digits_in_base(true_bare, digits, 10)
            return digits_alone or digits == true_digits
        for verdict in (same_time(bare, true_bare), same_ratio(answer, truth)):
            if verdict is not None:
                return verdict
        body, unit = split_unit(answer)
        true_body, true_unit = split_unit(truth, noun=True)
        body, true_body = number_word(body) or body, number_word(true_body) or true_body
        by_value = same_quantity(body, unit, true_body, true_unit)
        if by_value is not None:
            return by_value
        factor = conversion(unit, true_unit)
        body, true_body = unwrap_text(body), unwrap_text(true_body)
        if factor is None:
            return False
        if factor != 1:
            return same_value(f"{factor.numerator}/{factor.denominator}*({body})", true_body, self.effort) is True
        if PERCENT in (unit, true_unit) and unit != true_unit:
            return False
        return self.expression(body, true_body)

    def expression(self, answer: str, truth: str) -> bool:
        """Compare two texts as mathematics; as words, if one of them is none."""
        if "\\infty" in (answer.lstrip("+-"), truth.lstrip("+-")):
            return answer.lstrip("+") == truth.lstrip("+")
        if _INVERSE.search(answer) or _INVERSE.search(truth):
            names = {letter for letter in letters_of(answer + truth) if letter.isupper()}
            if len(names) > 1:
                return False  # Products of matrices depend on the order.
        if _POINTS.fullmatch(truth):
            return answer == truth
        if _multiplies_vectors(answer + truth):
            return False
        answer, truth = (_FIGURE.sub(_of_points, text) for text in (answer, truth))
        if "\\ln" in truth and "log(" in answer and "\\log" not in answer + truth:
            answer = answer.replace("log(", "ln(")  # as code writes it
        by_value = same_value(answer, truth, self.effort)
        if by_value is not None:
            return by_value
        if answer.isalpha() and parse(truth) is not None:
            return sorted(answer) == sorted(truth)  # abcd is dcba, though this may be a word
        return same_words(answer, truth) or self.by_algebra(answer, truth)

    def by_algebra(self, answer: str, truth: str) -> bool:
        unread = [text for text in (answer, truth) if parse(text) is None]
        if any("\\" not in text for text in unread):
            return False  # Without LaTeX, it is prose or a typing error.
        if self.algebra is None:
            raise NeedsAlgebra
        # If both were read and still not decided, they are too costly or undefined.
        return bool(unread) and self.algebra(answer, truth)


def _digits_in_base(digits: str, other: tuple[str, int] | None, base: int | None = None) -> bool:
    """Whether a number in a base (2 to 36) is written with the same digits as a plain number."""
    if other is None or base not in {None, other[1]} or not 2 <= other[1] <= 36 or digits != other[0]:
        return False
    return all(digit == "." or int(digit, 36) < other[1] for digit in digits)


def _multiplies_vectors(text: str) -> bool:
    """Whether a text has vector products, whose order counts."""
    return "\\times" in text and re.search(r"\\(?:vec|overrightarrow|hat)(?![A-Za-z])", text) is not None


def _of_points(figure: re.Match[str]) -> str:
    """A variable for an angle, vector or segment, whose points are no factors; an angle and a segment have no direction."""
    points, kind = figure[2].replace(" ", ""), {"angle": 1, "overline": 2}.get(figure[1], 3)
    return f"w_{{{kind}" + "0".join(points if kind == 3 else min(points, points[::-1])) + "}"


def _difference(sides: list[str]) -> Node | None:
    return parse(f"({sides[0]})-({sides[1]})")
