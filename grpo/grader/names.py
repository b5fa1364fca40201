r"""Recognition of names of the answer before an equals sign: ``x_{\max}``, ``P(A|B)``, ``[ABC]``, ``m+n``.

``2x`` and ``x^2`` are no names: ``2x = 5`` does not state the answer 5. Nor is any word: "wrong = 5" states nothing.
"""

from __future__ import annotations

import re

from grpo.grader.expression import is_constant
from grpo.grader.normalise import unwrap_text
from grpo.grader.quantity import exact_value, split_unit
from grpo.grader.split import closes_at_end, split_equations, top_level
from grpo.grader.words import NAMES, RATIO, is_noun, opened, words_of

_LETTER = r"(?:[A-Za-z]|\\(?!pm|mp|in|le|ge|ne|to|cup|cap|infty|frac|sqrt|sum|prod|pi)[A-Za-z]{2,7})"
_INDEX = r"_(?:\w|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\\[A-Za-z]+)"
_ARGUMENT = r"(?:\((?:[^()\[\]]|\([^()]*\))*\)|\[(?:[^()\[\]<>]|\([^()]*\))*\])"
_NAME = (
    rf"(?:\\(?:hat|bar|tilde|vec|overline|widehat|overrightarrow)(?:\{{[A-Za-z]{{1,3}}\}}| ?[A-Za-z])|{_LETTER})'*(?:{_INDEX})?"
)
_SET = r"\\?[A-Z](?:_\w)?(?: ?\\(?:cap|cup|setminus) ?\\?[A-Z](?:_\w)?)*"
_OPERATOR = rf"\\(?:det|dim|rank|deg|max|min|sup|inf|lim|gcd|lcm|sum|prod)(?:{_INDEX})?(?:\^(?:\w|\{{[^{{}}]*\}}))? ?"
_QUANTITY = re.compile(
    rf"{_NAME}(?:\^\{{-1\}})?|{_OPERATOR}(?:{_NAME}{_ARGUMENT}?|{_ARGUMENT})|[nN]\({_SET}\)"
    rf"|(?:[fghpqPQEFGHV]|\\Pr|\\mathbb\{{[EP]\}}|\\text\{{[A-Za-z]+\}})'*(?:{_INDEX})?(?:\^\{{-1\}})? ?{_ARGUMENT}"
    rf"|{_LETTER}\((?:[A-Za-z](?:,[A-Za-z])*|-?\d{{1,3}})\)|\|(?:{_SET}|[A-Z]{{2}}|[a-z]|\\text\{{\w\}}|{_NAME})\||\\\|{_NAME}\\\|"
    r"|\[[A-Z]{3,6}\]|[A-Z]{2,3}|\\overline\{[A-Z]{2}\}|(?:m?\\(?:angle|triangle)|\\text\{[A-Za-z ]+\} ?\\triangle) ?[A-Z]{1,3}"
    rf"|\({_NAME}(?:,{_NAME})+\)|\\text\{{[A-Za-z _]+\}}|[A-Za-z]+(?: [A-Za-z]+)*"
)
_POWER = re.compile(r"(.+?)\^(?:\d|\{\d\})")
_UNKNOWN = re.compile(r"(?<![A-Za-z\\({])[xyz](?![A-Za-z_)])")
_MAX_TERMS = 8
# Ratios, quotients and functions of names; they name the answer if the value is a ratio, a fraction or a number.
_LENGTH = r"(?:[A-Z]{2}|\\overline\{[A-Z]{2}\})"
_PART = rf"(?:[A-Za-z](?:_\w|_\{{\w+\}})?|{_LENGTH})"
_NAMED_RATIO = re.compile(rf"{_PART}(?::{_PART})+")
_NAMED_QUOTIENT = re.compile(rf"\\frac\{{(?:[A-Za-z]|{_LENGTH})\}}\{{(?:[A-Za-z]|{_LENGTH})\}}|[A-Za-z]/[A-Za-z]")
_NAMED_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc) ?\(?(?:\\angle ?[A-Z]{1,3}|[A-Zx]|\\(?:theta|alpha|beta|phi))\)?")
_LABEL = re.compile(r"((?:^|[,;] ?))(?:\\text\{ ?)?([A-Za-z]|[A-Za-z]{3,}):(?: ?\})?")
_FUNCTION_OF_X = re.compile(r"[fgh]('{0,3})(?:\^\{-1\})?\(x\)")
_EXTREME = re.compile(r"_\{?\\(?:max|min) ?\}?")
_ARGUMENTS = (re.compile(r"([A-Za-z](?:\^\{-1\})?)\(([a-z])\)=(.+)"), re.compile(r"([A-Za-z])_([a-z])=(.+)"))
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def is_name(text: str) -> bool:
    """Whether a side of an equation (normalised) only names the answer; "not" and "six" are no names."""
    if not _QUANTITY.fullmatch(text) or (is_number(text) and not text.isalpha()):
        return False
    words = opened(text).strip()
    if not re.fullmatch("[A-Za-z ]+", words) or len(words) == 1 or (words.isupper() and len(words) < 4):
        return True
    return all(word in NAMES or is_noun(word) for word in words_of(words))


def names_sum(text: str) -> bool:
    """Whether a side of an equation is a sum of different names, such as ``m+n`` or ``f(2)+f(3)``; ``x+y = 2`` is a line."""
    terms = [match[1] if (match := _POWER.fullmatch(term)) else term for term in top_level(text, "+")]
    is_sum = 1 < len(terms) == len(set(terms)) <= _MAX_TERMS and not _UNKNOWN.search(text)
    return is_sum and all(map(is_name, terms))


def named_sides(text: str, sums: bool = False) -> tuple[str, list[str]]:
    """Split ``x = a = b`` into ("x", ["a", "b"]); without a leading name (or, with ``sums``, a sum of names), it is empty."""
    sides = split_equations(text)
    if len(top_level(text, ",;")) > 1 and (len(sides) != 2 or not is_name(sides[0])):
        return "", [text]
    name = ""
    while len(sides) > 1 and (is_name(sides[0]) or (sums and names_sum(sides[0]))):
        name = name or sides[0]
        sides = sides[1:]
    if not name and len(sides) > 1 and _names_by_values(sides[0], sides[1:]):
        return sides[0], sides[1:]
    if not name and len(sides) == 2 and re.fullmatch(r"[a-df-hj-zA-Z]", sides[1]) and exact_value(sides[0]) is not None:
        return sides[1], sides[:1]  # 5 = x
    return name, sides


def same_name(name: str, other: str) -> bool:
    """Whether two names are of the same thing: f(x), g(x) and h(x) may each be y, and their derivatives y'."""
    functions = {_FUNCTION_OF_X.sub(r"y\1", each) for each in (name, other)}
    if _EXTREME.sub("", name) == other or name == _EXTREME.sub("", other):
        return True
    return name == other or (len(functions) == 1 and any(each.startswith("y") for each in (name, other)))


def assigned(text: str) -> list[tuple[str, str]]:
    """Names and values of a list of assignments to different names, or of ``(x,y) = (1,2)``; empty for other texts."""
    text = text[1:-1] if text[0] in "[(" and "=" in text and closes_at_end(text) else text
    text = _LABEL.sub(r"\1\2=", text)
    sides = split_equations(text)
    if len(sides) > 2 and {*sides[:-1]} <= {"x", "y", "z"}:
        return [(name, sides[-1]) for name in sides[:-1]]  # x = y = 1
    if len(sides) == 2 and all(side[:1] == "(" and closes_at_end(side) for side in sides):
        names, values = (top_level(side[1:-1], ",;") for side in sides)
    else:
        parts = [split_equations(part) for part in top_level(text, ",;")]
        if len(parts) < 2 or any(len(part) != 2 for part in parts):
            return []
        names, values = [part[0] for part in parts], [part[1] for part in parts]
    if not 2 <= len(names) == len(values) == len(set(names)) or not all(map(is_name, names)):
        return []
    if all("_" in name and name[0] == names[0][0] for name in names):
        return []  # x_1, x_2: two values of x
    return list(zip(names, values, strict=True))


def is_number(text: str) -> bool:
    """Whether a text is an expression without variables, and perhaps a unit."""
    return is_constant(unwrap_text(split_unit(text)[0]))


def _names_by_values(text: str, values: list[str]) -> bool:
    r"""Whether ``text`` only names the values: ``a:b`` names ratios, ``\frac{a}{b}`` fractions, ``\sin A`` numbers."""
    kinds = ((_NAMED_RATIO, RATIO.fullmatch), (_NAMED_QUOTIENT, _is_fraction), (_NAMED_FUNCTION, is_number))
    parts = [part for part in re.split("[:/{}]", text) if part]
    return len(parts) == len(set(parts)) and any(name.fullmatch(text) and all(map(fits, values)) for name, fits in kinds)


def _is_fraction(text: str) -> bool:
    return (value := exact_value(text)) is not None and value.denominator > 1


def with_argument_of(truth: str, answer: str) -> str:
    """Write ``f(t) = 2t`` with the letter of the truth ``f(x) = 2x``, unless the answer uses that letter otherwise."""
    for pattern in _ARGUMENTS:
        match, true_match = pattern.fullmatch(answer), pattern.fullmatch(truth)
        if match and true_match and match[1] == true_match[1] and true_match[2] not in letters_of(match[3]):
            tokens = re.split(f"({_TOKEN.pattern})", match[3])
            value = "".join(true_match[2] if token == match[2] else token for token in tokens)
            return truth[: true_match.end(2)] + answer[match.end(2) : match.start(3)] + value
    return answer


def letters_of(text: str) -> set[str]:
    """Letters of a text that are not part of a command."""
    return {token for token in _TOKEN.findall(text) if len(token) == 1}
