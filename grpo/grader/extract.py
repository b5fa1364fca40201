"""Finding the final answer in a text."""

from __future__ import annotations

import re
from itertools import pairwise

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}\\\[\]]+(?![\[{])")


_JOINT = re.compile(
    r"(?:\s|\$|\\[()\[\]:;, ]|\\q?quad(?![A-Za-z]))*"
    r"(?:,?\s*(?:and|or)|,?\s*\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|,)"
    r"(?:\s|\$|\\[()\[\]:;, ]|\\q?quad(?![A-Za-z]))*"
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}``, with nested braces kept.

    Boxes that are joined by nothing but "and", "or" or a comma are one answer, a list: ``\boxed{2}$ and $\boxed{3}`` gives
    ``2, 3``; the same answer boxed again is still one. ``\boxed 5``, as some solutions of MATH write it, gives ``5``. None
    where there is no box, or where the last one is not closed: an unfinished box is an unfinished answer, whatever stands in
    an earlier one.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if start == len(text) or text[start] != "{":
        bare = _BARE.match(text, start)
        return bare.group().rstrip(".,;") if bare else None
    end = _closing_brace(text, start)
    if end is None:
        return None
    contents = [text[start + 1 : end].strip()]
    for following, box in pairwise(reversed(boxes)):
        start = box.end()
        end = _closing_brace(text, start) if text[start : start + 1] == "{" else None
        if end is None or not 0 <= following.start() - end < 60 or not _JOINT.fullmatch(text, end + 1, following.start()):
            break
        contents.append(text[start + 1 : end].strip())
    return contents[0] if len(set(contents)) == 1 else ", ".join(reversed(contents))


def without_boxes(text: str) -> str:
    r"""``text`` with the content of each ``\boxed{...}`` in its place; a box that is not closed stays.

    Where it would run into a neighbour, as the digits of ``\boxed{2}\boxed{3}``, a space keeps them apart.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return text
    pieces, position = [""], 0
    for box in _BOX.finditer(text):
        start = box.end()
        if box.start() < position or text[start : start + 1] != "{":
            continue
        end = _closing_brace(text, start)
        if end is None:
            break
        before, following = text[position : box.start()], text[end + 1 : end + 2]
        apart = " " if (before or pieces[-1])[-1:].isalnum() or before.endswith((")", "]", "}")) else ""
        pieces += [before, apart, text[start + 1 : end], " " if following not in {"$", "", ".", ","} else ""]
        position = end + 1
    return "".join([*pieces, text[position:]])


def _closing_brace(text: str, start: int) -> int | None:
    r"""Position of the brace that closes the one at ``start``; ``\{`` and ``\}`` are not counted."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += (match.group() == "{") - (match.group() == "}")
        if depth == 0:  # The first match opens the box, so only a closing brace gets here.
            return match.start()
    return None
