r"""Reading of exact numbers and their units, without computer algebra."""

from __future__ import annotations

import re
import tomllib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from grpo.grader.normalise import unwrap_text
from grpo.grader.words import WORDS, is_noun

_UNITS = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))

_LONGEST = 2000  # characters of a number
_PLAIN = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]?{_PLAIN}"
_BRACED = re.compile(r"\{[\d.]+\}")
_DECIMAL = re.compile(_PLAIN)
_RATIO = re.compile(rf"\\frac\{{({_SIGNED})\}}\{{({_SIGNED})\}}|({_PLAIN})/({_SIGNED})|\(({_SIGNED})\)/\(({_SIGNED})\)")
_MIXED = re.compile(r"([0-9]+)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}| ([0-9]+)/([0-9]+)|\+([0-9]+)/([0-9]+))")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)(?:\\overline\{([0-9]+)\}|\(([0-9]+)\))")
_ELLIPSIS = re.compile(r"([0-9]{1,20})\.([0-9]{0,8}?)([0-9]{1,6}?)\3{2,12}\\ldots")  # 0.1666...
_SCIENTIFIC = re.compile(
    rf"({_PLAIN})(?:(?:\\(?:times|cdot)|\*|[xX]) ?10(?:\^|\*\*)\{{?\(?([+-]?[0-9]{{1,3}})\)?\}}?|[eE]([+-]?[0-9]{{1,3}}))"
)
_SCALES = {name: int(factor) for factor, names in _UNITS["scales"].items() for name in names}
_SCALED = re.compile(rf"(.*[0-9}}]) ?(?:\\text\{{)?({'|'.join(_SCALES)})\}}?")

_EXPONENT = r"(?:\^\{?-?[1-4]\}?)"
_UNIT_TEXT = rf"\\text\{{[A-Za-z][A-Za-z0-9 ./'^*\\-]*\}}{_EXPONENT}?"
_TEXT_UNIT = re.compile(rf"(.*?[^\s,({{\[=])({_UNIT_TEXT}(?: ?(?:/|\\cdot|\*)? ?{_UNIT_TEXT})*)")
_FRACTION_UNIT = re.compile(rf"(.*?[^\s,({{\[=\\])\\frac\{{({_UNIT_TEXT})\}}\{{({_UNIT_TEXT})\}}")
_UNIT_WORD = rf"[A-Za-z]+\.?{_EXPONENT}?"
_WORD_UNIT = re.compile(
    rf"(.*?(?:[0-9)}}]|\\pi(?= )))( ?)([ap]\.m\.?|{_UNIT_WORD}(?:(?: ?/ ?| ?\\cdot ?|\*|[ -]|'|(?<=\.)){_UNIT_WORD})*)"
)
_SHORT_UNITS = frozenset(_UNITS["short"].split())
_RESIDUE = re.compile(r"([0-9]+)\\pmod\{([0-9]+)\}")


def _units() -> tuple[dict[str, tuple[str, Fraction]], dict[str, str]]:
    """Canonical name -> (dimension, size), and every name of a unit -> its canonical name."""
    sizes = {name: (what, Fraction(str(row[0]))) for what, units in _UNITS["sizes"].items() for name, row in units.items()}
    names = {other: name for units in _UNITS["sizes"].values() for name, row in units.items() for other in (name, *row[1:])}
    for name, *spellings in map(str.split, _UNITS["others"]):
        sizes[name] = (name, Fraction(1))
        names |= dict.fromkeys((name, *spellings), name)
    for sign, (what, *spellings) in _UNITS["metric"].items():
        for letter, (size, prefix) in ("", (1, "")), *_UNITS["prefixes"].items():
            sizes[letter + sign] = (what, Fraction(str(size)))
            names |= dict.fromkeys((letter + sign, *(prefix + spelling for spelling in spellings)), letter + sign)
    return sizes, names | {other: name for name, row in _UNITS["compound"].items() for other in row}


_SIZES, _NAMES = _units()
# Names in lower case -> names. Of signs of two letters, those in any case that no prefix changes: KG, but neither MG nor NM.
_ANY_CASE = {name.lower(): name for name in _NAMES if len(name) > 2 or name in _SHORT_UNITS - {"mm", "mg", "ml"}}
_ANY_CASE |= dict.fromkeys(("mhz", "mpa"), "")
_MONEY_SIGNS, _MONEY_ENDINGS = (
    {sign: name for name, signs in _UNITS[f"money {place}"].items() for sign in signs} for place in ("before", "behind")
)
_SIGN_OF_MONEY = "|".join(re.escape(sign) for sign in _MONEY_SIGNS)
_MONEY = re.compile(rf"([+-]?)({_SIGN_OF_MONEY}) ?([+-]?)(?!\\?\$)(?=[\d.\\(])(.+)")
_POWERS = frozenset({"squared", "cubed"})
_WORDS_OF_MEASURES = _POWERS | {"/", "%", "am", "pm", "C", "F", "K", "unit", "units", "square", "cubic"}
_RATE = re.compile(r"(.*\d) ?(?:/| per | an? )(.+)")

Unit = tuple[tuple[str, int], ...]
"""Canonical names and their powers, sorted: m/s² is (("m", 1), ("s", -2)); empty for no unit."""
PERCENT: Unit = (("%", 1),)
_ENDINGS = {r"\%": "%"} | _MONEY_ENDINGS


@lru_cache(maxsize=8192)
def exact_value(text: str) -> Fraction | None:
    r"""Read a plain number (normalised, without unit); None for other texts.

    Reads integers, decimals, ``a/b``, ``\frac{a}{b}``, mixed and repeating numbers, scientific notation, integer powers
    such as ``-2^{49}``, ``-{2}`` and ``5 million``. Nothing is rounded.
    """
    if not text or len(text) > _LONGEST:
        return None
    sign, body = (-1, text[1:]) if text[0] == "-" else (1, text[1:] if text[0] == "+" else text)
    value = _unsigned(body[1:-1] if _BRACED.fullmatch(body) else body)
    return None if value is None else sign * value


def _unsigned(body: str) -> Fraction | None:
    if _DECIMAL.fullmatch(body):
        return _decimal(body)
    if match := _RATIO.fullmatch(body):
        top, bottom = (_decimal(part) for part in match.groups() if part is not None)
        return top / bottom if bottom else None
    if match := _MIXED.fullmatch(body):
        whole_part, upper, lower = (int(part) for part in match.groups() if part is not None)
        return whole_part + Fraction(upper, lower) if upper < lower else None
    if match := _REPEATING.fullmatch(body):
        whole, fixed, period = match[1], match[2], match[3] or match[4]
        tail = Fraction(int(period), 10 ** len(period) - 1)
        return (int((whole or "0") + fixed) + tail) / Fraction(10 ** len(fixed))
    if match := _ELLIPSIS.fullmatch(body):
        return _unsigned(f"{match[1]}.{match[2]}({match[3]})")
    if match := _SCIENTIFIC.fullmatch(body):
        return _decimal(match[1]) * Fraction(10) ** int(match[2] or match[3])
    if match := _SCALED.fullmatch(body):
        number = _unsigned(match[1])
        return None if number is None else number * _SCALES[match[2]]
    return None


def _decimal(text: str) -> Fraction:
    whole, _, digits = text.partition(".")
    return Fraction(int(whole + digits), 10 ** len(digits))  # faster than Fraction(text)


def split_unit(text: str, noun: bool = False) -> tuple[str, Unit]:
    r"""Split a normalised answer into body and unit, which is empty if none is stated.

    ``\$5`` and ``5 dollars`` give 5 and dollar, ``60^\circ`` 60 and degree, ``7\%`` 7 and %, ``4\text{ cm}^2`` 4 and cm²,
    ``5\text{m}/\text{s}`` 5 and m/s, ``5 apples`` 5 and apple, ``2\pmod{7}`` 2 and mod 7. Other words are no units: neither
    number words (``5 million``, ``5 twos``), nor adverbs (``12 backwards``), nor conditions (``p \text{ prime}``). ``noun``:
    accept any word after a number that does not change it, as ground truths count all kinds of things.
    """
    if text.isdigit():
        return text, ()
    if (residue := _RESIDUE.fullmatch(text)) and int(residue[1]) < int(residue[2]):
        return residue[1], ((f"mod {residue[2]}", 1),)
    if money := _MONEY.fullmatch(text):
        return _priced(text, money[1] + money[3] + money[4], _MONEY_SIGNS[money[2]])
    for ending, unit in _ENDINGS.items():
        if text.endswith(ending) and len(text) > len(ending):
            return text[: -len(ending)], ((unit, 1),)
    if match := _FRACTION_UNIT.fullmatch(text):
        body, name = match[1], f"{match[2]}/{match[3]}"
    elif match := _TEXT_UNIT.fullmatch(text):
        body, name = match[1], match[2]
    elif match := _WORD_UNIT.fullmatch(text):
        body, name = match[1], match[3]
        # Letters right after a number, or two letters, are variables (5xy, 2 ab) unless they are the usual sign of a unit.
        first = re.split(r"[\s/^.*\\-]", name, maxsplit=1)[0]
        signs = first.lower() in _SHORT_UNITS or (len(first) > 1 and canonical_unit(first) is not None)
        if not signs and not (match[2] and len(first) > 2):
            return text, ()
    else:
        return text, ()
    return (text, ()) if body.endswith(("\\", "_", "^")) else _with_unit(text, body, name, noun)


def _priced(text: str, amount: str, currency: str) -> tuple[str, Unit]:
    """Split an amount of money, or of money per unit."""
    rate = _RATE.fullmatch(amount)
    body, unit = (rate[1], _unit([currency, "/", *_unit_words(rate[2])])) if rate and rate[2].isalpha() else split_unit(amount)
    is_money = {name for name, power in unit if power > 0} <= {currency}
    return (body, unit or ((currency, 1),)) if is_money else (text, ())


def _with_unit(text: str, body: str, name: str, noun: bool) -> tuple[str, Unit]:
    words = _unit_words(name)
    if words and words[0].removesuffix("s") in _SCALES:
        number, words = f"{body} {words[0].removesuffix('s')}", words[1:]
        return (number, _unit(words)) if not words or _are_units(words, True) else (text, ())
    is_number = exact_value(unwrap_text(body)) is not None
    noun = noun or (body == "1" and bool(words) and is_noun(words[0].lower(), one=True))
    return (body.strip(), _unit(words)) if _are_units(words, is_number, noun) else (text, ())


def _are_units(words: list[str], after_number: bool, noun: bool = False) -> bool:
    """Whether words are measures; after a plain number, one may be a noun for what is counted."""
    if not 1 <= len(words) <= 8 or words[0].lower() in _POWERS:
        return False
    if not after_number:
        return all(map(_is_measuring, words))
    if any(word.lower() in WORDS["no units"] - _POWERS for word in words):
        return False
    above = words[: [*words, "/"].index("/")]  # (red) marbles, cups of flour
    head = above[: above.index("of")] if above[-2:-1] == ["of"] else above
    if all(map(_is_measuring, head)):
        return True
    return _POWERS.isdisjoint(map(str.lower, words)) and (noun or (len(head) < 3 and is_noun(head[-1].lower())))


def _is_measuring(word: str) -> bool:
    name = canonical_unit(word.split("^")[0]) or word.split("^")[0]
    return name.split("/")[0] in _SIZES or name in _WORDS_OF_MEASURES


def is_measure(name: str) -> bool:
    """Whether a text consists of units of measure only: "km/h", "square feet", "N m"."""
    words = _unit_words(name)
    return all(map(_is_measuring, words)) and any(size_of(_unit([word.split("^")[0]])) is not None for word in words)


def _unit_words(name: str) -> list[str]:
    """The words of a unit, each with its exponent (``s^2``), with "/" before a denominator."""
    name = f" {name}".replace("p.m", "pm").replace("a.m", "am").replace("\\text{", " ").replace("\\cdot", " ")
    name = re.sub(r"\^ ?\{?(-?\d)\}?", r"^\1", name.replace(".", " ")).replace("}^", "^")
    name = re.sub(r"[{}*]", " ", name.replace(" per ", " / ").replace("/", " / "))
    words = name.split()
    for place in range(1, len(words) - 1):
        if words[place] in {"a", "an", "each", "every"} and _singular(words[place + 1]) in _SIZES:
            words[place] = "/"  # 60 miles an hour
    return words


def _unit(words: list[str]) -> Unit:
    """The unit in words: foot to the power of 2 for ``["square", "feet"]``, mile by hr for ``["miles", "/", "h"]``."""
    powers: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for word in words:
        name, _, exponent = word.partition("^")
        name = _singular(name)
        if word == "/":
            sign = -1
        elif name in {"square", "cubic"} and word != words[-1]:
            power = 2 if name == "square" else 3
        elif name in {"squared", "cubed", "square", "cubic"} and last:
            powers[last] *= 2 if name in {"squared", "square"} else 3
        else:
            last, _, below = name.partition("/")  # mph
            powers[last] = powers.get(last, 0) + sign * int(exponent or power)
            if below:
                powers[below] = powers.get(below, 0) - 1
            power = 1
    return tuple(sorted(powers.items()))


def canonical_unit(word: str) -> str | None:
    """The canonical name of a unit of measure; None for other words, and for signs in a case that may be one of two units."""
    for name in (word, word.removesuffix("s")) if len(word) > 3 else (word,):
        if name in _NAMES:
            return _NAMES[name]
        if folded := _ANY_CASE.get(name.lower()):
            return _NAMES[folded]
    return None


def _singular(word: str) -> str:
    known = canonical_unit(word)
    if known is not None or len(word) < 2:
        return known or word
    word = word if word.lower() in _ANY_CASE else word.lower()
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def size_of(unit: Unit) -> tuple[Unit, Fraction] | None:
    """The dimensions and the size of a unit; None for units that cannot be converted."""
    powers: dict[str, int] = {}
    size = Fraction(1)
    for name, power in unit:
        if name not in _SIZES:
            return None
        what, factor = _SIZES[name]
        powers[what] = powers.get(what, 0) + power
        size *= factor**power
    return (tuple(sorted(item for item in powers.items() if item[1])), size) if unit else None


# ---------------------------------------------------------------------------------------------------- several parts

_PART = rf"({_PLAIN}(?:\\frac\{{\d+\}}\{{\d+\}}| \d+/\d+)?) ?(?:\\text\{{)?([A-Za-z]+\.?|'|\"|''|\\\$)\}}?"
_PARTS = re.compile(rf"{_PART}(?:,| |,? ?and )?{_PART}(?:(?:,| |,? ?and )?{_PART})?")
_PRIMES = {"'": "foot", '"': "inch", "''": "inch"}


def same_number(answer: str, truth: str) -> bool | None:
    """Whether two plain numbers are exactly equal; None for other texts."""
    value, true_value = exact_value(answer), exact_value(truth)
    return None if value is None or true_value is None else value == true_value


def same_amount(answer: str, truth: str) -> bool | None:
    """Whether ``5 feet 6 inches`` equals another such amount, or ``66 inches`` (but not the number 66); None for others."""
    if not any(text[:1].isdigit() and _PARTS.fullmatch(text) for text in (answer, truth)):
        return None
    amount, true_amount = _amount(answer), _amount(truth)
    return None if amount is None or true_amount is None else amount == true_amount


def _amount(text: str) -> tuple[Unit, Fraction] | None:
    """Dimension and amount of ``66 inches``, or of ``2 hours,30 minutes``, in which each part is smaller than the previous."""
    groups = [group for group in match.groups() if group] if (match := _PARTS.fullmatch(text)) else []
    body, unit = split_unit(text)
    units = [_unit(_unit_words(_PRIMES.get(name, name))) for name in groups[1::2]]
    total, last, dimension = Fraction(0), Fraction(0), None
    for number, its_unit in zip(groups[::2] or [unwrap_text(body)], units or [unit], strict=True):
        value, size = exact_value(number), size_of(its_unit)
        if value is None or size is None or (last and (size[0] != dimension or not value * size[1] < last)):
            return None
        dimension, last = size
        total += value * last
    return None if dimension is None else (dimension, total)


def same_quantity(answer: str, answer_unit: Unit, truth: str, truth_unit: Unit) -> bool | None:
    """Whether two plain numbers with units are exactly equal; None unless both are plain numbers.

    A unit that only one side states does not count; two units of the same dimension are converted. A percentage equals its
    fraction. It also equals its number if the truth is the percentage, or if the number is above 1 ("what percentage ...": 25),
    so the answer ``0.5\\%`` is not 0.5.
    """
    value, true_value = exact_value(unwrap_text(answer)), exact_value(unwrap_text(truth))
    if value is None or true_value is None:
        return None
    if answer_unit == PERCENT != truth_unit:
        return not truth_unit and (value / 100 == true_value or (value == true_value and abs(true_value) > 1))
    if truth_unit == PERCENT != answer_unit:
        return not answer_unit and (value == true_value / 100 or value == true_value)
    factor = conversion(answer_unit, truth_unit)
    return factor is not None and value * factor == true_value


def conversion(unit: Unit, other: Unit) -> Fraction | None:
    """The factor that converts an amount in a unit to another one; 1 if one is empty, None if there is none."""
    if not unit or not other or _same_unit(unit, other):
        return Fraction(1)
    size, other_size = size_of(unit), size_of(other)
    if size is None or other_size is None or size[0] != other_size[0]:
        return None
    return size[1] / other_size[1]


def _same_unit(unit: Unit, other: Unit) -> bool:
    """Whether two units need no conversion: "unit" is any length, and the words of one may contain the other's."""
    for one, another in ((unit, other), (other, unit)):
        if one[0][0] == "unit" != another[0][0]:
            size = size_of(another)
            return size is not None and size[0] == (("length", one[0][1]),)
    if {unit[0][0], other[0][0]} == {"pound", "sterling"}:  # "pounds" are of either kind
        return True
    if any(power < 0 for _, power in unit + other):
        return unit == other or size_of(unit) == size_of(other) is not None
    return set(unit) <= set(other) or set(other) <= set(unit)
