"""The lists of words (words.toml), and numbers in words."""

from __future__ import annotations

import re
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

LISTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
WORDS: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in LISTS.items() if isinstance(words, str)}
NUMBERS = {word: value for value, word in enumerate(LISTS["small numbers"].split())}
NUMBERS |= {word: value for value, word in zip(range(20, 100, 10), LISTS["tens"].split(), strict=True)}
_LARGE: dict[str, int] = LISTS["large numbers"]
_DENOMINATORS: dict[str, int] = LISTS["denominators"]
_SPECIAL = {"half": Fraction(1, 2), "a half": Fraction(1, 2), "a dozen": Fraction(12), "half a dozen": Fraction(6)}
_BEGINNINGS = {word[:3] for word in (*NUMBERS, "half", "minus", "negative")} | {f"a {letter}" for letter in "htqmd"}
_DIGIT, _TENS = (
    "|".join(word for word, value in NUMBERS.items() if value in values) for values in (range(1, 10), range(20, 100))
)
_BELOW_100 = rf"(?:(?:{_TENS}) (?:{_DIGIT})|(?:{'|'.join(NUMBERS)}))"
_BELOW_1000 = rf"(?:{_BELOW_100} hundred(?: (?:and )?{_BELOW_100})?|{_BELOW_100})"
_SCALES = "".join(rf"(?:{_BELOW_1000} {scale} ?)?" for scale in reversed([*_LARGE][1:]))
_WHOLE = re.compile(rf"(?!and ){_SCALES}(?:(?:and )?{_BELOW_1000})?(?<! )")


def number_word(text: str) -> str | None:
    """Convert ``twelve``, ``minus one hundred twenty-five``, ``two and a half`` or ``three quarters`` to digits, else None."""
    if text[:3].lower() not in _BEGINNINGS:
        return None
    words = [word for word in re.split(r"[\s-]+", text.strip().lower()) if word]
    sign = "-" if words and words[0] in {"minus", "negative"} else ""
    value = _read_number(words[1:] if sign else words)
    return None if value is None else sign + str(value)


def spelt_out(text: str) -> str | None:
    """Convert the number of ``Twelve apples`` or ``two and a half hours`` to digits; None if the text begins otherwise."""
    if text[:3].lower() not in _BEGINNINGS:
        return None
    words = text.strip().split()
    for count in range(min(len(words), 12), 0, -1):
        number = number_word(" ".join(words[:count]).rstrip(".,;!"))
        if number is not None:
            rest = words[count:]
            if rest[:2] in (["of", "a"], ["of", "an"]):
                rest = rest[2:]  # three quarters of an hour
            return " ".join([number, *rest])
    return None


def _read_number(words: list[str]) -> Fraction | None:
    """The value of number words: whole ones, fractions, and both joined by "and"."""
    if " ".join(words) in _SPECIAL:
        return _SPECIAL[" ".join(words)]
    if "and" in words:
        place = len(words) - 1 - words[::-1].index("and")
        fraction = _read_fraction(words[place + 1 :])
        if fraction is not None:
            whole = _read_whole(words[:place])
            return None if whole is None or fraction >= 1 else whole + fraction
    fraction, whole = _read_fraction(words), _read_whole(words)
    return fraction if fraction is not None or whole is None else Fraction(whole)


def _read_fraction(words: list[str]) -> Fraction | None:
    """Read ``two thirds`` or ``a half``; not "ten thousandths", which is ambiguous."""
    lower = _DENOMINATORS.get(words[-1].removesuffix("s")) if words else None
    upper = 1 if words[:-1] in (["a"], ["an"]) else _read_whole(words[:-1])
    if not upper or not lower or (lower >= 100 and (upper >= 100 or upper == 10)):
        return None
    return Fraction(upper, lower) if (upper == 1) != words[-1].endswith("s") else None


def _read_whole(words: list[str]) -> int | None:
    """Read ``one hundred and twenty five thousand``; None if the words are not a whole number."""
    if len(words) > 1 and words[0] == "a":
        words = ["one", *words[1:]]
    if not words or not _WHOLE.fullmatch(" ".join(words)):
        return None
    total = group = 0
    for word in words:
        if word == "hundred":
            group *= 100
        elif word in _LARGE:
            total, group = total + group * _LARGE[word], 0
        elif word != "and":
            group += NUMBERS[word]
    return total + group
