r"""Reading of work in an answer: chains of equalities, conclusions after steps, captions.

Shown work must not make an answer right that concludes something else. So a chain counts only if all its sides that can be
computed agree. A conclusion counts only if the steps before it do not deny, doubt or contradict it. A caption counts only if
its words cannot change the value after it.
"""

from __future__ import annotations

import re

from grpo.grader.expression import is_constant, parse, variables
from grpo.grader.normalise import normalise
from grpo.grader.numeric import same_value
from grpo.grader.quantity import split_unit
from grpo.grader.split import split_equations
from grpo.grader.values import Effort
from grpo.grader.words import ANSWERS, HEDGES, WORDS, alters, hedges, opened, sentence_value, without_tail, words_of

_MAX_LENGTH = 1000
_MAX_EQUALITIES = 40

# --------------------------------------------------------------------------------------------------- sides of a chain

_TIMES = re.compile(r"(?:(?<=\d) ?[xX] ?|(?<=[A-Za-z}]) [xX] )(?=\\?\$?\d)")
_OF = re.compile(r"(?:(?<=[}%])|(?<=/\d)|(?<=/\d\d)|(?<=/\d{3})) ?of ?(?=\\?\$?\d)")
_OPERATOR = re.compile(r"[-+*/]|\\(?:times|cdot|div)(?![A-Za-z])")
_UNIT = r"(?: ?\\text\{[^{}]*\}| [A-Za-z]{2}[A-Za-z ]*(?![A-Za-z]))?"
_TERM = re.compile(rf"(?<![\w.\\{{_^$])(?:\\?\$)?\d+(?:[.,]\d+)*(?:\\%)?{_UNIT}")
_LETTERS_ONLY = re.compile(r"(?:[A-Za-z ()+*/-]|\\(?:text|times|cdot|frac)(?![A-Za-z])|[{}])+")


def arithmetic(side: str) -> str:
    r"""Convert a side (normalised) of a chain to plain arithmetic: ``7x 4`` to a product, ``2 hours*30 mph`` to numbers.

    Unchanged if there is nothing to compute, or if the terms of a sum have different units.
    """
    plain = _OF.sub("*", _TIMES.sub(r"*", side))
    if not _OPERATOR.search(plain[1:]):
        return side
    units = set()

    def without_unit(term: re.Match[str]) -> str:
        body, unit = split_unit(term.group())
        if unit == "%":
            return f"({body}/100)" if "+" not in plain and "-" not in plain else term.group()
        units.add(unit)
        return body

    plain = _TERM.sub(without_unit, plain)
    return plain if len(units - {""}) < 2 or not re.search(r"[+-]", plain) else side


def is_formula(side: str, name: str, effort: Effort) -> bool:
    """Whether a side (normalised) of ``name = side = value`` has no numeric value: ``bh`` or ``length*width``."""
    if any(hedges(word) for word in words_of(opened(side)) if word not in WORDS["arithmetic"]):
        return False
    tree = parse(side)
    if tree is None:
        return _LETTERS_ONLY.fullmatch(side) is not None
    letters = {variable[0] for variable in variables(tree)}
    if not letters or not letters.isdisjoint(name):
        return False
    renamed = re.sub(r"\\[A-Za-z]+|[A-Za-z]", lambda match: "q" if match[0] in letters else match[0], side)
    return same_value(side, renamed, effort) is not True or letters == {"q"}  # 7 + 0z is a number


# ------------------------------------------------------------------------------------------------------- conclusions

_MARK = re.compile(
    r"(?:^|(?<=[.,;:!$] )|(?<= )|(?<=[.,;:]))(?:and |which |this |that )?"
    r"(?:(?:hence|thus|therefore|so(?: that)?|consequently|it follows that|we (?:get|obtain|find|conclude|have)(?: that)?|"
    r"(?:gives|yields|means)(?: that)?|giving)[,:]? (?:we (?:get|obtain|find|have) )?"
    r"|(?<=[.;:!] )(?=(?:(?:the|my|our) )?(?:final |correct )?(?:answer|ans)\b))",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\$?(?:\\?[A-Za-z]|[A-Z]{2}|\\angle ?[A-Z]{1,3})(?:_\w|_\{\w+\}|\([A-Za-z]\))? ?= ?.+")
_CHAIN = re.compile(r"((?:[A-Za-z][A-Za-z'’,-]* )*)([\d($\\][^=]*=.*)")
_SENTENCE_END = re.compile(r"[.;!?]\s")
_STEP = re.compile(r"[,;:$]|\.(?=\s|$)|(?<![\\A-Za-z{])[A-Za-z]{2,}(?![A-Za-z{(])")
_DENIALS = ANSWERS | HEDGES - WORDS["in steps"]


def conclusion(text: str, effort: Effort) -> str | None:
    """The statement at the end of a text after steps of work (``2n = 82, hence n = 41``), or None.

    None if the steps have a word that denies or doubts, state another answer, have different sides of an equality, or give the
    same name another value.
    """
    if len(text) > _MAX_LENGTH or "?" in text or not re.search(r"[A-Za-z]{2}", text):
        return None
    text = re.sub(r"\\[()\[\]]", "$", " ".join(text.replace("**", "").split())).rstrip(" .")
    marks = list(_MARK.finditer(text))
    start, end = marks[-1].span() if marks else (0, 0)
    work, clause = text[:start], text[end:].strip()
    if not clause or _SENTENCE_END.search(clause) or not HEDGES.isdisjoint({*words_of(clause)} - {"or", "no"}):
        return None
    denials = _DENIALS
    if text[start:].strip()[0].isupper() and not ANSWERS.isdisjoint(words_of(clause)):
        denials = denials - WORDS["conditions"]  # "So the answer is 5" decides conditions of earlier sentences.
    if not denials.isdisjoint(words_of(opened(work))):
        return None
    stated = _stated(clause, bool(work))
    return stated if stated is not None and not _contradicts(work, stated, effort) else None


def _stated(clause: str, concludes: bool) -> str | None:
    if _NAMED.fullmatch(clause):
        return clause if concludes else None
    chain = _CHAIN.fullmatch(clause)
    if chain:
        lead = words_of(chain[1])
        if not any(alters(word) for word in lead) and WORDS["makes another"].isdisjoint(lead[-3:]):
            return without_tail(chain[2])
    if not concludes:
        return None
    value = sentence_value(clause)
    if value is None and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2}", clause):
        return clause
    return value


def _contradicts(work: str, stated: str, effort: Effort) -> bool:
    """Whether sides of an equality among the steps differ from each other, or from the stated value of the same name."""
    name, *values = split_equations(normalise(stated))
    if not values:
        name, values = "", [name]
    steps = [step for step in _STEP.split(re.sub(r"\$(?=\d)|(?<=\d),(?=\d{3}(?!\d))", "", work)) if "=" in step]
    if len(steps) > _MAX_EQUALITIES:
        return True
    for step in steps:
        sides = [arithmetic(side) for side in split_equations(normalise(step))]
        known = [values[-1]] if name and sides[0] == name else []
        known += [side for side in sides if is_constant(side)]
        if any(same_value(side, known[0], effort) is False for side in known[1:] if is_constant(known[0])):
            return True
    return bool(name) and any(
        normalise(number) != values[-1] for number in re.findall(rf"(?<![A-Za-z\\]){re.escape(name)}\$? is \$?([\d.]+)", work)
    )


# ---------------------------------------------------------------------------------------------------------- captions

_MATRIX = r"\\begin\{(?P<kind>[a-z]+matrix|matrix|array)\}(?:(?!\\begin).)+\\end\{(?P=kind)\}"
_DISPLAY = rf"\$\$(?:(?!\$\$).)+\$\$|\\\[(?:(?!\\\[|\\\]).)+\\\]|{_MATRIX}"
_CAPTION = re.compile(rf"(?P<caption>[A-Za-z][A-Za-z ]*?) ?[:.]? ?(?:(?P<display>{_DISPLAY})|(?P<value>[\d($\\].*))\.?")


def captioned(text: str) -> str | None:
    """The text after "Answer", or displayed after a caption such as "The inverse matrix"; None without a caption."""
    if len(text) > _MAX_LENGTH or not text[:12].lstrip("#*_ \n")[:1].isalpha():
        return None
    match = _CAPTION.fullmatch(re.sub(r"^#+ ", "", " ".join(text.replace("**", " ").split())))
    if not match:
        return None
    words = match["caption"].lower().split()
    if not ANSWERS.isdisjoint(words):
        return (match["display"] or match["value"]) if set(words) <= ANSWERS | WORDS["beside answers"] else None
    if words[-1] in {"matrix", "vector"}:
        words = [word for word in words if word not in WORDS["of matrices"]]
    return match["display"] if WORDS["subjects"].issuperset(words) else None
