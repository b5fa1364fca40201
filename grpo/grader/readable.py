r"""Check whether a ground truth is readable, by the same code that compares answers."""

from __future__ import annotations

import re
from collections.abc import Callable

from grpo.grader.compare import Comparison, T, is_spelt
from grpo.grader.expression import parse
from grpo.grader.quantity import exact_value
from grpo.grader.symbolic import parses
from grpo.grader.values import Effort

_EFFORT = 20_000.0
_SYMBOLS = frozenset((r"\infty", r"-\infty", r"+\infty", r"\emptyset", r"\ldots", r"\mathbb{R}", r"\mathbb{Z}", r"\{\}"))
_GEOMETRIC = re.compile(r"\\(?:overline|overleftrightarrow|triangle|angle|overrightarrow|odot)(?![A-Za-z])")
_PROSE = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'-]*")


def is_readable(text: str) -> bool:
    """Whether a normalised text consists of numbers, words, lists, relations and expressions."""
    return bool(text) and _Reading(None, Effort(_EFFORT)).same(text, text)


class _Reading(Comparison):
    """Comparison of a text with itself, without the shortcut that identical texts are equal."""

    def spelt_alike(self, answer: str, truth: str) -> bool:
        return False

    def in_any_order(self, left: list[T], right: list[T], equal: Callable[[T, T], bool]) -> bool:
        return all(equal(part, part) for part in left)

    def expression(self, answer: str, truth: str) -> bool:
        if exact_value(answer) is not None or answer in _SYMBOLS or is_spelt(answer) or _PROSE.fullmatch(answer):
            return True
        bare = _GEOMETRIC.sub("", answer)
        return parse(answer) is not None or (bare != answer and self.same(bare, bare, 2)) or self.by_algebra(answer, truth)

    def by_algebra(self, answer: str, truth: str) -> bool:
        return parses(answer)
