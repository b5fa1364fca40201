r"""Families of values over whole numbers, ``\frac{\pi}{4} + k\pi, k \in \mathbb{Z}``, and residues such as ``3 \pmod{7}``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo.grader.numeric import number, same_value
from grpo.grader.split import split_at, split_equations
from grpo.grader.values import Effort

_INTEGERS = r"(?:\\mathbb\{Z\}|\\text\{Z\}|Z)"
_DECLARED = re.compile(
    r"(?:[,; (|:]|\\mid){0,4}(?:(?:for|where|with|and|\\forall)(?: all| any| each| every| some)? ?)?(?:"
    rf"(?P<a>[a-z])\\in(?![A-Za-z]) ?{_INTEGERS}|(?P<b>[a-z])(?: is)?(?: an| any)? integer|(?:an )?integers? (?P<c>[a-z]))\)?$"
)
_NUMBERS = r"(?:(?:positive |negative |non-?negative |real |natural |rational |whole )*(?:integers?|numbers?|reals?) )?"
# Behind a formula, the range of a letter that says no more than the formula: "for all x", "where C is a constant", (n >= 1).
_RANGE = re.compile(
    rf"[,;(: ]*(?:(?:for (?:all|any|every|each)|\\forall) ?{_NUMBERS}(?P<a>[A-Za-z])(?: ?\\in ?\S+|\\ge ?[0-2]|> ?0)?"
    r"|(?:(?:where|with|for|and) )?(?:some |any |an? )?(?:arbitrary |real )*(?:constant )?(?P<b>[A-Za-z])(?: (?:is|are))?"
    r"(?: an?| any| some)?(?: arbitrary| real)*(?<=[a-z]) (?:constant|number)"
    r"|(?:(?:where|with|for) )?(?:some |any |an? )?(?:arbitrary |real )*constant (?P<e>[A-Za-z])"
    r"|(?:(?:for|where|with) )?(?:(?P<c>[nkmij])(?:\\ge ?[0-2]|> ?0)"
    r"|(?P<d>[A-Za-z])\\in ?\\mathbb\{[NRC]\}(?:[\^_](?:\{\S+\}|\S))?))\)?"
)
_RESIDUE = re.compile(
    r"(?:(?P<name>[a-z])(?:\\equiv(?![A-Za-z]) ?|≡|=))?(?P<body>(?:\\pm ?|-)?[0-9]+(?:,-?[0-9]+)*) ?"
    r"(?:\\pmod|\(? ?(?:\\bmod|\\mod|\\text\{mod\}|mod)) ?\{?(?P<modulus>[0-9]+)\}?\)?"
)
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_LONGEST_RANGE = 80  # characters
_RANGE_START = re.compile(r"[,;(: ]|\\forall")
_TEXT = re.compile(
    r"\\text\{((?:(?:for|where|with|and|is|are|an?|any|all|each|every|some|integers?|real|constants?|arbitrary|numbers?|positive"
    r"|non-?negative|natural|rational|whole)?[, ]*)+)\}"
)
_SPACES = re.compile(" +")
_LOOSE = re.compile(r"(?<![A-Za-z]) | (?![A-Za-z])")
_USUAL = frozenset("nkm")
_TURN = re.compile(r"[nkm] ?\\pi(?![A-Za-z])|(?:\\pi|degree\}) ?[nkm](?![A-Za-z])|[nkm]\\cdot ?\d+\\text\{degree")
_BUILT = re.compile(r"\\\{(?:[a-z](?:\||:|\\mid(?![A-Za-z])) ?)?(.+?(?:Z\}?|integers?))\\\}")
_MAX_CLASSES = 24
_AT = (0, 1, 2, 7)


@dataclass(frozen=True)
class Family:
    """The values of ``body`` (a list) for all whole numbers ``letter``; ``modulus`` is not 0 for a class of residues."""

    name: str
    body: str
    letter: str
    modulus: int = 0

    def with_letter(self, letter: str) -> str:
        return replaced(self.body, self.letter, letter)

    def stands_for(self, text: str) -> bool | None:
        r"""Whether ``text`` is the remainder of ``3 \pmod{7}``; None if this is not such a residue."""
        remainder = re.fullmatch(r"([0-9]+)\+[0-9]+k", self.body)
        if not self.modulus or self.name or not remainder:
            return None
        return int(remainder[1]) < self.modulus and text.lstrip("0") == remainder[1].lstrip("0")


def declared_family(text: str) -> Family | None:
    """The family that a normalised text declares, or None."""
    text = _LOOSE.sub("", _spaced(text)) if "\\text" in text else text
    residue = _RESIDUE.fullmatch(text) if "mod" in text else None
    if residue and int(residue["modulus"]) > 0:
        body = ",".join(f"{value}+{residue['modulus']}k" for value in residue["body"].split(","))
        return Family(residue["name"] or "", body, "k", int(residue["modulus"]))
    built = _BUILT.fullmatch(text)
    text = built[1] if built else text
    declared = _DECLARED.search(text) if "Z" in text or "integer" in text else None
    if not declared:
        return None
    letter = declared["a"] or declared["b"] or declared["c"]
    name, body = without_name(",".join(split_at(text[: declared.start()], "\\lor")))
    return Family(name, body, letter) if letter in letters_of(body) else None


def without_range(text: str) -> str:
    r"""A normalised text without the range of a letter behind it, such as ``\text{for all }x\in\mathbb{R}``."""
    plain = _spaced(text)
    for start in _RANGE_START.finditer(plain, max(0, len(plain) - _LONGEST_RANGE)):
        match = _RANGE.fullmatch(plain, start.start())
        if match:
            body = plain[: start.start()].rstrip(" ,;")
            return body if set(filter(None, match.groups())) <= letters_of(body) else text
    return text


def _spaced(text: str) -> str:
    r"""A text with the words of ``\text{where}`` between spaces."""
    return _SPACES.sub(" ", _TEXT.sub(r" \1 ", text)).strip() if "\\text" in text else text


def possible_family(text: str, letters: frozenset[str]) -> Family | None:
    """Read ``text`` as a family over its only letter among ``letters``; None if it has none or several."""
    name, body = without_name(text)
    found = letters_of(body) & letters - {name}
    return Family(name, body, found.pop()) if len(found) == 1 else None


def renamed(answer: str, truth: str) -> str | None:
    r"""Rename the letter of ``\frac{\pi}{4} + k\pi`` to that of ``\frac{\pi}{4} + n\pi``; None if they differ otherwise."""
    turns = all("\\pi" in text or "degree" in text for text in (answer, truth))
    if not turns or not (_TURN.search(answer) and _TURN.search(truth)):
        return None
    one, other = possible_family(answer, _USUAL), possible_family(truth, _USUAL)
    if one is None or other is None or one.letter == other.letter:
        return None
    return replaced(answer, one.letter, other.letter)


def letters_of(text: str) -> set[str]:
    """Letters of a text that are not part of a command."""
    return {token for token in _TOKEN.findall(text) if len(token) == 1}


def same_values(left: list[str], right: list[str], letter: str, effort: Effort) -> bool:
    """Whether two lists of expressions linear in ``letter`` have the same set of values for all whole numbers."""
    steps = [_step(body, letter, effort) for body in [*left, *right]]
    sizes = [abs(number(step, effort) or 0) if step else 0 for step in steps]
    if not all(sizes):
        return False
    largest = steps[sizes.index(max(sizes))]
    classes: list[list[str]] = [[], []]
    for place, (body, step) in enumerate(zip([*left, *right], steps, strict=True)):
        times = round(max(sizes) / sizes[place])
        if times > _MAX_CLASSES or not any(same_value(f"{sign}({times})({step})", largest, effort) for sign in ("", "-")):
            return False
        start = replaced(body, letter, "(0)")
        classes[place >= len(left)] += [f"({start})+({part})({step})" for part in range(times)]
    first, rest = classes
    if not len(first) == len(rest) <= _MAX_CLASSES:
        return False
    for one in first:
        match = next((other for other in rest if _is_multiple(f"({one})-({other})", largest, effort)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _is_multiple(difference: str, step: str, effort: Effort) -> bool:
    """Whether ``difference`` is a whole multiple of ``step``."""
    size, step_size = number(difference, effort), number(step, effort)
    if size is None or step_size is None:
        return False
    return same_value(difference, f"({round(size / step_size)})({step})", effort) is True


def _step(body: str, letter: str, effort: Effort) -> str:
    """The increase of ``body`` from one whole number to the next; empty if it is not linear."""
    start, following, *later = (replaced(body, letter, f"({value})") for value in _AT)
    step = f"({following})-({start})"
    is_linear = all(
        same_value(value, f"({start})+({place})({step})", effort) for place, value in zip(_AT[2:], later, strict=True)
    )
    return f"({step})" if is_linear else ""


def without_name(text: str) -> tuple[str, str]:
    sides = split_equations(text)
    return (sides[0], sides[1]) if len(sides) == 2 and re.fullmatch(r"\\?[A-Za-z]+", sides[0]) else ("", text)


def replaced(text: str, letter: str, value: str) -> str:
    """Replace each ``letter`` that is not part of a command by ``value``."""
    return _TOKEN.sub(lambda match: value if match[0] == letter else match[0], text)
