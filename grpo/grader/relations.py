r"""Sets of real numbers: inequalities, intervals, unions, differences and words, so that ``x > 3`` equals ``(3,\infty)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf, isclose, isnan

from grpo.grader.expression import GREEK, parse, variables
from grpo.grader.normalise import RELATION
from grpo.grader.numeric import number
from grpo.grader.split import closes_at_end, split_at, top_level
from grpo.grader.values import Effort

_OPERATORS = {"<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "=": "="}
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
    if not RELATION.search(text) or _REALS.fullmatch(text):
        whole = _set(text, effort, alone=True)
        return None if whole is None else ("", whole)
    found = _united(_alternative(alternative, effort) for alternative in split_at(text, "\\lor"))
    if found and _NAMED_MODULUS.fullmatch(found[0]):  # a modulus is not negative
        return found[0], [("[", "0", *interval[2:]) if "infty" in interval[1] else interval for interval in found[1]]
    return found


def member_of(text: str) -> str:
    r"""Return the set S of ``x \in S``, or the text itself."""
    member = _MEMBER.fullmatch(text)
    return re.sub(r"^[ZNQC]$", r"\\mathbb{\g<0>}", member[2]) if member else text


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


def merged(intervals: list[Interval], effort: Effort) -> list[Interval]:
    """Join overlapping intervals; unchanged if an end has no value."""
    return _combined(any, [intervals], effort) or intervals


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


def _combined(keep: Callable[[list[bool]], bool], sets: list[list[Interval]], effort: Effort) -> list[Interval] | None:
    """The numbers for which ``keep`` holds, given in which of the sets they are; None if an end has no value."""
    ends: dict[float, str] = {}
    placed = []
    for intervals in sets:
        placed.append([(_place(low, effort), _place(high, effort), left, right) for left, low, high, right in intervals])
        ends |= {_place(end, effort): end for interval in intervals for end in interval[1:3]}
    places = sorted(place for place in ends if abs(place) < inf)
    if any(map(isnan, ends)):
        return None

    def contains(interval: tuple[float, float, str, str], place: float) -> bool:
        low, high, left, right = interval
        return low < place < high or (place == low and left == "[") or (place == high and right == "]")

    def holds(place: float) -> bool:
        return keep([any(contains(interval, place) for interval in one) for one in placed])

    gaps = [places[0] - 1, *((low + high) / 2 for low, high in pairwise(places)), places[-1] + 1] if places else [0.0]
    found: list[Interval] = []
    start: tuple[str, str] | None = ("(", r"-\infty") if holds(gaps[0]) else None
    for place, gap in zip(places, gaps[1:], strict=True):
        at, after = holds(place), holds(gap)
        if start and not (at and after):
            found.append((*start, ends[place], "]" if at else ")"))
            start = ("(", ends[place]) if after else None
        elif not start and after:
            start = ("[" if at else "(", ends[place])
        elif not start and at:
            found.append(("[", ends[place], ends[place], "]"))
    return [*found, (*start, r"\infty", ")")] if start else found


def _alternative(text: str, effort: Effort) -> _Named | None:
    member = _MEMBER.fullmatch(text)
    if not _CHAIN.search(text):
        whole = _set(member[2] if member else text, effort)
        return None if whole is None else (member[1] if member else "", whole)
    found: list[_Named | None] = []
    for piece in split_at(text, "\\cup"):
        together = "\\land" in piece or "\\ne" in piece
        conditions = [piece] if together else top_level(piece, ",;")
        several = [_conjunction(condition, effort) for condition in conditions]
        ends = sorted((_place(end[1], effort), _place(end[2], effort)) for one in several if one for end in one[1])
        overlap = len(conditions) > 1 and any(first[1] > second[0] for first, second in pairwise(ends))
        found += [_conjunction(piece, effort)] if overlap else several  # 1<x, x<2 must hold together
    return _united(found)


def _place(end: str, effort: Effort) -> float:
    if end in {r"-\infty", r"\infty"}:
        return float(end.replace("\\infty", "inf"))
    place = number(end, effort)
    return float("nan") if place is None else place


def _conjunction(text: str, effort: Effort) -> _Named | None:
    """Intersect conditions joined by ``\\land`` or commas; ``x \\ne 2, 3`` excludes both numbers."""
    names: set[str] = set()
    sets: list[list[Interval]] = []
    excluded: list[str] = []
    for condition in [part for piece in split_at(text, "\\land") for part in top_level(piece, ",;")]:
        exclusion = re.fullmatch(r"(.+?)\\ne(?![A-Za-z])\s*(.+)", condition)
        name = _name(exclusion[1]) if exclusion else ""
        member = _MEMBER.fullmatch(condition)
        found: _Named | None
        if exclusion and name:
            both_signs = re.fullmatch(r"\\pm(?![A-Za-z]) ?(.+)", exclusion[2])
            excluded += [both_signs[1], _negative(both_signs[1])] if both_signs else [exclusion[2]]
            found = name, [_ALL]
        elif excluded and not member and not _CHAIN.search(condition):
            excluded.append(condition)
            continue
        elif member:
            whole = _set(member[2], effort)
            found = None if whole is None else (member[1], whole)
        else:
            found = _modulus(condition, effort) or _condition(condition)
        if found is None:
            return None
        names.add(found[0])
        sets.append(found[1])
    kept = [one for one in sets if one != [_ALL]] or [[_ALL]]
    whole = kept[0] if len(kept) == 1 else _combined(all, kept, effort)
    if len(names) != 1 or whole is None:
        return None
    rest = _without(whole, [("[", point, point, "]") for point in excluded], effort) if excluded else whole
    return None if rest is None else (names.pop(), rest)


def _without(whole: list[Interval], less: list[Interval], effort: Effort) -> list[Interval] | None:
    return _combined(lambda found: found[0] and not found[1], [whole, less], effort)


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
    at = [re.sub(rf"(?<![A-Za-z\\]){names[0]}(?![A-Za-z])", f"({value})", inner) for value in _LINE]
    places = [_place(value, effort) for value in at]
    slope = places[1] - places[0]
    found = _condition(text.replace(f"|{inner}|", f" {names[0]}"))
    is_line = all(isclose(y, places[0] + slope * x, abs_tol=1e-12) for x, y in zip(_LINE, places, strict=True))
    if found is None or not slope or not is_line:
        return None
    opening, low, high, closing = found[1][0]
    nearest = 0.0 if low == r"-\infty" else _place(low, effort)
    if not _place(high, effort) > nearest >= 0:
        return None
    if low == r"-\infty":
        ranges = [(_MIRROR[closing], _negative(high), high, closing)]
    else:
        ranges = [(_MIRROR[closing], _negative(high), _negative(low), _MIRROR[opening]), found[1][0]]

    def solved(end: str) -> str:
        if "infty" in end:
            return end if slope > 0 else _negative(end)
        return f"(({end})-({at[0]}))/(({at[1]})-({at[0]}))"

    if slope < 0:
        ranges = [(_MIRROR[right], end, start, _MIRROR[left]) for left, start, end, right in ranges]
    return names[0], [(left, solved(start), solved(end), right) for left, start, end, right in ranges]


def _negative(end: str) -> str:
    return {r"-\infty": r"\infty", r"\infty": r"-\infty"}.get(end) or f"-({end})"


def _name(side: str) -> str:
    """The variable or name on a side of an inequality; empty if it is not a name."""
    match = _VARIABLE.fullmatch(side)
    return (match["variable"] or match["named"]) if match else ""


def _condition(text: str) -> _Named | None:
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
        return name, [("[", bound, bound, "]")]
    if len(sides) == 2 and names[0]:
        sides, operators = [r"-\infty", *sides], ["<", *operators]
    elif len(sides) == 2:
        sides, operators = [*sides, r"\infty"], [*operators, "<"]
    if len(sides) != 3 or _name(sides[1]) != name or not all(operator in {"<", "<="} for operator in operators):
        return None
    return name, [_interval(sides[0], sides[2], operators[0] == "<=", operators[1] == "<=")]


def _interval(low: str, high: str, low_closed: bool, high_closed: bool) -> Interval:
    high = high.removeprefix("+") if high == r"+\infty" else high
    return ("[" if low_closed else "(", low, high, "]" if high_closed else ")")


def _set(text: str, effort: Effort, alone: bool = False) -> list[Interval] | None:
    """Read a union, intersection or difference of intervals and finite sets, the real line, or its name in words.

    Args:
        alone: the text is an answer by itself, where ``{1,2}`` and ``(1,2)`` may be other things than sets of numbers.
    """
    if (real := _REALS.fullmatch(text)) or (alone and (real := _REALS_IN_WORDS.fullmatch(text))):
        return _reals(real.groupdict() or {"sign": real[1] or real[2] or real[3]}, effort)
    for command, keep in (("\\cup", any), ("\\cap", all)):
        if len(pieces := split_at(text, command)) > 1:
            sets = [_set(piece, effort) for piece in pieces]
            if any(found is None for found in sets):
                return None
            known = [found for found in sets if found is not None]
            return [interval for found in known for interval in found] if keep is any else _combined(all, known, effort)
    for command in ("\\setminus", "\\backslash", "-"):
        whole, *less = split_at(text, command) if command != "-" else re.split(r"(?<=[)\]}R])-(?=\\\{)", text)
        if len(less) == 1:
            kept, removed = _set(whole, effort), _set(less[0], effort)
            return None if kept is None or removed is None else _without(kept, removed, effort)
    pieces = top_level(text, ",;")
    if alone and len(pieces) > 1 and all(_is_interval(piece) for piece in pieces):
        return [interval for piece in pieces for interval in _set(piece, effort) or []]
    if len(text) > 4 and text[0] in "([" and text[-1] in ")]" and closes_at_end(text):
        ends = top_level(text[1:-1], ",;")
        return [_interval(ends[0], ends[1], text[0] == "[", text[-1] == "]")] if len(ends) == 2 else None
    if text.startswith("\\{") and text.endswith("\\}") and not alone:
        return [("[", point, point, "]") for point in top_level(text[2:-2], ",;")]
    return None


def _is_interval(piece: str) -> bool:
    """Whether a part of a list is an interval and no point: ``(1,\\infty)``, ``[0,1]``."""
    return len(piece) > 4 and piece[0] in "([" and piece[-1] in ")]" and ("infty" in piece or "[" in piece or "]" in piece)


def _reals(found: dict[str, str | None], effort: Effort) -> list[Interval] | None:
    """The real numbers with a condition: positive, greater than 2, except 1."""
    sign, end = (found["sign"] or "").replace("non-", "non"), found.get("end")
    conditions = [f"x{_SIGNS.get(sign, sign)} 0"] if sign else []
    if end:
        sign = _SIGNS[found["than"] or found["bound"] or "nonzero"]
        sign = {">": "\\ge", "<": "\\le"}[sign] if found["equal"] else sign
        conditions.append(f"x{sign} " + ",".join(point.split("=")[-1] for point in top_level(end, ",;")))
    described = _conjunction("\\land ".join(conditions), effort) if conditions else ("x", [_ALL])
    return described[1] if described else None
