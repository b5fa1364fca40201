"""Equality by computer algebra (math-verify), for answers that are not plain numbers.

math-verify and sympy take over a second to import and hang on hostile input. So this module imports them at first use, and
refuses texts that are too complex. Other texts may still take long: call this in a process that can be killed.
"""

from __future__ import annotations

import logging
import re
from itertools import accumulate
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
    rf"!|\^\s*\{{?\s*(?:\\\{{|\\underline|[\[(]\w[\])])|\\(?:{_UNSAFE}|boxed|fbox)(?![A-Za-z])|(?<!\\)\\[(\[)\]]"
    r"|\d{50}|\\binom\s*\{?\s*\d{5}|\d{5}\s*\\choose|\^\s*\{[^{}A-Za-z]*\^|\^\s*\w+\s*\^|\d \d|\$|\n"
)
_TEXTS = re.compile(r"\\(?:text|begin|end)\{[^{}]*\}")
_NAMES = "arc|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|cis|abs"
_PROSE = re.compile(rf"(?<![A-Za-z0-9\\])(?!(?:[A-Za-z]{{0,2}}(?:{_NAMES}))+)[A-Za-z]{{4,}}")
_EXPONENT = re.compile(r"\^\s*(\{(?:[^{}]|\{[^{}]*\})*\}|[+-]?\w*)")
_MAX_EXPONENT = 200  # product of all numbers in exponents
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns if its own time limit is off; the grading process has one


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether math-verify finds two normalised answers equal.

    False if a side is too complex to be parsed safely or does not parse. Never raises; has no time limit.
    """
    if too_complex(answer) or too_complex(truth):
        return False
    # By default it rounds to 6 decimal places.
    options = {"float_rounding": 25, "numeric_precision": 40, "timeout_seconds": None, "allow_set_relation_comp": True}
    try:
        import math_verify

        true_value = _parse(truth)
        value = None if true_value is None else _parse(answer)
        return value is not None and math_verify.verify(true_value, value, **options)
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
    if len(text) > MAX_LENGTH or _HEAVY.search(text) or _PROSE.search(_TEXTS.sub(" ", text)):
        return True
    depth = max(accumulate((character in "{([") - (character in "})]") for character in text), default=0)
    exponents = [int(digits) for group in _EXPONENT.findall(text) for digits in re.findall("[0-9]+", group)]
    return depth > MAX_DEPTH or prod(filter(None, exponents)) > _MAX_EXPONENT


def _parse(text: str) -> Any:
    import math_verify

    # No fallback, so that a text that does not parse is not replaced by a number in it.
    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    parsed = math_verify.parse(f"${text}$", extraction_config=[math_verify.LatexExtractionConfig()], **options)
    return parsed[0] if parsed else None
