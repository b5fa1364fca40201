"""Equality by computer algebra (math-verify), for answers that are not plain numbers.

math-verify and sympy take over a second to import and hang on hostile input. So this module imports them at first use, and
refuses texts that are too complex. Other texts may still take long: call this in a process that can be killed.
"""

from __future__ import annotations

import logging
import random
import re
from math import prod
from typing import Any

MAX_LENGTH = 300
MAX_DEPTH = 12
_UNSAFE = (
    "text|max|min|sum|prod|i*nt|oint|lim|limsup|liminf|det|partial|nabla|Gamma|zeta|ldots|cdots|dots|operatorname|mod|bmod|pmod|gcd|lcm|equiv|"
    "cong|sim|prime|infty|Rightarrow|implies|to|mapsto"
)
_HEAVY = re.compile(
    # math-verify would extract displayed or boxed parts of a text.
    rf"!|\\(?:{_UNSAFE}|boxed|fbox)(?![A-Za-z])|(?<!\\)\\[(\[)\]]"
    r"|\d{50}|\\binom\s*\{?\s*\d{5}|\d{5}\s*\\choose|\^\s*\{[^{}A-Za-z]*\^|\^\s*\w+\s*\^|\d \d|\$|\n"
)
_VECTOR_PRODUCT = re.compile(r"\\(?:vec|overrightarrow|hat)\s*(?:\{[^{}]*\}|\w)\s*\\times(?![A-Za-z])")
_TEXTS = re.compile(r"\\(?:text|begin|end)\{[^{}]*\}")
_NAMES = "arc|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|cis|abs"
_PROSE = re.compile(rf"(?<![A-Za-z0-9\\])(?!(?:[A-Za-z]{{0,2}}(?:{_NAMES}))+)[A-Za-z]{{4,}}")
_DEGREES = re.compile(r"(\d+)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_MAX_EXPONENT = 1000
_MAX_BRACKET_EXPONENT = 200
_RELATIVE_TOLERANCE = 1e-10
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns if its own time limit is off; the pool has one


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether math-verify finds two normalised answers equal and a numeric check agrees.

    False if a side is too complex to be parsed safely or does not parse. Never raises; has no time limit.
    """
    if too_complex(answer) or too_complex(truth):
        return False
    try:
        return _compare(answer, truth)
    except Exception:
        # sympy may raise anything on odd input; an answer that it cannot read is wrong.
        return False


def parses(text: str) -> bool:
    """Whether math-verify can parse a normalised text."""
    try:
        return not too_complex(text) and _parse(text) is not None
    except Exception:
        return False


def too_complex(text: str) -> bool:
    """Whether parsing or simplifying ``text`` might take unbounded time or memory."""
    if len(text) > MAX_LENGTH or _HEAVY.search(text) or _PROSE.search(_TEXTS.sub(" ", text)) or not _nesting_is_sound(text):
        return True
    bracketed = []
    for match in re.finditer(r"(.?)\s*\^", text):
        numbers = [int(digits) for digits in re.findall(r"\d+", _group_after(text, match.end())) if digits.strip("0")]
        if prod(numbers) > _MAX_EXPONENT:
            return True
        if match[1] in {")", "}", "]"}:
            bracketed += numbers
    return prod(bracketed) > _MAX_BRACKET_EXPONENT


def _group_after(text: str, start: int) -> str:
    """The exponent at position ``start``: a group in braces, or a single token."""
    rest = text[start:].lstrip()
    if not rest.startswith("{"):
        return re.match(r"[+-]?\w*", rest).group()  # type: ignore[union-attr]
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[: i + 1]
    return rest


def _nesting_is_sound(text: str) -> bool:
    depth = braces = 0
    for character in text:
        if character in "{([":
            depth += 1
            braces += character == "{"
        elif character in "})]":
            depth -= 1
            braces -= character == "}"
        if depth > MAX_DEPTH or braces < 0:
            return False
    return braces == 0


def _compare(answer: str, truth: str) -> bool:
    """Parse the truth and the answer, each as a whole text, and compare them."""
    import math_verify

    if _VECTOR_PRODUCT.search(answer) or _VECTOR_PRODUCT.search(truth):
        return False  # math-verify ignores the order of vector products.
    true_value = _parse(truth)
    value = None if true_value is None else _parse(answer)
    if value is None or not math_verify.verify(true_value, value, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return _numbers_agree(value, true_value)


def _parse(text: str) -> Any:
    import math_verify

    # No fallback, so that a text that does not parse is not replaced by a number in it.
    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    found = math_verify.parse(f"${text}$", extraction_config=[math_verify.LatexExtractionConfig()], **options)
    return found[0] if found else None


def _numbers_agree(value: Any, true_value: Any) -> bool:
    """Compare both values at two random points with 30 digits, as math-verify rounds to 6 decimal places.

    True for sets, relations and matrices, which cannot be evaluated.
    """
    import sympy

    if not (isinstance(value, sympy.Expr) and isinstance(true_value, sympy.Expr)):
        return True
    symbols = sorted(value.free_symbols | true_value.free_symbols, key=str)
    generator = random.Random(0)
    for _ in range(2 if symbols else 1):
        # By name, as the parser may give the same letter different assumptions on the two sides.
        point = {name: sympy.Rational(generator.randint(101, 997), 499) for name in sorted({str(s) for s in symbols})}
        left, right = (sympy.N(side.subs({s: point[str(s)] for s in side.free_symbols}), 30) for side in (value, true_value))
        if not all(side.is_number and side.is_finite for side in (left, right)):
            continue
        if abs(left - right) > _RELATIVE_TOLERANCE * max(abs(left), abs(right)):
            return False
    return True
