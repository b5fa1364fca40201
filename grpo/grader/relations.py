r"""Sets of real numbers: inequalities, intervals, unions, differences and words, so that ``x > 3`` equals ``(3,\infty)``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from grpo.grader.expression import GREEK, parse, variables
from grpo.grader.normalise import RELATION
from grpo.grader.numeric import number
from grpo.grader.split import closes_at_end, plus_and_minus, split_at, top_level
from grpo.grader.values import Effort

_OPERATORS = {f"\\{name}": getattr(operator, name) for name in ("le", "ge", "ne")}
_OPERATORS |= {"<": operator.lt, ">": operator.gt, "=": operator.eq}
_CHAIN = re.compile(r"(?<!\\)[<>]|\\(?:le|ge|ne)(?![A-Za-z])|(?<![<>:])=")
_NAMED = r"[fghpqFGHPQ]\([a-z]\)|\|[zw]\|"  # names of values besides variables: f(x), and |z| of a complex z
_LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))})(?![A-Za-z]))"
_VARIABLE = re.compile(rf"\(?(?P<variable>{_LETTER}(?:_\w|_\{{\w+\}})?)\)?|(?P<named>{_NAMED})")
_MEMBER = re.compile(rf"({_LETTER}|{_NAMED}|\([A-Za-z](?:,[A-Za-z])+\))\\in(?![A-Za-z])\s*(.+)")
_WORD_IN = re.compile(rf"^({_LETTER}) in(?=[(\[\\]| [RZNQC]$)")
_FOREIGN = re.compile(rf"((?:{_LETTER}\\in)?)([\[\]])([^\[\]]+[,;][^\[\]]+)([\[\]])")
_MODULUS = re.compile(r"\|([^|]+)\|")
_BUILDER = re.compile(r"(?:\\?\{)?([A-Za-z])(\\in\s*(?:\\mathbb\{R\}|R))?(?:\||:|\\mid\s*)(.+?)(?:\\?\})?")
_REALS = re.compile(r"(?:\\mathbb\{R\}|R)(?:\^\{?([+*-])\}?|_\{?(?:([<>]|\\[gln]e) ?0|([+-]))\}?)?")
_REALS_IN_WORDS = re.compile(
    r"(?:(?:the )?(?:set of )?(?:all|any|every)(?: the)? |(?=(?:the )?real))(?:the )?"
    r"(?P<sign>positive|negative|non-?negative|non-?positive|non-?zero)? ?(?:reals?|(?:real )?(?:numbers?|values?))"
    r"(?: numbers?| values?)?(?: of)?(?: [a-z])?,?"
    r"(?: (?:that are )?(?:(?P<than>greater|less|more|smaller) than(?P<equal>(?:,| or) ?equal to)?"
    r"|at (?P<bound>least|most)|(?P<but>except(?: for)?(?: when)?|not equal to|other than)) ?(?:[a-z]=)?(?P<end>.+))?"
)
_SIGNS = {"+": ">", "positive": ">", "-": "<", "negative": "<", "nonnegative": "\\ge", "nonpositive": "\\le", "nonzero": "\\ne",
          "*": "\\ne", "greater": ">", "more": ">", "less": "<", "smaller": "<", "least": "\\ge", "most": "\\le"}  # fmt: skip
_MAX_ENDS = 80
_TOLERANCE = Fraction(1, 10**30)  # ends that are irrational are rounded to 40 digits

_Side = tuple[Any, Any, bool]
"""Slope, shift, and whether bars stand around: (1, 0, False) for x, (0, 5, False) for 5, (2, -1, True) for ``|2x-1|``."""


class RealSet(NamedTuple):
    """A set of real numbers."""

    name: str  # its variable; may be empty
    ends: list[Fraction]  # all numbers where it begins or ends, and perhaps others
    holds: Callable[[Fraction], bool]  # whether a number belongs to it


def as_real_set(text: str, effort: Effort) -> RealSet | None:
    r"""The numbers that a normalised text describes; None if it is not a set of real numbers whose ends have values."""
    builder = _BUILDER.fullmatch(text)
    if builder:
        members = as_real_set(builder[3], effort)
        return members._replace(name="") if members and members.name == builder[1] else None  # the letter is local to the set
    if text.startswith("\\{") and text.endswith("\\}") and _CHAIN.search(text) and "," not in text:
        text = text[2:-2]
    if not RELATION.search(text) or _REALS.fullmatch(text):
        return _set(text, effort, alone=True)
    solved = _joined(any, [_alternative(alternative, effort) for alternative in split_at(text, "\\lor")])
    if solved and solved.name in {"|z|", "|w|"}:  # a modulus is not negative
        return _joined(all, [solved, _chain("", [(1, 0, False), (0, 0, False)], ["\\ge"])])
    return solved


def same_reals(left: RealSet, right: RealSet) -> bool:
    """Whether two sets hold the same numbers: at all ends, and between them."""
    return all(left.holds(place) == right.holds(place) for place in _samples([*left.ends, *right.ends]))


def member_of(text: str) -> str:
    r"""Return the set S of ``x \in S``, or the text itself."""
    member = _MEMBER.fullmatch(text)
    return re.sub(r"^[ZNQC]$", r"\\mathbb{\g<0>}", member[2]) if member else text


def in_usual_signs(text: str) -> str:
    r"""Convert ``]2,5[`` (French notation of open intervals) to ``(2,5)``, and "in" of ``x in (2,5)`` to ``\in``."""
    text = _WORD_IN.sub(r"\1\\in ", text)
    pieces = [_FOREIGN.fullmatch(piece.strip()) for piece in re.split(r"\\cup(?![A-Za-z])", text)]
    usual = [match[1] + "[("[match[2] == "]"] + match[3] + "])"[match[4] == "["] for match in pieces if match]
    return "\\cup ".join(usual) if len(usual) == len(pieces) else text


def _samples(ends: list[Fraction]) -> list[Fraction]:
    """The ends, and a number in each gap between them and beyond."""
    places = sorted(set(ends)) or [Fraction(0)]
    return [*places, places[0] - 1, *((low + high) / 2 for low, high in pairwise(places)), places[-1] + 1]


def _joined(keep: Callable[[list[bool]], bool], sets: Sequence[RealSet | None]) -> RealSet | None:
    """The numbers for which ``keep`` holds, given in which of the sets they are; None if the variables differ."""
    known = [one for one in sets if one is not None]
    names = {one.name for one in known} - {""}
    ends = [end for one in known for end in one.ends]
    if not known or len(known) != len(sets) or len(names) > 1 or len(ends) > _MAX_ENDS:
        return None
    return RealSet("".join(names), ends, lambda place: keep([one.holds(place) for one in known]))


def _alternative(text: str, effort: Effort) -> RealSet | None:
    links: list[RealSet | None] = []
    for piece in split_at(text, "\\cup") if _CHAIN.search(text) else [text]:
        together = "\\land" in piece or "\\ne" in piece or not _CHAIN.search(text)
        several = [_conjunction(condition, effort) for condition in ([piece] if together else top_level(piece, ",;"))]
        either = _joined(any, several)
        known = [one for one in several if one]
        overlap = either and any(sum(one.holds(place) for one in known) > 1 for place in _samples(either.ends))
        links.append(_joined(all, several) if overlap else either)  # 1<x, x<2 must hold together
    return _joined(any, links)


def _conjunction(text: str, effort: Effort) -> RealSet | None:
    """Intersect conditions joined by ``\\land`` or commas; ``x \\ne 2, 3`` excludes both numbers."""
    sets: list[RealSet | None] = []
    excluding = ""
    for condition in [part for piece in split_at(text, "\\land") for part in top_level(piece, ",;")]:
        if member := _MEMBER.fullmatch(condition):
            whole = _set(member[2], effort)
            sets.append(whole and whole._replace(name=member[1]))
            continue
        condition = condition if _CHAIN.search(condition) else excluding + condition
        excluding = condition.partition("\\ne")[0] + "\\ne " if "\\ne" in condition else excluding
        sets += [_condition(one, effort) for one in plus_and_minus(condition)]
    return _joined(all, sets)


def _condition(text: str, effort: Effort) -> RealSet | None:
    """Read ``x > a``, ``a < x \\le b``, ``x = a`` or ``1 < |x-1| < 2``."""
    names: list[str] = []
    sides: list[_Side] = []
    for side in _CHAIN.split(text):
        if match := _VARIABLE.fullmatch(side.strip()):
            names.append(match["variable"] or match["named"])
            sides.append((1, 0, False))
        elif modulus := _modulus(side.strip(), effort):
            names.append(modulus[0])
            sides.append(modulus[1])
        elif (place := _place(side.strip(), effort)) is not None:
            sides.append((0, place, False))
        else:
            return None
    if len(names) != 1 or not 2 <= len(sides) <= 3:
        return None
    return _chain(names[0], sides, [match.group() for match in _CHAIN.finditer(text)])


def _chain(name: str, sides: list[_Side], operators: list[str]) -> RealSet:
    """The numbers for which all relations between neighbouring sides hold, of which one of two is a number."""
    ends: list[Fraction] = []
    for left, right in pairwise(sides):
        (slope, shift, _), (_, bound, _) = sorted((left, right), key=lambda side: not side[0])
        if abs(bound) < inf:
            ends += [Fraction(end - shift) / Fraction(slope) for end in (bound, -bound)]

    def holds(place: Fraction) -> bool:
        values = [abs(slope * place + shift) if bars else slope * place + shift for slope, shift, bars in sides]
        differences = [value - following for value, following in pairwise(values)]
        return all(
            _OPERATORS[sign](0 if abs(difference) < _TOLERANCE else difference, 0)
            for sign, difference in zip(operators, differences, strict=True)
        )

    return RealSet(name, ends, holds)


def _place(end: str, effort: Effort) -> Fraction | float | None:
    if end.lstrip("+-") == "\\infty":
        return -inf if end[0] == "-" else inf
    return number(end, effort)


def _modulus(text: str, effort: Effort) -> tuple[str, _Side] | None:
    """The variable of ``|2x-1|``, and this side; None if the inside of the bars is not linear."""
    tree = parse(text[1:-1]) if _MODULUS.fullmatch(text) else None
    names = sorted(variables(tree)) if tree else []
    if len(names) != 1 or len(names[0]) != 1:
        return None
    letter = re.compile(rf"(?<![A-Za-z\\]){names[0]}(?![A-Za-z])")
    at = [number(letter.sub(f"({value})", text[1:-1]), effort) for value in (0, 1, 5, 11)]
    if None in at:
        return None
    first, second, *others = [value for value in at if value is not None]
    slope = second - first
    is_line = all(abs(first + slope * x - value) < _TOLERANCE for x, value in zip((5, 11), others, strict=True))
    return (names[0], (slope, first, True)) if slope and is_line else None


def _set(text: str, effort: Effort, alone: bool = False) -> RealSet | None:
    """Read a union, intersection or difference of intervals and finite sets, the real line, or its name in words.

    ``alone``: the text is an answer by itself, where ``{1,2}`` and ``(1,2)`` may be other things than sets of numbers.
    """
    if (real := _REALS.fullmatch(text)) or (alone and (real := _REALS_IN_WORDS.fullmatch(text))):
        return _reals(real.groupdict() or {"sign": real[1] or real[2] or real[3]}, effort)
    for command, keep in (("\\cup", any), ("\\cap", all)):
        if len(pieces := split_at(text, command)) > 1:
            return _joined(keep, [_set(piece, effort) for piece in pieces])
    for command in ("\\setminus", "\\backslash", "-"):
        pieces = split_at(text, command) if command != "-" else re.split(r"(?<=[)\]}R])-(?=\\\{)", text)
        if len(pieces) == 2:
            return _joined(lambda found: found[0] and not found[1], [_set(piece, effort) for piece in pieces])
    pieces = top_level(text, ",;")
    if alone and len(pieces) > 1 and all(_is_interval(piece) for piece in pieces):
        return _joined(any, [_set(piece, effort) for piece in pieces])
    if len(text) > 4 and text[0] in "([" and text[-1] in ")]" and closes_at_end(text):
        places = [_place(end, effort) for end in top_level(text[1:-1], ",;")]
        if len(places) != 2 or places[0] is None or places[1] is None:
            return None
        sides: list[_Side] = [(0, places[0], False), (1, 0, False), (0, places[1], False)]
        return _chain("", sides, ["<" if text[0] == "(" else "\\le", "<" if text[-1] == ")" else "\\le"])
    if text.startswith("\\{") and text.endswith("\\}") and not alone:
        return _joined(any, [_condition(f"x={point}", effort) for point in top_level(text[2:-2], ",;")])
    return None


def _is_interval(piece: str) -> bool:
    """Whether a part of a list is an interval and no point: ``(1,\\infty)``, ``[0,1]``."""
    return len(piece) > 4 and piece[0] in "([" and piece[-1] in ")]" and ("infty" in piece or "[" in piece or "]" in piece)


def _reals(said: dict[str, str | None], effort: Effort) -> RealSet | None:
    """The real numbers with a condition: positive, greater than 2, except 1."""
    sign, end = (said["sign"] or "").replace("non-", "non"), said.get("end")
    conditions = [f"x{_SIGNS.get(sign, sign)} 0"] if sign else []
    if end:
        sign = _SIGNS[said["than"] or said["bound"] or "nonzero"]
        sign = {">": "\\ge", "<": "\\le"}[sign] if said["equal"] else sign
        conditions.append(f"x{sign} " + ",".join(point.split("=")[-1] for point in top_level(end, ",;")))
    described = _conjunction("\\land ".join(conditions or [r"x<\infty"]), effort)
    return described and described._replace(name="")
