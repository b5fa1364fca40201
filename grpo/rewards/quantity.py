r"""Exact numbers and their units, read without any computer algebra."""

from __future__ import annotations

import re
from fractions import Fraction

from grpo.rewards.normalise import unwrap_text

_PLAIN = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?{_PLAIN}"
_DECIMAL = re.compile(_PLAIN)
_RATIO = re.compile(rf"\\frac\{{({_SIGNED})\}}\{{({_SIGNED})\}}|({_PLAIN})/({_SIGNED})|\(({_SIGNED})\)/\(({_SIGNED})\)")
_MIXED = re.compile(r"(\d+)(?:\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_SCIENTIFIC = re.compile(rf"({_PLAIN})(?:\\(?:times|cdot) ?10\^\{{?([+-]?\d{{1,3}})\}}?|[eE]([+-]?\d{{1,3}}))")
_POWER = re.compile(r"(\d{1,6})\^(?:(\d)|\{(-?\d{1,4})\})")

_TEXT_UNIT = re.compile(r"(.*[^\s,({\[=])\\text\{([A-Za-z][A-Za-z .]*)\}((?:\^[23])?)")
_WORD_UNIT = re.compile(r"(.*\d\}?)([A-Za-z]{2}[A-Za-z. ]*|[ap]\.m\.?)((?:\^[23])?)")
# Words after a number that are no unit: they change its value or join it with something else.
_NO_UNIT_WORDS = (
    "and or to not no mod more less than plus minus times over base from through by squared cubed half halves third thirds "
    "quarter quarters fourth fourths tenth tenths hundredth hundredths thousandth thousandths ten tens hundred hundreds "
    "thousand thousands million millions billion billions trillion trillions dozen dozens pair pairs pi sqrt sin cos tan cot "
    "sec csc log ln exp frac infty infinity theta alpha beta root roots factorial power remainder if when where except"
)
_NO_UNIT = frozenset(_NO_UNIT_WORDS.split())
_UNIT_NAMES = {
    "feet": "foot", "ft": "foot", "inches": "inch", "in": "inch", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "minute": "min", "second": "sec", "hour": "hr",
    "gram": "g", "kilogram": "kg", "pound": "lb", "usd": "dollar", "buck": "dollar", "percent": "%", "deg": "degree",
    "sq": "square", "mi": "mile", "yd": "yard", "gm": "g", "liter": "l", "litre": "l",
}  # fmt: skip


def exact_value(text: str) -> Fraction | None:
    r"""The number that ``text`` (normalised, without unit) writes, or None if it is not a plain number.

    Reads integers, decimals, ``a/b``, ``\frac{a}{b}``, mixed and repeating numbers, scientific notation and integer
    powers such as ``-2^{49}``. Nothing is rounded.
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
        number, upper, lower = (int(part) for part in match.groups() if part is not None)
        return number + Fraction(upper, lower) if upper < lower else None
    if match := _REPEATING.fullmatch(body):
        whole, fixed, period = match.groups()
        tail = Fraction(int(period), 10 ** len(period) - 1)
        return (int((whole or "0") + fixed) + tail) / Fraction(10 ** len(fixed))
    if match := _SCIENTIFIC.fullmatch(body):
        exponent = int(match[2] or match[3])
        return _decimal(match[1]) * _power(10, exponent)
    if match := _POWER.fullmatch(body):
        base, exponent = int(match[1]), int(match[2] or match[3])
        if not base or abs(exponent) * base.bit_length() > 20_000:
            return None
        return _power(base, exponent)
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
    money = re.fullmatch(r"([+-]?)\\?\$([+-]?)(?!\\?\$)(?=[\d.\\(])(.+)", text)
    if money and not (money[1] and money[2]):
        body, unit = split_unit(money[1] + money[2] + money[3])
        return (body, "dollar") if unit in {"", "dollar"} else (text, "")
    if text.endswith(r"\%") and len(text) > 2:
        return text[:-2], "%"
    match = _TEXT_UNIT.fullmatch(text) or _WORD_UNIT.fullmatch(text)
    if not match or match[1].endswith(("\\", "_", "^")):
        return text, ""
    words = match[2].lower().replace(".", "").split()
    if len(words) > 4 or any(word in _NO_UNIT for word in words):
        return text, ""
    return match[1].strip(), _unit_name(words, match[3])


def _unit_name(words: list[str], power: str) -> str:
    names = []
    for word in words:
        singular = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        names.append(_UNIT_NAMES.get(word) or _UNIT_NAMES.get(singular) or singular)
    if names[0] in {"square", "cubic"} and len(names) > 1 and not power:
        power = "^2" if names[0] == "square" else "^3"
        names = names[1:]
    # "units" says nothing about which unit it is.
    return "" if names == ["unit"] else " ".join(names) + power


def same_quantity(answer: str, answer_unit: str, truth: str, truth_unit: str) -> bool | None:
    """Whether two plain numbers with units are the same, exactly; None unless both sides are plain numbers.

    A unit that only one side states does not count. A percentage equals the fraction it means. It also equals the bare
    number where the truth is the percentage, or where that number is above 1 ("what percentage ...": 25), so the answer
    ``0.5\\%`` is not 0.5.
    """
    value, true_value = exact_value(unwrap_text(answer)), exact_value(unwrap_text(truth))
    if value is None or true_value is None:
        return None
    if answer_unit == "%" != truth_unit:
        return not truth_unit and (value / 100 == true_value or (value == true_value and abs(true_value) > 1))
    if truth_unit == "%" != answer_unit:
        return not answer_unit and (value == true_value / 100 or value == true_value)
    if answer_unit and truth_unit and answer_unit != truth_unit:
        return False
    return value == true_value
