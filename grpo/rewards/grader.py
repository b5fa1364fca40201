r"""Does an answer equal the ground truth?

The answer and the truth are normalised, split into their parts (lists, tuples, intervals, unions, equations), and the parts
compared exactly as fractions wherever both are plain numbers: then nothing else has a say. Words, choice letters,
numbers with a base, times and ratios are compared as they are spelt. Only what is left goes to computer algebra
(:mod:`grpo.rewards.symbolic`, whose text states the limits on time).

Conventions where taste is possible: units count only if both sides state one; ``2\frac{1}{2}`` is a mixed number; a
bare comma list equals a set, in any order; a tuple's order counts; a number in base b equals only the same digits with
the same base.
"""

from __future__ import annotations

import logging
import re

from grpo.errors import UserError
from grpo.rewards.normalise import normalise, unwrap_text
from grpo.rewards.quantity import same_quantity, split_unit
from grpo.rewards.symbolic import Budget, symbolically_equal

MAX_ANSWER_LENGTH = 2000  # characters; above, only an identical answer is equal
_MAX_PARTS = 24
_MAX_LEVELS = 5

_LOG = logging.getLogger(__name__)

_INTEGER = re.compile(r"-?[0-9]{1,300}")
_BASED = re.compile(r"-?[0-9A-Za-z.]+_(\d|\{\d+\})")
_WORD = re.compile(r"[A-Z]|[A-Za-z'-]{4,}|(?=[A-Za-z]*[A-Z])[A-Za-z'-]+|[A-Za-z][A-Za-z'-]*(?: [0-9A-Za-z'-]+)+")
_VARIABLE = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{\w+\}))?(?:\^\{-1\})?(?:\([a-z]\))?")
_EQUALS = re.compile(r"(?<![<>!\\:])=(?!=)")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne|neq|in)(?![A-Za-z])")


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """Whether ``answer`` states the same as ``ground_truth`` (both without ``\\boxed{}``).

    Never raises, whatever the strings hold. Takes microseconds for plain numbers and at most about 5 seconds in the
    main thread; see :mod:`grpo.rewards.symbolic` for other threads. An empty answer equals nothing.
    """
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(ground_truth):
        return int(answer) == int(ground_truth)
    if len(answer) > MAX_ANSWER_LENGTH or len(ground_truth) > MAX_ANSWER_LENGTH:
        return answer.strip() == ground_truth.strip() != ""
    try:
        return _same(normalise(answer), normalise(ground_truth), Budget(), _MAX_LEVELS)
    except Exception:
        # A run of many hours must not end over one odd answer; the log keeps the defect visible.
        _LOG.warning("could not compare %r with %r: counted as wrong", answer, ground_truth, exc_info=True)
        return False


def check_ground_truth(ground_truth: str) -> None:
    """Check that an answer can be compared with this ground truth at all.

    Raises:
        UserError: it is empty, says nothing after normalisation, is too long, or its braces do not match.
    """
    normal = normalise(ground_truth[:MAX_ANSWER_LENGTH])
    if not any(character.isalnum() for character in normal):
        raise UserError(f"the ground truth {ground_truth!r} is empty. Correct it or remove the row.")
    if len(ground_truth) > MAX_ANSWER_LENGTH:
        raise UserError(f"the ground truth has {len(ground_truth)} characters. A short answer is needed; remove the row.")
    bare = re.sub(r"\\.", "", ground_truth)
    if bare.count("{") != bare.count("}"):
        raise UserError(f"the braces of the ground truth {ground_truth!r} do not match. Correct it or remove the row.")


def _same(answer: str, truth: str, budget: Budget, levels: int) -> bool:
    """:func:`is_equivalent` for normalised texts; ``levels`` bounds the nesting of lists in lists."""
    if not answer or not truth or levels == 0:
        return False
    if answer == truth or unwrap_text(answer) == unwrap_text(truth):
        return True
    by_equation = _same_equation(answer, truth, budget, levels)
    if by_equation is not None:
        return by_equation
    by_parts = _same_parts(answer, truth, budget, levels)
    if by_parts is not None:
        return by_parts
    return _same_single(answer, truth, budget)


# ----------------------------------------------------------------------------------------------------------- equations


def _same_equation(answer: str, truth: str, budget: Budget, levels: int) -> bool | None:
    """Decide where one side holds ``=`` (or ``x \\in``) outside lists; None where neither does."""
    name, answer_sides = _sides(answer)
    true_name, true_sides = _sides(truth)
    if len(true_sides) > 1:
        first = true_sides[0]
        if all(same_quantity(*split_unit(first), *split_unit(side)) for side in true_sides[1:]):
            true_sides = [first]  # A chain such as 0.56 = 56\%: any of its sides may be answered.
    if (name, len(answer_sides)) == ("", 1) and (true_name, len(true_sides)) == ("", 1) and true_sides[0] == truth:
        return None
    if name and true_name and name != true_name:
        # y = 3 does not answer x = 3; only an equation like x = 2y may be meant as y = x/2.
        return _is_relation_of_names(answer, truth) and symbolically_equal(answer, truth, budget)
    if len(true_sides) > 1:
        return len(answer_sides) > 1 and symbolically_equal(answer, truth, budget)
    # Every side must be right: of 7 = 8, neither 7 nor 8 may be picked.
    return len(answer_sides) <= 4 and all(_same(side, true_sides[0], budget, levels - 1) for side in answer_sides)


def _sides(text: str) -> tuple[str, list[str]]:
    """``x = a = b`` as ("x", ["a", "b"]); without a leading variable the name is empty."""
    if len(_top_level(text, ",;")) > 1 and len(_EQUALS.findall(text)) > 1:
        return "", [text]
    member = re.fullmatch(r"([A-Za-z])\\in(?![A-Za-z])\s*(.+)", text)
    if member:
        return member[1], [member[2]]
    if _RELATION.search(text):
        return "", [text]
    sides = [side.strip() for side in _EQUALS.split(text)]
    name = ""
    while len(sides) > 1 and _VARIABLE.fullmatch(sides[0]):
        name = name or sides[0]
        sides = sides[1:]
    return name, sides


def _is_relation_of_names(answer: str, truth: str) -> bool:
    return all(re.search(r"[A-Za-z]", text.partition("=")[2]) for text in (answer, truth))


# --------------------------------------------------------------------------------------------------------------- parts


def _same_parts(answer: str, truth: str, budget: Budget, levels: int) -> bool | None:
    """Compare lists, sets, tuples, intervals and unions part by part; None where neither side is one."""
    kind, parts = _parts(answer)
    true_kind, true_parts = _parts(truth)
    if not kind and not true_kind:
        if parts != [answer] or true_parts != [truth]:  # brackets around a single value
            return _same(parts[0], true_parts[0], budget, levels - 1)
        return None
    if kind != true_kind:
        # An interval may be answered as an inequality. Nothing else changes its kind.
        if _RELATION.search(answer) or _RELATION.search(truth):
            return symbolically_equal(answer, truth, budget)
        return False
    if len(parts) != len(true_parts) or len(parts) > _MAX_PARTS:
        return False
    if kind not in {"set", "union"}:
        return all(_same(a, t, budget, levels - 1) for a, t in zip(parts, true_parts, strict=True))
    return _same_in_any_order(parts, true_parts, budget, levels)


def _same_in_any_order(parts: list[str], true_parts: list[str], budget: Budget, levels: int) -> bool:
    left = list(true_parts)
    for part in sorted(parts, key=lambda part: part not in true_parts):  # identical ones first
        match = part if part in left else next((t for t in left if _same(part, t, budget, levels - 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _parts(text: str) -> tuple[str, list[str]]:
    r"""Kind and elements: "set" (``{a,b}``, or bare ``a,b``), "union", the two brackets of a tuple or interval, or ""."""
    united = _top_level(text, "\\cup")
    if len(united) > 1:
        return "union", united
    listed = _top_level(text, ",;")
    if len(listed) > 1:
        return "set", [element for part in listed for element in _plus_and_minus(part)]
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set", [element for part in _top_level(text[2:-2], ",;") for element in _plus_and_minus(part)]
    if text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        inner = _top_level(text[1:-1], ",;")
        if len(inner) > 1:
            return text[0] + text[-1], inner
        if text[0] == "(" and text[-1] == ")" and inner[0]:
            return "", inner
    both = _plus_and_minus(text)
    return ("set", both) if len(both) > 1 else ("", [text])


def _plus_and_minus(text: str) -> list[str]:
    r"""``a \pm b`` as its two values."""
    pieces = re.split(r"\\pm(?![A-Za-z])\s*", text)
    if len(pieces) != 2:
        return [text]
    return [pieces[0] + ("+" if pieces[0] else "") + pieces[1], pieces[0] + "-" + pieces[1]]


def _top_level(text: str, separators: str) -> list[str]:
    """Split at any of the characters ``separators``, or at the command ``\\cup``, outside all brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        character = text[i]
        if depth == 0 and separators == "\\cup" and text.startswith("\\cup", i):
            parts.append(text[start:i].strip())
            start = i = i + 4
            continue
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and separators != "\\cup" and character in separators:
            parts.append(text[start:i].strip())
            start = i + 1
        i += 1
    return [*parts, text[start:].strip()]


def _closes_at_end(text: str) -> bool:
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


# -------------------------------------------------------------------------------------------------------- single values


def _same_single(answer: str, truth: str, budget: Budget) -> bool:
    """Compare two answers that are no lists and no equations."""
    body, unit = split_unit(answer)
    true_body, true_unit = split_unit(truth)
    by_value = same_quantity(body, unit, true_body, true_unit)
    if by_value is not None:
        return by_value
    if unit and true_unit and unit != true_unit:
        return False
    body, true_body = unwrap_text(body), unwrap_text(true_body)
    if body == true_body:
        return True
    if "%" in (unit, true_unit) and unit != true_unit:
        return False
    if _is_spelt(body) or _is_spelt(true_body):
        return len(body) > 1 and _WORD.fullmatch(body) is not None and body.casefold() == true_body.casefold()
    return symbolically_equal(body, true_body, budget)


def _is_spelt(text: str) -> bool:
    """Whether only the spelling counts: words, choice letters, times and ratios, numbers in a base."""
    return ":" in text or _WORD.fullmatch(text) is not None or _BASED.fullmatch(text) is not None
