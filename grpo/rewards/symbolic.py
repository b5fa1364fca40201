"""Equality by computer algebra (math-verify), for answers that are no plain numbers.

math-verify and sympy take over a second to import and hang on hostile input. So they are imported at the first
use, guarded by a gate on what may be parsed at all, and by a limit on the time.

The limit uses SIGALRM, which Python allows in the main thread only and which any other user of that signal would
share. In other threads, and on Windows, only the gate protects. Neither interrupts a single long operation in C, which
is why the gate looks at exponents, factorials and long digit strings.
"""

from __future__ import annotations

import logging
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

MAX_LENGTH = 300
MAX_DEPTH = 12
_HEAVY = re.compile(
    r"!|\\(?:sum|prod|i*nt|oint|lim|limsup|liminf|det|partial|nabla|Gamma|zeta|ldots|cdots|dots|operatorname|mod|bmod|pmod|gcd|lcm)"
    r"(?![A-Za-z])|\d{50}|\\binom\s*\{?\s*\d{5}|\d{5}\s*\\choose|\^\s*\{[^{}A-Za-z]*\^|\^\s*\w+\s*\^|\d \d|\$|\n"
)
_DEGREES = re.compile(r"(\d+)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_MAX_EXPONENT = 1000
_MAX_BRACKET_EXPONENT = 200
_RELATIVE_TOLERANCE = 1e-10


class _OutOfTime(BaseException):
    """Derives from BaseException because sympy catches Exception in many places."""


class Budget:
    """Seconds that the symbolic comparisons of one answer may still take, all together."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds


def symbolically_equal(answer: str, truth: str, budget: Budget) -> bool:
    """Whether math-verify finds two normalised answers equal and a numeric check does not object.

    False where either side is too complex to be parsed safely, does not parse, or time runs out. Never raises.
    """
    if budget.seconds <= 0 or too_complex(answer) or too_complex(truth):
        return False
    math_verify = _math_verify()
    start = time.monotonic()
    try:
        with _time_limit(budget.seconds):
            return _compare(math_verify, answer, truth)
    except (_OutOfTime, Exception):
        # sympy raises anything on odd input, and an answer that it cannot read is a wrong answer.
        return False
    finally:
        budget.seconds -= time.monotonic() - start


def too_complex(text: str) -> bool:
    """Whether parsing ``text`` or simplifying what it says might take unbounded time or memory."""
    if len(text) > MAX_LENGTH or _HEAVY.search(text) or not _nesting_is_sound(text):
        return True
    bracketed = []
    for match in re.finditer(r"(.?)\s*\^", text):
        numbers = [int(digits) for digits in re.findall(r"\d+", _group_after(text, match.end()))]
        if any(number > _MAX_EXPONENT for number in numbers) or prod(numbers) > _MAX_EXPONENT:
            return True
        if match[1] in {")", "}", "]"}:
            bracketed += [number for number in numbers if number]
    return prod(bracketed) > _MAX_BRACKET_EXPONENT


def _group_after(text: str, start: int) -> str:
    """What is raised: the braces' content after position ``start``, or the single token there."""
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


def _compare(math_verify: Any, answer: str, truth: str) -> bool:
    """Parse the truth, then the answer, strictly (the whole text or nothing), and compare."""
    from math_verify import LatexExtractionConfig

    def parse(text: str) -> Any:
        # No fallback: a text that does not parse must not be replaced by some number inside it.
        options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
        found = math_verify.parse(f"${text}$", extraction_config=[LatexExtractionConfig()], **options)
        return found[0] if found else None

    true_value = parse(truth)
    value = None if true_value is None else parse(answer)
    if value is None or not math_verify.verify(true_value, value, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return _numbers_agree(value, true_value)


def _numbers_agree(value: Any, true_value: Any) -> bool:
    """Evaluate both at two random points with 30 digits; math-verify alone rounds to 6 decimal places.

    Where there is nothing to evaluate (sets, relations, matrices), math-verify's word stands.
    """
    import sympy

    if not (isinstance(value, sympy.Expr) and isinstance(true_value, sympy.Expr)):
        return True
    symbols = sorted(value.free_symbols | true_value.free_symbols, key=str)
    generator = random.Random(0)
    for _ in range(2 if symbols else 1):
        # By name: the parser may give the same letter different assumptions on the two sides.
        point = {name: sympy.Rational(generator.randint(101, 997), 499) for name in sorted({str(s) for s in symbols})}
        left, right = (sympy.N(side.subs({s: point[str(s)] for s in side.free_symbols}), 30) for side in (value, true_value))
        if not all(side.is_number and side.is_finite for side in (left, right)):
            continue
        if abs(left - right) > _RELATIVE_TOLERANCE * max(abs(left), abs(right)):
            return False
    return True


def _math_verify() -> Any:
    import math_verify

    # It warns whenever its own time limit is off; ours is on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime in the body after ``seconds``; without effect outside the main thread (see the module's text)."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(signum: int, frame: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
