r"""Whether a ground truth is one that answers can be compared with."""

from __future__ import annotations

import re

from grpo.grader.compare import is_spelt, matrix_rows, parts_of
from grpo.grader.expression import parse
from grpo.grader.normalise import unwrap_text
from grpo.grader.quantity import exact_value, split_unit
from grpo.grader.split import split_equations
from grpo.grader.symbolic import parses
from grpo.grader.words import based, time_of_day

_MAX_LEVELS = 6
_SPLIT = re.compile(r"[<>]|\\(?:le|ge|ne|in|lor|land|setminus|approx)(?![A-Za-z])")
_SYMBOLS = frozenset((r"\infty", r"-\infty", r"+\infty", r"\emptyset", r"\ldots", r"\mathbb{R}", r"\mathbb{Z}", r"\{\}"))
_GEOMETRIC = re.compile(r"\\(?:overline|overleftrightarrow|triangle|angle|overrightarrow|odot)(?![A-Za-z])")
_PROSE = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'-]*")


def is_readable(text: str, levels: int = _MAX_LEVELS) -> bool:
    """Whether a normalised text is a number, word, list, relation or expression, or made of such."""
    if not text or levels == 0:
        return False
    body = unwrap_text(split_unit(text)[0])
    if exact_value(body) is not None or body in _SYMBOLS or is_spelt(body) or _PROSE.fullmatch(body):
        return True
    if based(body.replace(" ", "")) or time_of_day(body.replace(" ", "")) or parse(body) is not None:
        return True
    pieces = _pieces(body)
    if pieces != [body]:
        return all(is_readable(piece, levels - 1) for piece in pieces if piece)
    bare = _GEOMETRIC.sub("", body)
    return (bare != body and is_readable(bare, levels - 1)) or parses(body)


def _pieces(text: str) -> list[str]:
    """The cells of a matrix, the sides of a relation or equation, the elements of a list, or the text itself."""
    rows = matrix_rows(text)
    if rows is not None:
        return [cell for row in rows for cell in row]
    for pieces in (parts_of(text)[1], split_equations(text), [side.strip() for side in _SPLIT.split(text)]):
        if pieces != [text]:
            return pieces
    return [text]
