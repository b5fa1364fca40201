r"""Conversion of inequalities to sets of numbers, so that ``x > 3`` equals ``(3,\infty)``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from math import isclose, isnan
from operator import itemgetter

from grpo.grader.expression import parse, variables
from grpo.grader.normalise import RELATION
from grpo.grader.numeric import number
from grpo.grader.split import split_at, top_level
from grpo.grader.values import Effort

_OPERATORS = {"<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "=": "="}
_CHAIN = re.compile(r"(?<!\\)[<>]|\\(?:le|ge|ne)(?![A-Za-z])|(?<![<>:])=")
_NAMED = r"[fghpqFGHPQ]\([a-z]\)|\|[zw]\|"  # names of values besides variables: f(x), and |z| of a complex z
_VARIABLE = re.compile(
    rf"\(?(?P<variable>(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda|phi))(?:_\w|_\{{\w+\}})?)\)?|(?P<named>{_NAMED})"
)
_MEMBER = re.compile(rf"([A-Za-z]|{_NAMED}|\([A-Za-z](?:,[A-Za-z])+\))\\in(?![A-Za-z])\s*(.+)")
_WORD_IN = re.compile(r"^([A-Za-z]) in(?=[(\[\\])")
_EXCEPT = re.compile(r"(.+?),? except(?: for)?,?(?: when)?(?![A-Za-z]) ?(?:[a-z]=)?(.+)")
_FOREIGN = re.compile(r"((?:[A-Za-z]\\in)?)([\[\]])([^\[\]]+[,;][^\[\]]+)([\[\]])")
_MODULUS = re.compile(r"\|([^|]+)\|")
_BUILDER = re.compile(r"(?:\\?\{)?([A-Za-z])(\\in\s*(?:\\mathbb\{R\}|R))?(?:\||:|\\mid\s*)(.+?)(?:\\?\})?")
_REALS = {
    r"\mathbb{R}", "all real numbers", "all reals", "all real", "all real x", "R", "reals", "real numbers", "the real numbers",
    "allrealnumbers", "all real numbers x", "any real number", "all real values", "all real values of x",
}  # fmt: skip
_NAMED_MODULUS = re.compile(r"\|[zw]\|")
_LINE = (0, 1, 5, 11)
_MIRROR = {"(": ")", ")": "(", "[": "]", "]": "["}
_FLIPPED = {">": "<", ">=": "<="}

Interval = tuple[str, str, str, str]
"""Opening bracket, lower end, upper end, closing bracket."""

_ALL: Interval = ("(", r"-\infty", r"\infty", ")")
_Named = tuple[str, list[Interval]]


def as_intervals(text: str, effort: Effort) -> _Named | None:
    r"""The variable (may be empty) and the intervals that a normalised text describes; None if it is not a set of numbers."""
    text = text.strip()
    builder = _BUILDER.fullmatch(text)
    if builder:
        found = as_intervals(builder[3], effort)
        return ("", found[1]) if found and found[0] == builder[1] else None  # the letter is local to the set
    if not RELATION.search(text):
        whole = _set(text, effort)
        return None if whole is None else ("", whole)
    found = _united(_alternative(alternative, effort) for alternative in split_at(text, "\\lor"))
    if found and _NAMED_MODULUS.fullmatch(found[0]):  # a modulus is not negative
        return found[0], [("[", "0", *interval[2:]) if "infty" in interval[1] else interval for interval in found[1]]
    return found


def member_of(text: str) -> str:
    r"""Return the set S of ``x \in S``, or the text itself."""
    member = _MEMBER.fullmatch(text)
    return member[2] if member else text


def listed_intervals(text: str) -> str:
    """Convert a list of intervals to their union; a text that may be a list of points stays."""
    pieces = top_level(text, ",;")
    is_interval = [len(piece) > 4 and piece[0] in "([" and piece[-1] in ")]" for piece in pieces]
    if all(is_interval) and any("infty" in piece or piece[0] == "[" or piece[-1] == "]" for piece in pieces):
        return "\\cup ".join(pieces)
    return text


def in_usual_signs(text: str) -> str:
    r"""Convert ``]2,5[`` (French notation of open intervals) to ``(2,5)``, and "in" of ``x in (2,5)`` to ``\in``."""
    if " in" in text:
        text = _WORD_IN.sub(r"\1\\in ", text)
    if not (text.endswith("[") or "]" in text[:6]):
        return text
    pieces = []
    for piece in re.split(r"\\cup(?![A-Za-z])", text):
        match = _FOREIGN.fullmatch(piece.strip())
        if not match:
            return text
        pieces.append(match[1] + ("(" if match[2] == "]" else "[") + match[3] + (")" if match[4] == "[" else "]"))
    return "\\cup ".join(pieces)


def _united(sets: Iterable[_Named | None]) -> _Named | None:
    """The union of sets of the same variable; None if one is None or the variables differ."""
    names: set[str] = set()
    union: list[Interval] = []
    for found in sets:
        if found is None:
            return None
        names.add(found[0])
        union += found[1]
    names -= {""}
    return ("".join(names), union) if len(names) <= 1 else None


def _alternative(text: str, effort: Effort) -> _Named | None:
    member = _MEMBER.fullmatch(text)
    if not _CHAIN.search(text):
        whole = _set(member[2] if member else text, effort)
        return None if whole is None else (member[1] if member else "", whole)
    found: list[_Named | None] = []
    for piece in split_at(text, "\\cup"):
        together = "\\land" in piece or "\\ne" in piece
        conditions = [piece] if together else top_level(piece, ",;")
        several = [_modulus(condition, effort) or _conjunction(condition, effort) for condition in conditions]
        intervals = [interval for one in several if one for interval in one[1]]
        overlap = len(conditions) > 1 and _overlap(intervals, effort)  # 1<x, x<2 must hold together
        found += [_conjunction(piece, effort)] if overlap else several
    return _united(found)


def _overlap(intervals: list[Interval], effort: Effort) -> bool:
    """Whether two of the intervals share more than an end point; ends without a value are ignored."""
    places = sorted((_place(low, effort), _place(high, effort)) for _, low, high, _ in intervals)
    return any(first[1] > second[0] for first, second in pairwise(places))


def _place(end: str, effort: Effort) -> float:
    if end in {r"-\infty", r"\infty"}:
        return float(end.replace("\\infty", "inf"))
    place = number(end, effort)
    return float("nan") if place is None else place


def _modulus(text: str, effort: Effort) -> _Named | None:
    """Convert ``|x-1| < 2`` or ``1 < |x| < 2`` to intervals; None if the inside of the bars is not linear."""
    sides = [side.strip() for side in _CHAIN.split(text)]
    where = [place for place, side in enumerate(sides) if _MODULUS.fullmatch(side)]
    if len(where) != 1 or not 2 <= len(sides) <= 3 or _NAMED_MODULUS.fullmatch(sides[where[0]]):
        return None
    inner = sides[where[0]][1:-1]
    tree = parse(inner)
    names = sorted(variables(tree)) if tree else []
    if len(names) != 1 or len(names[0]) != 1:
        return None
    pattern = rf"(?<![A-Za-z\\]){names[0]}(?![A-Za-z])"
    at = [re.sub(pattern, f"({value})", inner) for value in _LINE]
    places = [_place(value, effort) for value in at]
    slope = places[1] - places[0]
    found = _condition(text.replace(f"|{inner}|", f" {names[0]}"))
    is_line = all(isclose(y, places[0] + slope * x, abs_tol=1e-12) for x, y in zip(_LINE, places, strict=True))
    if found is None or not slope or not is_line:
        return None
    opening, low, high, closing = found[1]
    nearest = 0.0 if low == r"-\infty" else _place(low, effort)
    if not _place(high, effort) > nearest >= 0:
        return None
    if low == r"-\infty":
        ranges = [(_MIRROR[closing], _negative(high), high, closing)]
    else:
        ranges = [(_MIRROR[closing], _negative(high), _negative(low), _MIRROR[opening]), found[1]]

    def solved(end: str) -> str:
        if "infty" in end:
            return end if slope > 0 else _negative(end)
        return f"(({end})-({at[0]}))/(({at[1]})-({at[0]}))"

    if slope < 0:
        ranges = [(_MIRROR[right], end, start, _MIRROR[left]) for left, start, end, right in ranges]
    return names[0], [(left, solved(start), solved(end), right) for left, start, end, right in ranges]


def _negative(end: str) -> str:
    return {r"-\infty": r"\infty", r"\infty": r"-\infty"}.get(end) or f"-({end})"


def _conjunction(text: str, effort: Effort) -> _Named | None:
    """Intersect conditions joined by ``\\land`` or commas; ``x \\ne 2, 3`` excludes both numbers."""
    names: set[str] = set()
    excluded: list[str] = []
    interval = _ALL
    for condition in [part for piece in split_at(text, "\\land") for part in top_level(piece, ",;")]:
        exclusion = re.fullmatch(r"(.+?)\\ne(?![A-Za-z])\s*(.+)", condition)
        name = _name(exclusion[1]) if exclusion else None
        if exclusion and name:
            names.add(name)
            both_signs = re.fullmatch(r"\\pm(?![A-Za-z]) ?(.+)", exclusion[2])
            excluded += [both_signs[1], _negative(both_signs[1])] if both_signs else [exclusion[2]]
        elif excluded and not _CHAIN.search(condition):
            excluded.append(condition)
        else:
            member = _MEMBER.fullmatch(condition)
            found = (member[1], _ALL) if member and member[2] in _REALS else _condition(condition)
            both = _intersect(interval, found[1]) if found else None
            if found is None or both is None:
                return None
            interval = both
            names.add(found[0])
    if len(names) != 1:
        return None
    rest = _without(interval, excluded, effort) if excluded else [interval]
    return None if rest is None else (names.pop(), rest)


def _name(side: str) -> str:
    """The variable or name on a side of an inequality; empty if it is not a name."""
    match = _VARIABLE.fullmatch(side)
    return (match["variable"] or match["named"]) if match else ""


def _condition(text: str) -> tuple[str, Interval] | None:
    """Convert ``x > a``, ``a < x \\le b`` or ``x = a`` to an interval."""
    operators = [_OPERATORS[match.group().strip()] for match in _CHAIN.finditer(text)]
    sides = [side.strip() for side in _CHAIN.split(text)]
    if all(operator in _FLIPPED for operator in operators):
        sides, operators = sides[::-1], [_FLIPPED[operator] for operator in reversed(operators)]
    names = [_name(side) for side in sides]
    if "" in sides or names.count("") != len(sides) - 1:
        return None
    name = "".join(names)
    if operators == ["="]:
        bound = sides[names.index("")]
        return name, ("[", bound, bound, "]")
    if len(sides) == 2 and names[0]:
        sides, operators = [r"-\infty", *sides], ["<", *operators]
    elif len(sides) == 2:
        sides, operators = [*sides, r"\infty"], [*operators, "<"]
    if len(sides) != 3 or _name(sides[1]) != name or not all(operator in {"<", "<="} for operator in operators):
        return None
    return name, _interval(sides[0], sides[2], operators[0] == "<=", operators[1] == "<=")


def _interval(low: str, high: str, low_closed: bool, high_closed: bool) -> Interval:
    high = high.removeprefix("+") if high == r"+\infty" else high
    return ("[" if low_closed else "(", low, high, "]" if high_closed else ")")


def _intersect(first: Interval, second: Interval) -> Interval | None:
    """Intersect two rays in opposite directions, or an interval and the whole line; None for other cases."""
    if first == _ALL:
        return second
    if second == _ALL:
        return first
    for left, right in ((first, second), (second, first)):
        if left[2] == r"\infty" and right[1] == r"-\infty" and left[1] != r"-\infty":
            return (*left[:2], *right[2:])
    return None


def _without(interval: Interval, points: list[str], effort: Effort) -> list[Interval] | None:
    """Remove points from an interval; None if an end or a point has no value."""
    start, end = (_place(bound, effort) for bound in interval[1:3])
    places = {_place(point, effort): point for point in points}
    if any(map(isnan, (start, end, *places))):
        return None
    rest = []
    opening, low = interval[:2]
    for place in sorted(place for place in places if start < place < end):
        rest.append((opening, low, places[place], ")"))
        opening, low = "(", places[place]
    return [*rest, (opening, low, *interval[2:])]


def merged(intervals: list[Interval], effort: Effort) -> list[Interval]:
    """Join overlapping intervals; unchanged if an end has no value."""
    placed = [(_place(low, effort), opening == "(", _place(high, effort)) for opening, low, high, _ in intervals]
    if any(isnan(low) or isnan(high) for low, _, high in placed):
        return intervals
    joined: list[Interval] = []
    end = float("-inf")
    for (low, _, high), interval in sorted(zip(placed, intervals, strict=True), key=itemgetter(0)):
        last = joined[-1] if joined else None
        if last is None or low > end or (low == end and (last[3], interval[0]) == (")", "(")):
            joined.append(interval)
            end = high
        elif high > end or (high == end and interval[3] == "]"):
            joined[-1] = (*last[:2], *interval[2:])
            end = high
    return joined


def _set(text: str, effort: Effort) -> list[Interval] | None:
    """Read a union of intervals and finite sets, or the real line."""
    if text in _REALS:
        return [_ALL]
    but = _EXCEPT.fullmatch(text)
    if but and but[1] in _REALS:
        return _without(_ALL, [point.split("=")[-1] for point in top_level(but[2], ",;")], effort)
    less = re.fullmatch(r"(.+?)(?:\\setminus(?![A-Za-z])\s*|\\backslash\s*|-(?=\\\{))\\\{(.+)\\\}", text)
    if less:
        whole = _set(less[1], effort)
        return _without(whole[0], top_level(less[2], ",;"), effort) if whole is not None and len(whole) == 1 else None
    intervals: list[Interval] = []
    for piece in split_at(text, "\\cup"):
        if piece in _REALS:
            intervals.append(_ALL)
        elif len(piece) > 4 and piece[0] in "([" and piece[-1] in ")]":
            ends = top_level(piece[1:-1], ",;")
            if len(ends) != 2:
                return None
            intervals.append(_interval(ends[0], ends[1], piece[0] == "[", piece[-1] == "]"))
        elif piece.startswith("\\{") and piece.endswith("\\}") and piece != text:
            intervals += [("[", point, point, "]") for point in top_level(piece[2:-2], ",;")]
        else:
            return None
    return intervals
