r"""Exact numbers and their units, read without any computer algebra."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from grpo.grader.normalise import unwrap_text
from grpo.grader.words import alters

_PLAIN = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]?{_PLAIN}"
_DECIMAL = re.compile(_PLAIN)
_RATIO = re.compile(rf"\\frac\{{({_SIGNED})\}}\{{({_SIGNED})\}}|({_PLAIN})/({_SIGNED})|\(({_SIGNED})\)/\(({_SIGNED})\)")
_MIXED = re.compile(r"([0-9]+)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}| ([0-9]+)/([0-9]+)|\+([0-9]+)/([0-9]+))")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)(?:\\overline\{([0-9]+)\}|\(([0-9]+)\))")
_ELLIPSIS = re.compile(r"([0-9]{1,20})\.([0-9]{0,8}?)([0-9]{1,6}?)\3{2,12}\\ldots")  # 0.1666...
_SCIENTIFIC = re.compile(
    rf"({_PLAIN})(?:(?:\\(?:times|cdot)|\*|[xX]) ?10(?:\^|\*\*)\{{?\(?([+-]?[0-9]{{1,3}})\)?\}}?|[eE]([+-]?[0-9]{{1,3}}))"
)
_POWER = re.compile(r"([0-9]{1,6})\^(?:([0-9])|\{?(-?[0-9]{1,4})\}?)")
_SCALED = re.compile(r"(.*[0-9}]) ?(?:\\text\{)?(hundred|thousand|million|billion|trillion)\}?")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_UNIT_TEXT = r"[A-Za-z][A-Za-z ./'-]*"
_TEXT_UNIT = re.compile(rf"(.*[^\s,({{\[=])\\text\{{({_UNIT_TEXT})\}}(?:\^\{{?([23])\}}?)?")
_WORD_UNIT = re.compile(r"(.*(?:[0-9)}]|\\pi(?= )))( ?)([A-Za-z]{2}[A-Za-z ./]*|[ap]\.m\.?)(?:\^\{?([23])\}?)?")
_SHORT_NAMES = "cm mm km kg mg ml ft in yd mi oz lb lbs pt qt hr hrs sq cu am pm mph kph gal min mins sec secs deg cents"
_SHORT_UNITS = frozenset(_SHORT_NAMES.split())
_ORDINAL = re.compile(r"([0-9]+)(?:st|nd|rd|th|\^\{?(?:\\text\{)?(?:st|nd|rd|th)\}?\}?)")
# Words after a number that are no unit: they change its value or join it with something else.
_NO_UNIT_WORDS = (
    "and or to not no mod more less than plus minus times over base from through by half halves third thirds "
    "quarter quarters fourth fourths tenth tenths hundredth hundredths thousandth thousandths ten tens hundred hundreds "
    "thousand thousands million millions billion billions trillion trillions dozen dozens pair pairs pi sqrt sin cos tan cot "
    "sec csc log ln exp frac infty infinity theta alpha beta root roots factorial power remainder if when where except choose "
    "cis is isn't at least most or-more fewer other e above below about wrong maybe"
)
_NO_UNIT = frozenset(_NO_UNIT_WORDS.split())
_UNIT_NAMES = {
    "feet": "foot", "ft": "foot", "inches": "inch", "in": "inch", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm",
    "millimetre": "mm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "kms": "km", "cms": "cm",
    "minute": "min", "mins": "min", "second": "sec", "secs": "sec", "s": "sec", "hour": "hr", "h": "hr", "hrs": "hr",
    "gram": "g", "kilogram": "kg", "kgs": "kg", "milligram": "mg", "pound": "lb", "lbs": "lb", "ounce": "oz", "usd": "dollar",
    "buck": "dollar", "¢": "cent", "percent": "%", "deg": "degree", "sq": "square", "mi": "mile", "yd": "yard", "yds": "yard",
    "gm": "g", "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "gal": "gallon", "qt": "quart",
    "pt": "pint", "cu": "cubic", "centuries": "century", "days": "day", "wk": "week", "yr": "year", "yrs": "year",
    "cubed": "cubic", "squared": "square",
    "mph": "mile/hr", "kph": "km/hr", "kmh": "km/hr",
}  # fmt: skip
# Unit -> (what it measures, size). Within what it measures, sizes are exact ratios.
_SIZES = {
    name: (what, Fraction(size))
    for what, sizes in {
        "length": {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000", "inch": "0.0254", "foot": "0.3048", "yard": "0.9144",
                   "mile": "1609.344"},
        "mass": {"mg": "1/1000", "g": "1", "kg": "1000", "oz": "28.349523125", "lb": "453.59237"},
        "time": {"sec": "1", "min": "60", "hr": "3600", "day": "86400", "week": "604800"},
        "volume": {"ml": "1/1000", "l": "1"},
        "us volume": {"cup": "1", "pint": "2", "quart": "4", "gallon": "16"},
        "money": {"cent": "1/100", "dollar": "1"},
        "span": {"month": "1", "year": "12", "decade": "120", "century": "1200"},
    }.items()
    for name, size in sizes.items()
}  # fmt: skip


@lru_cache(maxsize=8192)
def exact_value(text: str) -> Fraction | None:
    r"""The number that ``text`` (normalised, without unit) writes, or None if it is not a plain number.

    Reads integers, decimals, ``a/b``, ``\frac{a}{b}``, mixed and repeating numbers, scientific notation, integer powers
    such as ``-2^{49}`` and ``5 million``. Nothing is rounded.
    """
    if not text or len(text) > 300:
        return None
    sign, body = (-1, text[1:]) if text[0] == "-" else (1, text[1:] if text[0] == "+" else text)
    value = _unsigned(body)
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
        exponent = int(match[2] or match[3])
        return _decimal(match[1]) * _power(10, exponent)
    if match := _POWER.fullmatch(body):
        base, exponent = int(match[1]), int(match[2] or match[3])
        if not base or abs(exponent) * base.bit_length() > 20_000:
            return None
        return _power(base, exponent)
    if match := _SCALED.fullmatch(body):
        number = _unsigned(match[1])
        return None if number is None else number * _SCALES[match[2]]
    return None


def _power(base: int, exponent: int) -> Fraction:
    power = Fraction(int(base ** abs(exponent)))
    return power if exponent >= 0 else 1 / power


def _decimal(text: str) -> Fraction:
    """``text`` (optional sign, digits, optional point) as a fraction; Python's own reader would take ``1_0`` too."""
    whole, _, digits = text.partition(".")
    return Fraction(int((whole if whole.strip("+-") else whole + "0") + digits), 10 ** len(digits))


def split_unit(text: str) -> tuple[str, str]:
    r"""Split a normalised answer into body and canonical unit; the unit is empty where none is stated.

    ``\$5`` and ``5 dollars`` give ("5", "dollar"), ``60^\circ`` ("60", "degree"), ``7\%`` ("7", "%"), ``4\text{ cm}^2``
    ("4", "cm^2"). Number words are no units: ``5 million`` stays whole.
    """
    if text.isdigit():
        return text, ""
    money = re.fullmatch(r"([+-]?)(?:\\?\$|€|£|US\\?\$)([+-]?)(?!\\?\$)(?=[\d.\\(])(.+)", text)
    if money and not (money[1] and money[2]):
        body, unit = split_unit(money[1] + money[2] + money[3])
        return (body, "dollar") if unit in {"", "dollar"} else (text, "")
    for ending, unit in ((r"\%", "%"), (r"\$", "dollar"), ("\u00a2", "cent"), (r"\cent", "cent")):
        if text.endswith(ending) and len(text) > len(ending):
            return text[: -len(ending)], unit
    if ordinal := _ORDINAL.fullmatch(text):
        return ordinal[1], ""
    if match := _TEXT_UNIT.fullmatch(text):
        body, name, power = match.groups()
    elif match := _WORD_UNIT.fullmatch(text):
        body, space, name, power = match.groups()
        # Letters right behind a number, or two letters, are variables unless they are a unit's usual sign: 5xy, 2 ab.
        first = (_unit_words(name) or [""])[0].split("/")[0]
        if first not in _SHORT_UNITS and _singular(first) not in _SIZES and not (space and len(first) > 2):
            return text, ""
    else:
        return text, ""
    return (text, "") if body.endswith(("\\", "_", "^")) else _with_unit(text, body, name, power)


def _with_unit(text: str, body: str, name: str, power: str | None) -> tuple[str, str]:
    words = _unit_words(name)
    if words and words[0] in _SCALES:
        number, words = f"{body} {words[0]}", words[1:]
        if len(words) > 3 or not _are_units(words):
            return text, ""
        return number, _unit_name(words, power) if words else ""
    if not 1 <= len(words) <= 5 or words[0] in {"squared", "cubed"} or not _are_units(words):
        return text, ""
    return body.strip(), _unit_name(words, power)


def _are_units(words: list[str]) -> bool:
    return not any(word in _NO_UNIT or (word not in {"squared", "cubed"} and alters(word)) for word in words)


def _unit_words(name: str) -> list[str]:
    return name.lower().replace("p.m", "pm").replace("a.m", "am").replace(".", " ").replace(" per ", "/").split()


def _unit_name(words: list[str], power: str | None) -> str:
    names = ["/".join(_singular(part) for part in word.split("/") if part) for word in words]
    exponent = f"^{power}" if power else ""
    for position in (0, len(names) - 1):
        if len(names) > 1 and not exponent and names[position] in {"square", "cubic"}:
            exponent = "^2" if names.pop(position) == "square" else "^3"
            break
    return " ".join(names) + exponent


def _singular(word: str) -> str:
    singular = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    return _UNIT_NAMES.get(word) or _UNIT_NAMES.get(singular) or singular


def size_of(unit: str) -> tuple[str, Fraction] | None:
    """What a canonical unit measures, and its size; None for units that cannot be converted."""
    name, _, power = unit.partition("^")
    parts = [_SIZES.get(part) for part in name.split("/")]
    if any(part is None for part in parts) or len(parts) > 2:
        return None
    what = "/".join(part[0] for part in parts if part)
    size = Fraction(1)
    for place, part in enumerate(part for part in parts if part):
        size = size / part[1] if place else part[1]
    return (what + power, size ** int(power or 1)) if not (power and what != "length") else None


def same_quantity(answer: str, answer_unit: str, truth: str, truth_unit: str) -> bool | None:
    """Whether two plain numbers with units are the same, exactly; None unless both sides are plain numbers.

    A unit that only one side states does not count; two that measure the same are converted. A percentage equals the
    fraction it means. It also equals the bare number where the truth is the percentage, or where that number is above 1
    ("what percentage ...": 25), so the answer ``0.5\\%`` is not 0.5.
    """
    value, true_value = exact_value(unwrap_text(answer)), exact_value(unwrap_text(truth))
    if value is None or true_value is None:
        return None
    if answer_unit == "%" != truth_unit:
        return not truth_unit and (value / 100 == true_value or (value == true_value and abs(true_value) > 1))
    if truth_unit == "%" != answer_unit:
        return not answer_unit and (value == true_value / 100 or value == true_value)
    if answer_unit and truth_unit and not same_unit(answer_unit, truth_unit):
        size, true_size = size_of(answer_unit), size_of(truth_unit)
        if size is None or true_size is None or size[0] != true_size[0]:
            return False
        return value * size[1] == true_value * true_size[1]
    return value == true_value


def same_unit(unit: str, other: str) -> bool:
    """Whether two canonical units need no conversion. "Units" are any lengths, and one noun may stand among more words."""
    for one, another in ((unit, other), (other, unit)):
        if one in {"unit", "unit^2", "unit^3"} and another not in {"unit", "unit^2", "unit^3"}:
            size = size_of(another)
            return size is not None and size[0] == one.replace("unit", "length").replace("^", "")
    first, second = set(unit.split()), set(other.split())
    return first <= second or second <= first


def is_sign_of(letter: str, unit: str) -> bool:
    """Whether a letter behind a number, as in 5m, may stand for ``unit`` (canonical)."""
    return letter in "mgslhL" and _singular(letter.lower()) == unit
