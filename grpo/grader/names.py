r"""Recognition of names of the answer before an equals sign: ``x_{\max}``, ``P(A|B)``, ``[ABC]``, ``m+n``.

``2x`` and ``x^2`` are no names: ``2x = 5`` does not state the answer 5.
"""

from __future__ import annotations

import re

from grpo.grader.split import top_level

_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|phi|omega|pi|Delta|Omega|Phi|ell)(?![A-Za-z])"
_LETTER = rf"(?:[A-Za-z]|{_GREEK})"
_INDEX = r"_(?:\w|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\\[A-Za-z]+)"
_ACCENT = r"\\(?:hat|bar|tilde|vec|overline|widehat|overrightarrow)(?:\{[A-Za-z]{1,3}\}| ?[A-Za-z])"
_ARGUMENT = r"(?:\((?:[^()\[\]]|\([^()]*\))*\)|\[(?:[^()\[\]<>]|\([^()]*\))*\])"
_SET = r"\\?[A-Z](?:_\w)?"
_ATOMS = (
    rf"{_LETTER}'*{_INDEX}",
    rf"{_LETTER}'+",
    _ACCENT,
    rf"(?:[fghpqPQEFGHV]|\\Pr|\\mathbb\{{[EP]\}}|\\text\{{[A-Za-z]+\}})'*(?:{_INDEX})?(?:\^\{{-1\}})? ?{_ARGUMENT}",
    rf"\\(?:det|dim|rank|deg|max|min|sup|inf|lim|gcd|lcm|sum|prod)(?:{_INDEX})?(?:\^(?:\w|\{{[^{{}}]*\}}))? ?"
    rf"(?:{_LETTER}'*(?:{_INDEX})?{_ARGUMENT}?|{_ARGUMENT})",
    rf"\\\|(?:{_LETTER}|{_ACCENT}|\\text\{{\w\}})\\\|"
    rf"|\|(?:{_SET}(?: ?\\(?:cap|cup|setminus) ?{_SET})*|{_ACCENT}|\\text\{{\w\}})\|",
    rf"[nN]\({_SET}(?: ?\\(?:cap|cup) ?{_SET})*\)",
    r"\[[A-Z]{3,6}\]|[A-Z]{2}|\\overline\{[A-Z]{2}\}",
    r"\\text\{[A-Za-z ]+\} ?\\triangle ?[A-Z]{3}",
)
_QUANTITY = re.compile("|".join(f"(?:{atom})" for atom in _ATOMS))
_TERM = re.compile(rf"(?:{'|'.join(f'(?:{atom})' for atom in _ATOMS)}|{_LETTER})(?:\^(?:\d|\{{\d\}}))?")
_UNKNOWN = re.compile(r"(?<![A-Za-z\\({])[xyz](?![A-Za-z_)])")
_MAX_TERMS = 8


def names_quantity(text: str) -> bool:
    """Whether a side of an equation (normalised) is a name, and not an expression to compute."""
    return _QUANTITY.fullmatch(text) is not None


def names_sum(text: str) -> bool:
    """Whether a side of an equation is a sum of different names, such as ``m+n`` or ``f(2)+f(3)``; ``x+y = 2`` is a line."""
    terms = top_level(text, "+")
    is_sum = 1 < len(terms) == len(set(terms)) <= _MAX_TERMS and not _UNKNOWN.search(text)
    return is_sum and all(map(_TERM.fullmatch, terms))
