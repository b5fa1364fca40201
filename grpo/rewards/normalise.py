r"""One spelling for answers that are written in many ways.

Nothing here may change what an answer says. So spaces between digits stay (``1 3/8`` is not ``13/8``), commas go only
where they are well-formed thousands separators outside brackets (``(58,500)`` is a pair), and text is never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "±": r"\pm ", "∅": r"\emptyset ", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "\u00a0": " ", "\u2009": " ", "％": "%",
}  # fmt: skip
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_TEXT_MACRO = re.compile(r"\\(?:text(?:normal|rm|bf|it|sf)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname)\s*\{\s*")
_WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AND_OR = re.compile(r"\s*,?\s*\\text\{\s*,?\s*(?:and|or)\s*\}\s*|\s*,?\s+(?:and|or)\s+|,\s*(?:and|or)\s+")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)")
_THIN_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\\,\d{3})+(?!\d)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")


def _named_symbol(match: re.Match[str]) -> str:
    return "\\pi" if match[1] == "pi" else "\\infty"


# (pattern, replacement), applied in this order.
_RULES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:left|right|big|Big|bigl|bigr|displaystyle|textstyle)(?![A-Za-z])\s*", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"(?<=\d)\s*(?:,|\{,\})\s*\\!\s*(?=\d{3}(?!\d))", ""),
    (r"\s*\\!\s*", ""),
    (r"\{,\}", ","),
    (r"(?<!\\)\\[;:, ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
    (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
    (r"^\s*\\approx(?![A-Za-z])\s*", ""),
    (r"\\?%", r"\\%"),
    (r"\\?\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z\\])(pi|infinity|infty)(?![A-Za-z])", _named_symbol),
    (r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
    (r"\\frac\s*(\{[^{}]*\})\s*(?=\{)", r"\\frac\1"),
    (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
    (r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2"),
]
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]
_SPACE = re.compile(r"\s+")
# A space stays between letters, after a letter before a digit, and between digits, where it carries meaning.
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z])")


def normalise(text: str) -> str:
    r"""The canonical spelling of an answer: two answers with the same one are the same answer.

    Removes layout (``\left``, ``\!``, ``$…$``, outer ``\text{}``, final full stop), reads Unicode signs and ``\dfrac``
    as their LaTeX equivalents, and turns ``\text{ and }`` and ``\text{ or }`` into commas. Never raises.
    """
    # White space is collapsed early and late: patterns with several \s* would take cubic time on long runs of it.
    text = _unwrap(_SPACE.sub(" ", _SYMBOL.sub(lambda match: _SYMBOLS[match.group()], text)))
    text = _THIN_THOUSANDS.sub(lambda match: match.group().replace("\\,", ""), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _TEXT_MACRO.sub(r"\\text{", text)
    if not _TRIGONOMETRIC.search(text):
        text = re.sub(r"\s*\^\s*\{?\s*\\circ\s*\}?", r"\\text{degree}", text)
    text = _unwrap(text.rstrip(" \t\n.,;"))
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = _AND_OR.sub(",", _SPACE.sub(" ", text))
    text = _LOOSE_SPACE.sub("", text.strip())
    return text.rstrip(".,;")


def unwrap_text(text: str) -> str:
    r"""``text`` (normalised) with every ``\text{x}`` replaced by x."""
    return _WHOLE_TEXT.sub(r"\1", text).strip() if "\\text" in text else text


def _unwrap(text: str) -> str:
    r"""Strip white space and whatever merely encloses all of the answer."""
    while True:
        text = before = text.strip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            encloses = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing)
            if encloses and opening not in inner:
                text = inner.strip()
                break
        whole = _WHOLE_TEXT.fullmatch(text)
        if whole:
            text = whole.group(1)
        if text == before:
            return text
