"""Comparison of two normalised answers, part by part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Self, TypeVar

from grpo.grader.expression import divides, equation_difference, is_rational, parse
from grpo.grader.families import declared_family, letters_of, possible_family, renamed, same_values, without_name
from grpo.grader.names import is_number, named_sides, names_its_value, plain_name, with_argument_of
from grpo.grader.normalise import RELATION, unwrap_text
from grpo.grader.numeric import ratio, same_value
from grpo.grader.quantity import conversion, exact_value, lettered, same_amount, same_number, same_quantity, scaled, split_unit
from grpo.grader.relations import Interval, as_intervals, in_usual_signs, listed_intervals, member_of, merged
from grpo.grader.split import closes_at_end, matrix_rows, parts_of, points_of, split_equations, top_level
from grpo.grader.values import Effort
from grpo.grader.words import based, canonical_word, day_of_year, number_word, same_ratio, same_time
from grpo.grader.working import arithmetic, is_formula

_MAX_PARTS = 40

_WORD = re.compile(r"[A-Z]|[A-Za-z'-]{4,}|(?=[A-Za-z]*[A-Z])[A-Za-z'-]+|[A-Za-z][A-Za-z'-]*(?: [0-9A-Za-z'-]+)+")
_CHAIN = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_WHOLE = frozenset("nmkt")
_DEGREE = "\\text{degree}"
_SUM = re.compile(r"[0-9A-Za-z)}] ?[+-]")
_INVERSE = re.compile(r"[A-Z)]\^(?:\{-1\}|T|\{T\}|\\top|\\intercal)(?![A-Za-z])")
_OPPOSITE = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}


T = TypeVar("T")


class NeedsAlgebra(BaseException):
    """Only computer algebra can decide. Derives from BaseException, so that the handler of defects does not catch it."""


class Comparison:
    """A comparison of two answers.

    Attributes:
        algebra: compares expressions that this package cannot read; None raises :class:`NeedsAlgebra` instead.
        effort: remaining computation.
        levels: bound on the nesting of lists in lists.
    """

    def __init__(self, algebra: Callable[[str, str], bool] | None, effort: Effort, levels: int = 6) -> None:
        self.algebra = algebra
        self.effort = effort
        self.levels = levels

    @cached_property
    def inside(self) -> Self:
        """The same comparison, one level of nesting deeper."""
        return self.within(self.levels - 1)

    def within(self, levels: int) -> Self:
        return type(self)(self.algebra, self.effort, levels)

    def same(self, answer: str, truth: str) -> bool:
        """Whether two normalised texts are equal."""
        if not answer or not truth or self.levels == 0:
            return False
        if self.spelt_alike(answer, truth):
            return True
        written_forms = (same_number, same_amount, self.approximation, self.family, self.degrees)
        for compare in (*written_forms, self.relation, self.equation, self.matrix, self.parts):
            verdict = compare(answer, truth)
            if verdict is not None:
                return verdict
        return self.single(answer, truth)

    def spelt_alike(self, answer: str, truth: str) -> bool:
        """Whether two texts are identical up to a ``\\text{}`` around one of them."""
        return unwrap_text(answer) == unwrap_text(truth)

    def every(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Whether all pairs are equal; pairs that need algebra come last, as another pair may decide."""
        open_question = False
        for answer, truth in pairs:
            try:
                if not self.inside.same(answer, truth):
                    return False
            except NeedsAlgebra:
                open_question = True
        if open_question:
            raise NeedsAlgebra
        return True

    def approximation(self, answer: str, truth: str) -> bool | None:
        r"""Compare the exact sides of ``a \\approx b``."""
        exact, sign, approximate = answer.partition("\\approx")
        true_exact, true_sign, true_approximate = truth.partition("\\approx")
        if not sign and not true_sign:
            return None
        return self.inside.same(exact.strip() or approximate.strip(), true_exact.strip() or true_approximate.strip())

    def family(self, answer: str, truth: str) -> bool | None:
        r"""Decide if one side declares a family of values or a residue, or if only the letter of ``k\pi`` differs."""
        family, true_family = declared_family(answer), declared_family(truth)
        if family is None and true_family is None:
            answer_renamed = renamed(answer, truth)
            return None if answer_renamed is None else self.inside.same(answer_renamed, truth)
        if true_family is None and family is not None:
            true_family = possible_family(truth, _WHOLE | {family.letter})
            if true_family is None:
                return family.stands_for(truth)
            if family.modulus and not (family.name and true_family.name):
                return False
            if not family.modulus:  # The truth may be a formula: (n-2)\pi is not n\pi.
                letters = family.with_letter(true_family.letter)
                return family.name in {"", true_family.name} and self.inside.same(letters, true_family.body)
        if family is None and true_family is not None:
            family = possible_family(answer, _WHOLE | {true_family.letter})
            if family is None:
                return bool(true_family.stands_for(answer))
        if family is None or true_family is None or (family.name and true_family.name and family.name != true_family.name):
            return False
        body, true_body = family.with_letter(true_family.letter), true_family.body
        parts, true_parts = ([without_name(part)[1] for part in parts_of(text)[1]] for text in (body, true_body))
        kinds = {parts_of(text)[0] for text in (body, true_body)}
        if kinds <= {"", "set"} and same_values(parts, true_parts, true_family.letter, self.effort):
            return True
        return self.inside.same(body, true_body)

    def degrees(self, answer: str, truth: str) -> bool | None:
        """Compare sums without their degree signs."""
        if _DEGREE not in answer and _DEGREE not in truth:
            return None
        pair = (answer.replace(_DEGREE, ""), truth.replace(_DEGREE, ""))
        if any("\\text" in text for text in pair) or not any(_SUM.search(text) for text in pair):
            return None
        return self.inside.same(*pair)

    # ------------------------------------------------------------------------------------------ inequalities, equations

    def relation(self, answer: str, truth: str) -> bool | None:
        """Decide if one side contains an inequality or names the real line."""
        usual = (in_usual_signs(answer), in_usual_signs(truth))
        if usual != (answer, truth):
            return self.inside.same(*usual)
        if not any(
            RELATION.search(text) or any(mark in text for mark in ("mathbb", "real", "setminus", "\\cup"))
            for text in (answer, truth)
        ):
            return None
        sets = [as_intervals(text, self.effort) for text in (answer, truth)]
        if [found is None for found in sets].count(True) == 1:  # A list of intervals may mean their union.
            listed = [as_intervals(listed_intervals(text), self.effort) for text in (answer, truth)]
            if listed[0] is not None and listed[1] is not None and len(listed[0][1]) == len(listed[1][1]):
                sets = listed
        if sets[0] is not None and sets[1] is not None:
            names = {found[0] for found in sets if found and found[0]}
            if "y" in names:
                names = {plain_name(name) for name in names}
            return len(names) <= 1 and self.same_intervals(sets[0][1], sets[1][1])
        if RELATION.search(answer) and RELATION.search(truth):
            if all(len(top_level(text, ",;")) > 1 for text in (answer, truth)):
                return None
            are_chains = _CHAIN.search(answer) is not None and _CHAIN.search(truth) is not None
            return are_chains and self.same_chain(answer, truth)
        if exact_value(answer) is not None or exact_value(truth) is not None:
            return None if names_its_value(answer) or names_its_value(truth) else False
        members = (member_of(answer), member_of(truth))
        return self.inside.same(*members) if members != (answer, truth) else None

    def same_intervals(self, left: list[Interval], right: list[Interval]) -> bool:
        if len(left) != len(right):
            left, right = (merged(intervals, self.effort) for intervals in (left, right))
        if len(left) != len(right) or len(left) > _MAX_PARTS:
            return False

        def equal(a: Interval, b: Interval) -> bool:
            return a[0] == b[0] and a[3] == b[3] and self.every(((a[1], b[1]), (a[2], b[2])))

        return self.in_any_order(left, right, equal)

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
        return ratio(_difference(sides), _difference(true_sides), self.effort) in allowed

    def equation(self, answer: str, truth: str) -> bool | None:
        """Decide if one side contains ``=`` outside lists; None if neither does."""
        if "=" not in answer and "=" not in truth:
            return None
        if answer[0] in "[(" or truth[0] in "[(":
            bare = (_without_brackets(answer), _without_brackets(truth))
            if bare != (answer, truth):
                return self.inside.same(*bare)
        name, sides = named_sides(with_argument_of(truth, answer), sums=True)
        true_name, true_sides = named_sides(truth)
        if len(true_sides) > 1 and self.every((side, true_sides[0]) for side in true_sides[1:]):
            true_sides = true_sides[:1]  # A chain such as 0.56 = 56\%: each of its sides is an answer.
        if (name, len(sides), true_name, len(true_sides)) == ("", 1, "", 1) and true_sides[0] == truth:
            return self.assignments(answer, truth)
        if name and true_name and plain_name(name) != plain_name(true_name):
            # y = 3 does not answer x = 3, but x = 2y answers y = x/2.
            return self.same_equation(answer, truth)
        if len(true_sides) > 1:
            return "=" in answer and self.same_equation(answer, truth)
        if len(sides) > 1 and true_name and not name:
            return self.same_equation(answer, truth)
        # Every side must be right: of 7 = 8, neither 7 nor 8 may be picked. Of A = bh = 6(4) = 24, bh cannot be computed.
        if len(sides) > 1:
            sides = [arithmetic(side) for side in sides]
            if name and is_number(true_sides[0]):
                sides = [side for side in sides[:-1] if not is_formula(side, name, self.effort)] + sides[-1:]
        if len(sides) <= 6 and self.every((side, true_sides[0]) for side in sides):
            return True
        return bool(name and true_name) and "(" not in name + true_name and self.same_equation(answer, truth)

    def assignments(self, answer: str, truth: str) -> bool | None:
        """Compare ``x = 3, y = 4`` as the point (3, 4), in order of letters, and ``x=1, y=2 or x=3, y=4`` as two points."""
        (letters, points), (true_letters, true_points) = points_of(answer), points_of(truth)
        if points and true_points:
            if len(points) == len(true_points) == 1:
                return None  # two lists of equations
            if letters != true_letters:
                return False
        elif not (points and truth.startswith("(")) and not (true_points and answer.startswith("(")):
            return None
        return self.inside.same(",".join(points) or answer, ",".join(true_points) or truth)

    def same_equation(self, answer: str, truth: str) -> bool:
        sides, true_sides = (split_equations(text) for text in (answer, truth))
        if len(sides) != 2 or len(true_sides) != 2:
            return False
        multiple = ratio(_difference(sides), _difference(true_sides), self.effort)
        if multiple is None:
            return self.by_algebra(answer, truth)
        are_solved = sides[0] == true_sides[0] and not letters_of(sides[0]) & letters_of(sides[1] + true_sides[1])
        trees = [tree for tree in map(equation_difference, (answer, truth)) if tree and is_rational(tree)]
        if multiple or are_solved or len(trees) < 2 or not any(map(divides, trees)):
            return bool(multiple)
        if self.algebra is None:
            raise NeedsAlgebra
        return self.algebra(answer, truth)

    # ---------------------------------------------------------------------------------------------------------- parts

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
        if not kind and not true_kind:
            if parts != [answer] or true_parts != [truth]:  # brackets around a single value
                return self.inside.same(parts[0], true_parts[0])
            return None
        if not kind and len(true_parts) == 1 and true_kind == "set":
            return self.inside.same(answer, true_parts[0])
        if not true_kind and len(parts) == 1 and kind == "set":
            return self.inside.same(parts[0], truth)
        if kind != true_kind and not (len(parts) > 2 and {kind, true_kind} == {"()", "[]"}):  # [1,2] may be an interval.
            return False
        if len(parts) != len(true_parts):  # In a set in braces, repeated elements count once.
            parts, true_parts = (
                self.distinct(these) if text.startswith("\\{") and len(these) <= _MAX_PARTS else these
                for text, these in ((answer, parts), (truth, true_parts))
            )
        if len(parts) != len(true_parts) or len(parts) > _MAX_PARTS:
            return False
        if kind not in {"set", "union"}:
            return self.every(zip(parts, true_parts, strict=True))
        return self.in_any_order(parts, true_parts, lambda a, t: self.inside.same(a, t))

    def distinct(self, parts: list[str]) -> list[str]:
        """Remove parts that equal an earlier one."""
        kept: list[str] = []
        for part in parts:
            if not any(self.within(2).same(part, other) for other in kept):
                kept.append(part)
        return kept

    def in_any_order(self, left: list[T], right: list[T], equal: Callable[[T, T], bool]) -> bool:
        rest = list(right)
        for part in sorted(left, key=lambda part: part not in right):  # identical ones first
            match = part if part in rest else next((other for other in rest if equal(part, other)), None)
            if match is None:
                return False
            rest.remove(match)
        return True

    # --------------------------------------------------------------------------------------------------- single values

    def single(self, answer: str, truth: str) -> bool:
        """Compare two answers that are neither lists nor equations."""
        bare, true_bare = (unwrap_text(text).replace(" ", "") for text in (answer, truth))
        digits, true_digits = based(bare), based(true_bare)
        if digits or true_digits:
            return digits == true_digits
        for verdict in (same_time(bare, true_bare), same_ratio(answer, truth)):
            if verdict is not None:
                return verdict
        if (day := day_of_year(answer)) and (true_day := day_of_year(truth)):
            return day == true_day
        body, unit = split_unit(answer, lenient=False)
        true_body, true_unit = split_unit(truth)
        body, true_body = number_word(body) or body, number_word(true_body) or true_body
        by_value = same_quantity(body, unit, true_body, true_unit)
        if by_value is not None:
            return by_value
        factor = conversion(unit, true_unit)
        for big, value in ((scaled(body), exact_value(true_body)), (scaled(true_body), exact_value(body))):
            if big is not None and value is not None:
                return big == value and factor == 1
        body, true_body = unwrap_text(body), unwrap_text(true_body)
        if factor is None:
            return False
        if factor != 1:
            return same_value(f"{factor.numerator}/{factor.denominator}*({body})", true_body, self.effort) is True
        if self.spelt_alike(body, true_body):
            return True
        if "%" in (unit, true_unit) and unit != true_unit:
            return False
        # Without their units and texts they may turn out to be lists or brackets.
        verdict = self.within(3).parts(body, true_body)
        if verdict is not None:
            return verdict
        for text, other, other_unit in ((body, true_body, true_unit), (true_body, body, unit)):
            amount = lettered(text, other_unit)
            if amount is not None:
                return amount == exact_value(other)
        return self.expression(body, true_body)

    def expression(self, answer: str, truth: str) -> bool:
        if is_spelt(answer) or is_spelt(truth):
            word, true_word = canonical_word(answer), canonical_word(truth)
            return word == true_word and (len(answer) > 1 or answer == truth)
        if "\\infty" in (answer.lstrip("+-"), truth.lstrip("+-")):
            return answer.lstrip("+") == truth.lstrip("+")
        if _INVERSE.search(answer) or _INVERSE.search(truth):
            names = {letter for letter in letters_of(answer + truth) if letter.isupper()}
            if len(names) > 1:
                return False  # Products of matrices depend on the order.
        # Exact values come first, so that 2e-1 is not read as a product with Euler's number.
        by_value = same_value(_as_fraction(answer), _as_fraction(truth), self.effort)
        if by_value is not None:
            return by_value
        return self.by_algebra(answer, truth)

    def by_algebra(self, answer: str, truth: str) -> bool:
        unread = [text for text in (answer, truth) if parse(text) is None]
        if any("\\" not in text for text in unread):
            return False  # Without LaTeX, it is prose or a typing error.
        if self.algebra is None:
            raise NeedsAlgebra
        # If both were read and still not decided, they are too costly or undefined.
        return bool(unread) and self.algebra(answer, truth)


def _as_fraction(text: str) -> str:
    value = None if text.isdigit() else exact_value(text)
    return text if value is None else f"({value.numerator})/({value.denominator})"


def _difference(sides: list[str]) -> str:
    return f"({sides[0]})-({sides[1]})"


def _without_brackets(text: str) -> str:
    """Remove the brackets of ``[x=1, y=2]``."""
    if not (text.startswith(("[", "(")) and closes_at_end(text)):
        return text
    inner = text[1:-1]
    return inner if all("=" in part for part in top_level(inner, ",;")) else text


def is_spelt(text: str) -> bool:
    """Whether a text is compared by spelling: words, choice letters, times and ratios."""
    return ":" in text or _WORD.fullmatch(text) is not None or text in {"\\emptyset", "\\{\\}"}
