"""Extraction of the final boxed answer from a text."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from grpo.grader.quantity import is_measure

_NAMES = ("\\boxed", "\\fbox")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_TOKEN = re.compile(rf"({_BOX.pattern}\{{)|\\(?!{_BOX.pattern}\{{).|[{{}}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}\\\[\]]+(?![\[{])")
_SPACES = r"(?:\s|\$|\\[()\[\]:;, ]|\\q?quad(?![A-Za-z]))*"
_JOINT = re.compile(
    rf"{_SPACES}(?:,?\s*(?:and|or)|,?\s*\\(?:text|mbox|textrm|mathrm)\s*\{{\s*,?\s*(?:and|or)\s*\}}|,){_SPACES}"
)
_NEAR = 60  # characters between two boxes of one list
_BLANK = 60  # characters at most in an empty box


class _Box(NamedTuple):
    """Positions of a box, of its content, and of its closing brace."""

    start: int
    inside: int
    end: int

    def content(self, text: str) -> str:
        return text[self.inside : self.end].strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}``, with nested braces kept.

    Boxes joined only by "and", "or" or a comma are one answer, a list: ``\boxed{2}$ and $\boxed{3}`` gives ``2, 3``. A repeated
    answer counts once. Of nested boxes, the outer one counts. ``\boxed 5``, as in some solutions of MATH, gives ``5``. None if
    there is no box, or if the last box is not closed: an unfinished box is an unfinished answer, whatever an earlier one
    contains.
    """
    boxes = _last_boxes(text)
    return boxes if boxes is None or isinstance(boxes, str) else _listed(text, boxes)


def boxed_answer(text: str) -> str | None:
    r"""Return the last boxed answer with the text around the box that changes it.

    ``-\boxed{5}`` gives ``-5``, ``\boxed{50}\%`` a percentage, and ``not \boxed{5}`` a denial, which equals nothing. Without
    such text, the result is that of :func:`last_boxed`.
    """
    boxes = _last_boxes(text)
    if boxes is None or isinstance(boxes, str):
        return boxes
    answer = _listed(text, boxes)
    if not answer:
        return ""
    lead, rest = text[max(0, boxes[0].start - _AROUND) : boxes[0].start], text[boxes[-1].end + 1 :]
    if not _in_formula(lead):
        rest = _EXCLAMATION.sub("", rest)
        lead = _BULLET.sub(r"\1", re.sub(r"(?<=[A-Za-z])!+", "", lead))
    before, after = _before(lead, answer), _after(rest)
    if before.endswith(("(", "[")) != after.startswith((")", "]")):
        before, after = before.rstrip("(["), after.lstrip(")]")
    if ("|" in before) != ("|" in after):
        before, after = before.replace("|", "").strip(), after.replace("|", "").strip()
    if (before or after) and _SUM.search(answer):
        answer = f"({answer})"
    return before + answer + after


def without_boxes(text: str) -> str:
    r"""Replace each ``\boxed{...}`` by its content, except empty or unclosed boxes.

    A space separates contents that would run together, such as the digits of ``\boxed{2}\boxed{3}``.
    """
    if not any(name in text for name in _NAMES):
        return text
    cuts: list[tuple[int, int]] = []
    for box in _closed_boxes(text):
        if box.end - box.inside > _BLANK or box.content(text):
            cuts += [(box.start, box.inside), (box.end, box.end + 1)]
    pieces, position, last = [], 0, ""
    for start, end in sorted(cuts):
        pieces.append(text[position:start])
        last, following = (pieces[-1] or last)[-1:], text[end : end + 1]
        opens = end - start > 1
        if (last.isalnum() or last in {")", "]", "}"}) if opens else following not in {"$", "", ".", ",", "}"}:
            pieces.append(" ")
            last = " "
        position = end
    return "".join([*pieces, text[position:]])


def _listed(text: str, boxes: list[_Box]) -> str:
    contents = [without_boxes(box.content(text)) for box in boxes]
    if len(set(contents)) == 1:
        return contents[0]
    return ", ".join(contents) if all(contents) else " and ".join(contents)  # "5 and" equals nothing


def _last_boxes(text: str) -> list[_Box] | str | None:
    """The boxes of the last answer, the text after a last box without braces, or None."""
    last = max(map(text.rfind, _NAMES))
    while last >= 0 and not (match := _BOX.match(text, last)):
        last = max(text.rfind(name, 0, last) for name in _NAMES)
    if last < 0 or not match:
        return None
    if text[match.end() : match.end() + 1] != "{":
        bare = _BARE.match(text, match.end())
        return bare.group().rstrip(".,;") if bare else None
    boxes: list[_Box] = []
    for box in _closed_boxes(text):  # inner boxes come first
        while boxes and boxes[-1].start > box.start:
            boxes.pop()
        boxes.append(box)
    if not boxes or boxes[-1].end < last:  # the last one is not closed
        return None
    joined = [
        following.start - box.end < _NEAR and _JOINT.fullmatch(text, box.end + 1, following.start)
        for box, following in pairwise(boxes)
    ]
    first = len(boxes) - 1
    while first and joined[first - 1]:
        first -= 1
    return boxes[first:]


def _closed_boxes(text: str) -> list[_Box]:
    """All closed boxes, in the order of their ends."""
    boxes, opened = [], list[tuple[int, int] | None]()
    for match in _TOKEN.finditer(text):
        token = match.group()
        if match[1]:
            opened.append((match.start(), match.end()))
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:
            box = opened.pop()
            if box:
                boxes.append(_Box(*box, match.start()))
    return boxes


# ---------------------------------------------------------------------------------------------- the text around a box

_AROUND = 200  # characters read on either side
_SUM = re.compile(r"(?<=.)[-+]|^-|\\(?:pm|mp)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|hbox|mathrm)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|textstyle|q?quad|(?:text)?color\s*\{\w*\}"
    r"|text(?:bf|it|rm|normal)?|math(?:bf|rm|it)|bm|boldsymbol|mbox|underline|emph|large|Large|huge)(?![A-Za-z])"
    r"|\\[,;:! ]|[{}~#`*\"“”]"
)
_TAG = re.compile(r"</?[A-Za-z]+\s*/?>")  # of a prompt's form or of HTML; it ends a formula
_DOLLAR = re.compile(r"(?<!\\)\$\$?")
_EXCLAMATION = re.compile(r"^!+(?=[\s*_.,;:)\"'”’]|$)")  # outside a formula it is no factorial
_BULLET = re.compile(r"((?:^|\n)\s*)- +$")
# Another value right before a box: "5 or \boxed{6}" is a list, as is a text of values only.
_ALTERNATIVE = re.compile(r"(\S*\w\S*),? or(?: [A-Za-z] ?=)?$")
_LISTED = re.compile(r"((?:[^A-Za-z=\n]*\d[^A-Za-z=\n]*)(?:(?:or|and)[^A-Za-z=\n]+)*)(?:,|and)")
_EMPTY = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
# Ends of the formula around a box: delimiters of mathematics, a word, a full stop, another value of an equation.
_BREAK = (
    r"\n|(?<!\\)\$|\\[()\[\]\\]|(?<!\\)&|(?<![<>:!\\])=|[→⇒∴≈,;:]|\.(?!\d)|(?<=[A-Za-z]{2}) [-–—] "
    r"|\\(?:approx|simeq|equiv|(?:Long|long)?[Rr]ightarrow|implies|to|iff|therefore|begin|end|item|tag|q?square|blacksquare"
    r"|checkmark)(?![A-Za-z])"
)
_LAST_BREAK = re.compile(rf"{_BREAK}|(?<![A-Za-z\\])[A-Za-z]{{2}}[A-Za-z'’-]*|(?<=[a-z] )an? |(?<![\w)])\w\)")
_FIRST_BREAK = re.compile(rf"{_BREAK}|(?<![A-Za-z\\])[A-Za-z]{{2}}|(?<=\s)[A-Za-z](?=\s)|\(\s*[A-Za-z]{{2}}")
_MEANS = re.compile(r"[0-9A-Za-z+\-*/^<>\\%$!?_|'±×·÷−√≤≥≠°²³()\[\]¢€£]")
# Words right before a box that deny or change its content.
_TURNED = re.compile(
    r"(?:^|[^A-Za-z])((?:not|maybe|perhaps|possibly|might|could|never|cannot|neither|nor|without|except|[a-z]+n['’]t)"
    r"(?: (?:be|been|equal|equals|to|a|an|the|exactly|always|simply|necessarily|my|our|answer|is))*"
    r"|(?:minus|negative|plus|times|twice|half|double|triple|over|under|above|below|between|about|around|roughly|nearly|almost"
    r"|approximately|exceeds?|(?:least|most|less|more|greater|fewer|smaller|larger|other|up)(?: (?:than|to))?)"
    r"(?: (?:of|or|equal|to|the))*) *$",
    re.IGNORECASE,
)
# Words right after a box that deny or change its content.
_TURNS = re.compile(
    r"(?:(?:is|was|are|would be|seems|looks) )?(?:clearly |obviously |just |definitely |probably )?"
    r"(?:not|wrong|incorrect|false|invalid|impossible|never|no|nope|nah|rejected|excluded|ruled out)(?![A-Za-z])"
    r"|(?:is|was|does|ca|wo)n['’]t(?![A-Za-z])|(?:does not|cannot|fails)(?![A-Za-z])|(?:or|and) ?(?=$|[.,;:]|[-+$\\]?\d)"
    r"|(?:hundred|thousand|[mb]illion|trillion|dozen|times|squared|cubed|per ?cent|halves|thirds|quarters|fourths|fifths|tenths"
    r"|hundredths|thousandths|grand|mln|mio|bn|lakh|crore|or (?:more|less|fewer))(?![A-Za-z])",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"(?:(?:square|cubic|sq|cu)\.? )?[A-Za-z]+(?:\^\d| (?:squared|cubed))?"
    r"(?:(?: per | an? | ?/ ?)[A-Za-z]+(?:\^\d)?)?"
)


def _plain(text: str) -> str:
    return _LAYOUT.sub(" ", _TEXT.sub(r" \1 ", re.sub(r"\\not\s*=", r"\\ne ", _TAG.sub("\n", text))))


def _in_formula(before: str) -> bool:
    """Whether the text before a box leaves a formula open."""
    opened = max(before.rfind("\\("), before.rfind("\\["))
    return opened > max(before.rfind("\\)"), before.rfind("\\]")) or len(_DOLLAR.findall(before)) % 2 == 1


def _before(text: str, answer: str) -> str:
    """The text before a box that belongs to it: the formula since the last word or break, and a denying word."""
    text = _plain(without_boxes(text))
    start = max((match.end() for match in _LAST_BREAK.finditer(text)), default=0)
    formula = re.sub(r"\s+", " ", text[start:]).strip()
    formula = "" if not _MEANS.search(formula) or formula == answer else formula
    words = " ".join(text[:start].replace("$", " ").replace("\\(", " ").split())
    other = _ALTERNATIVE.search(words) or _LISTED.fullmatch(words)
    if other:
        return f"{other[1]} or {formula} "
    turned = _TURNED.search(words)
    return " ".join(filter(None, (turned[1] if turned else "", formula))) + (" " if turned or formula[-1:].isalnum() else "")


def _after(text: str) -> str:
    """The text after a box that belongs to it: the formula up to the next word or break, and a unit or a denial."""
    text = _plain(_EMPTY.sub("", text[: _AROUND + text.count(" ", 0, _AROUND)]))
    end = min((match.start() for match in _FIRST_BREAK.finditer(text)), default=len(text))
    formula = re.sub(r"\s+", " ", text[:end]).strip()
    formula = formula if _MEANS.search(formula) else ""
    rest = re.sub(r"^(?:\s|(?<!\\)\$|\\[)\]])+", "", text[end:])
    clause = " ".join(re.split(r"[.,;:\n]", rest, maxsplit=1)[0].split())
    unit = _UNIT.match(clause)
    if _TURNS.match(clause) or (not clause and re.match(r"[,;:.!\s-]+(?:wrong|incorrect|nope)(?![A-Za-z])", rest)):
        return f"{formula} {clause or rest}"
    if unit and not formula and unit.group() != "in" and is_measure(unit.group()):
        return f" {unit.group()}"
    return formula
