r"""Reading of answers in words: sentences of a closed grammar, choice letters, names, times, numbers with a base.

A sentence is read only if all of it fits one of these forms, with the words of words.toml; V is the value:

- ``The answer is V``, ``Final answer: V``, ``The area of the triangle is V``, ``x is V``, ``V is the answer``;
- ``There are V``, ``We get V``; ``Natalia sold V``, ``She needs to pay V in the shop``, ``Each child gets V``;
- ``Answer $V$``, ``The inverse matrix: $V$``;
- any of these after "So" or "Therefore,", before "in total", "each" or "in April", or before "I hope it is correct."
- ``Alice wins``, ``Alice has a winning strategy``; ``Yes, it is``, ``Yes, because ...``.

V must be mathematics, a quantity (:mod:`grpo.grader.quantity`), or the words of the truth. Nothing else is dropped.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo.grader.normalise import without_markup

LISTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
WORDS: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in LISTS.items() if isinstance(words, str)}
NUMBERS = {word: value for value, word in enumerate(LISTS["small numbers"].split())}
NUMBERS |= {word: value for value, word in zip(range(20, 100, 10), LISTS["tens"].split(), strict=True)}
_LARGE: dict[str, int] = LISTS["large numbers"]
_DENOMINATORS: dict[str, int] = LISTS["denominators"]
_SPECIAL = {"half": Fraction(1, 2), "a half": Fraction(1, 2), "a dozen": Fraction(12), "half a dozen": Fraction(6)}
_BEGINNINGS = {word[:3] for word in (*NUMBERS, "half", "minus", "negative")} | {f"a {letter}" for letter in "htqmd"}
_DIGIT, _TENS = (
    "|".join(word for word, value in NUMBERS.items() if value in values) for values in (range(1, 10), range(20, 100))
)
_BELOW_100 = rf"(?:(?:{_TENS}) (?:{_DIGIT})|(?:{'|'.join(NUMBERS)}))"
_BELOW_1000 = rf"(?:{_BELOW_100} hundred(?: (?:and )?{_BELOW_100})?|{_BELOW_100})"
_SCALES = "".join(rf"(?:{_BELOW_1000} {scale} ?)?" for scale in reversed([*_LARGE][1:]))
_WHOLE = re.compile(rf"(?!and ){_SCALES}(?:(?:and )?{_BELOW_1000})?(?<! )")


def number_word(text: str) -> str | None:
    """Convert ``twelve``, ``minus one hundred twenty-five``, ``two and a half`` or ``three quarters`` to digits, else None."""
    if text[:3].lower() not in _BEGINNINGS:
        return None
    words = [word for word in re.split(r"[\s-]+", text.strip().lower()) if word]
    sign = "-" if words and words[0] in {"minus", "negative"} else ""
    value = _read_number(words[1:] if sign else words)
    return None if value is None else sign + str(value)


def spelt_out(text: str) -> str | None:
    """Convert the number of ``Twelve apples`` or ``two and a half hours`` to digits; None if the text begins otherwise."""
    if text[:3].lower() not in _BEGINNINGS:
        return None
    words = text.strip().split()
    for count in range(min(len(words), 12), 0, -1):
        number = number_word(" ".join(words[:count]).rstrip(".,;!"))
        if number is not None:
            rest = words[count:]
            if rest[:2] in (["of", "a"], ["of", "an"]):
                rest = rest[2:]  # three quarters of an hour
            return " ".join([number, *rest])
    return None


def _read_number(words: list[str]) -> Fraction | None:
    """The value of number words: whole ones, fractions, and both joined by "and"."""
    if " ".join(words) in _SPECIAL:
        return _SPECIAL[" ".join(words)]
    if "and" in words:
        place = len(words) - 1 - words[::-1].index("and")
        fraction = _read_fraction(words[place + 1 :])
        if fraction is not None:
            whole = _read_whole(words[:place])
            return None if whole is None or fraction >= 1 else whole + fraction
    fraction, whole = _read_fraction(words), _read_whole(words)
    return fraction if fraction is not None or whole is None else Fraction(whole)


def _read_fraction(words: list[str]) -> Fraction | None:
    """Read ``two thirds`` or ``a half``; not "ten thousandths", which is ambiguous."""
    lower = _DENOMINATORS.get(words[-1].removesuffix("s")) if words else None
    upper = 1 if words[:-1] in (["a"], ["an"]) else _read_whole(words[:-1])
    if not upper or not lower or (lower >= 100 and (upper >= 100 or upper == 10)):
        return None
    return Fraction(upper, lower) if (upper == 1) != words[-1].endswith("s") else None


def _read_whole(words: list[str]) -> int | None:
    """Read ``one hundred and twenty five thousand``; None if the words are not a whole number."""
    if len(words) > 1 and words[0] == "a":
        words = ["one", *words[1:]]
    if not words or not _WHOLE.fullmatch(" ".join(words)):
        return None
    total = group = 0
    for word in words:
        if word == "hundred":
            group *= 100
        elif word in _LARGE:
            total, group = total + group * _LARGE[word], 0
        elif word != "and":
            group += NUMBERS[word]
    return total + group


ANSWERS = WORDS["answers"]
NAMES = WORDS["subjects"] | ANSWERS
_SHORT_NAME = re.compile("[A-Z][aeiou][a-z]")
_DO, _DOES = ("|".join(sorted(WORDS[name])) for name in ("to do", "does"))
_DEED = rf"(?:(?:{LISTS['modals']}) (?:{_DO})|{_DOES})(?: (?:for|at))?|(?:is|will be)(?= \d+ years)"
_LINK = re.compile(
    rf"(?:(?<![A-Za-z\\])(?:(?P<we>there (?:is|are)|we (?:get|have|find))|(?P<deed>{_DEED})|{LISTS['verbs']})"
    r"(?![A-Za-z'\-])\s*:?(?: ?(?:exactly|only|a total of) )?|(?<=[A-Za-z$)*]):(?=\s|\*|\$|\\)"
    r"|(?P<equals>(?<=[A-Za-z]) ?=(?!=)))\s*",
    re.IGNORECASE,
)
_IS_THE_ANSWER = re.compile(r"(.+?) is (?:the|our|my) (?:(?:final|correct|right) )?(?:answer|solution|result)", re.IGNORECASE)
_BOLD = re.compile(r"(?<![\w)}*])(?:\*\*|__)(?=[^\s*])([^*]+?)(?:\*\*|__)(?![\w*])")
_HEADING = re.compile(r"^#{1,6} +")
_OPENING = re.compile(
    r"(?:(?:thus|therefore|hence|so|then|finally|consequently|in total|in all|altogether|together|overall),? )+", re.IGNORECASE
)
_HOPE = re.compile(r"[.,;]? (?:and )?I hope (?:it|this|that) is (?:correct|right)[.!]?$")
_TAIL = re.compile(
    r"(?<=[\w$}%*])(?:,? (?:altogether|in total|in all|overall|total|(?:are )?left|old|each|every [a-z]+"
    r"|of (?:them|these|those)|to do it|(?:in|on) (?:[A-Z][a-z]+(?: and [A-Z][a-z]+)?|\d{4})))+[.!]?$"
)
# Where what is counted is: "in the bowl".
_PLACE = re.compile(r"(\d[ \w]* [a-z]+s) (?:in|on|for) (?:the|his|her|their) [a-z]+(?: [a-z]+)?[.!]?$")
_BEFORE_NOUNS = frozenset(("of", "total", "such", "possible", "ordered", "distinct", "different"))
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\{([^{}]*)\}")
_DOER = re.compile(
    r"(?!(?:Nobody|None|Neither|Nothing|No|Not)\b)"
    r"(?:(?:[Tt]he |[A-Z][a-z]+ ){0,2}(?:[A-Z][a-z]+|[Hh]e|[Ss]he|[Ii]t|[Tt]hey|[Ww]e|I)"
    r"|(?:[Tt]he|[Ee]ach|[Ee]very|[Hh]is|[Hh]er|[Tt]heir) [a-z]+)"
)
_SYMBOL = re.compile(r"\$?\\?[A-Za-z](?:\([A-Za-z]\))?\$?|\$[A-Za-z+\-*/^(){} =\\]*\$")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$\$")
_CAPTION = re.compile(r"(?P<caption>[A-Za-z][A-Za-z ]*?) ?[:.]? ?(?:(?P<display>\$.+|\\begin\{.+)|(?P<value>[\d(\\].*))\.?")

_CHOICE = re.compile(r"\(?([A-J])[).:]\s*(.+)|(?:[Oo]ption|[Cc]hoice)\s*\(?([A-J])\)?[.:]?()", re.DOTALL)
_NO_MEANING = re.compile(
    r"[,;/&)(]|.*(?<![A-Za-z\\])(?:[A-J](?![A-Za-z0-9^_+*-])|(?i:is|isn't|and|or|not|no|but|cannot|can't|wrong|maybe)\b)",
    re.DOTALL,
)
_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?\s*(?:\\text\{)?\s*(?:([ap])\.?\s*m\.?|(o['’]?clock))?\}?", re.IGNORECASE)
_TIMES = {"noon": (0, 0, "p"), "12noon": (0, 0, "p"), "midnight": (0, 0, "a"), "12midnight": (0, 0, "a")}
RATIO = re.compile(r"\d+(?::\d+)+")
_RATIO_IN_WORDS = re.compile(r"(\d+) to (\d+)(?: to (\d+))?")
_FRACTION = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)")
# "7 (seven) apples" and "seven (7)"
_PARENTHESIS = re.compile(r"(?P<digits>[\d.,/]*\d) ?\((?P<word>[A-Za-z][A-Za-z -]*)\)(?P<behind>(?: [A-Za-z]+){0,3})")
_DIGITS_BEHIND = re.compile(r"(?P<word>[A-Za-z -]+) \((?P<digits>\d+)\)(?P<behind>)")
_POINTED = re.compile(
    r"(?:at |(?:at )?(?:the )?(?:point|ordered pair|ordered triple|pair|vector|interval|set)s? )(\\?[$(\[{].*)", re.IGNORECASE
)
# A remark behind the value, which is compared: "(about 18.9 cards)", "(= 3.5)".
_REMARK = re.compile(r"(.+?) ?\((?:(about|approximately|approx\.?|roughly|≈|\\approx)|(?:i\.e\.,?|or|=)) ?([^()]+)\)")
_MIXED = re.compile(r"(\d+) and (\d+/\d+)")
_YES_OR_NO = re.compile(
    r"(?:(yes|true)|(no|false))(?:[,.!;:] (?:it|he|she|they|this|that|we|you) (?:is|are|does|do|can|will|has|have)"
    r"(?(2) not|)(?: (?:so|possible))?|(?:[,.;]? (?:because|since) (?!.*(?<![a-z])(?:yes|no|but)(?![a-z])).*)?)[.!]?",
    re.IGNORECASE,
)  # fmt: skip
_BASED = re.compile(
    r"\(?(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\)?(?:_\{?\(?(-?[0-9]+|[a-z]+)\)?\}?|,?\(?base[ -]?\{?([0-9]+|[a-z]+)\}?\)?)"
)
_ARTICLE = re.compile(r"(?:the|an?)\s+", re.IGNORECASE)
_SYNONYMS: dict[str, str] = {spelling: group[0] for group in LISTS["synonyms"] for spelling in group}


def sentence_value(text: str) -> str | None:
    """The value that a sentence states; None if ``text`` is not a sentence of the grammar."""
    if len(text) > 400 or "?" in text or not re.search(r"[A-Za-z]{2}", text):
        return None
    whole = _DELIMITERS.sub("$", _HEADING.sub("", _BOLD.sub(r"\1", " ".join(text.split()))).strip())
    text = _HOPE.sub("", whole)
    text = text[opening.end() :] if (opening := _OPENING.match(text)) else text
    text = _TAIL.sub("", text).replace("$ such ", "$ ") if any(map(str.isdigit, text)) else text
    plain = opened(text)
    for link in _LINK.finditer(plain):
        lead = plain[: link.start()].strip(" *")
        if link["equals"] and _SYMBOL.fullmatch(lead):
            break  # an equation, in which the name counts
        value, before = plain[link.end() :].strip(" ."), plain[: link.start()]
        amount = link["deed"] is None or not value[:1].isalpha() or spelt_out(value)
        in_math = before.count("$") % 2 or before.count("{") != before.count("}")
        if value and amount and not in_math and _is_lead(lead, link):
            rest = text[link.end() :] if text[link.end() :].count("{") == text[link.end() :].count("}") else plain[link.end() :]
            rest = _PLACE.sub(r"\1", rest) if link["deed"] or link["we"] else rest
            rest = sentence_value(rest) or rest.rstrip(" .").strip()
            return f"{lead}={rest}" if _SYMBOL.fullmatch(lead) else rest
    if caption := _CAPTION.fullmatch(text):
        words = {*caption["caption"].lower().split()}
        if words & ANSWERS and words <= ANSWERS | WORDS["beside answers"]:
            return caption["value"] or caption["display"]
        if caption["display"] and words <= WORDS["subjects"] | WORDS["of matrices"]:
            return caption["display"]
    return text if text != whole else None


def opened(text: str) -> str:
    r"""Replace ``\text{...}`` by its content and spaces, so that all characters keep their positions."""
    return _TEXT.sub(lambda match: match[1].rjust(len(match.group()) - 1) + " ", text)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without commands."""
    return [word.lower() for word in re.findall(r"[A-Za-z'’-]+", re.sub(r"\\[A-Za-z]+", " ", text))]


def _is_lead(lead: str, link: re.Match[str]) -> bool:
    """Whether the words before the verb name a value, or who does something with one."""
    if link["we"] or link["deed"]:
        return not lead if link["we"] else _DOER.fullmatch(lead) is not None and ANSWERS.isdisjoint(words_of(lead))
    words = [word.strip(",.:;*") for word in re.findall(r"\$[^$]*\$[,.]?|\S+", lead)]
    plain = [word.lower() for word in words]
    if ANSWERS.intersection(plain):
        return set(plain) <= ANSWERS | WORDS["beside answers"]
    # The square of a number is none of these, and "number of apples" is.
    counted = {after for before, after in pairwise(plain) if before in _BEFORE_NOUNS and is_noun(after)}
    names = all(word in NAMES or word in counted or _SYMBOL.fullmatch(one) for word, one in zip(plain, words, strict=True))
    return bool(words) and names and not re.search(r"(?:square|cube) of", " ".join(plain))


def is_word(run: str) -> bool:
    """Whether a run of letters is a word or a name (of points: ABCD), and not a product of letters such as PV, mgh and abcd."""
    if len(run) < 4:
        return run.lower() in WORDS["short words"] or _SHORT_NAME.fullmatch(run) is not None
    return run.isupper() or re.search("[aeiou]", run[1:]) is not None


def is_noun(word: str, one: bool = False) -> bool:
    """Whether a word (lower case) may be a noun for what is counted: in the plural, or after ``one`` in the singular."""
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is", "wards", "illions", "illiards"))
    of_number = not {word.removesuffix("s"), word.removesuffix("es")}.isdisjoint(NUMBERS)
    ordinal = word.endswith("ths") and word not in WORDS["not ordinal"]
    no_noun = of_number or ordinal or word in WORDS["no plurals"] or word in WORDS["no units"]
    return word in WORDS["counted"] or ((one or plural) and not no_noun)


def choice(text: str) -> tuple[str, str] | None:
    r"""Split ``(C) 12`` into a choice's letter and its meaning: ("C", "12")."""
    match = _CHOICE.fullmatch(_TEXT.sub(r"\1 ", text.strip().strip("*$")).strip())
    if not match:
        return None
    letter, meaning = match[1] or match[3], (match[2] or "").strip()
    # "(A) or (B)", "A. No, B" and "(A) is wrong" are not a choice.
    return None if _NO_MEANING.match(meaning) else (letter, meaning)


def time_of_day(text: str) -> tuple[int, int, str] | None:
    """Read ``4:30 p.m.`` (without spaces) as (4, 30, "p"), ``noon`` as (0, 0, "p"); the last part may be empty."""
    if text.lower() in _TIMES:
        return _TIMES[text.lower()]
    match = _TIME.fullmatch(text)
    if not match:
        return None
    hour, minute, half = int(match[1]), int(match[2] or 0), (match[3] or "").lower()
    if minute > 59 or hour > 24 or not (match[2] or half or match[4]):
        return None
    if hour > 12 or hour == 0:
        half = half or ("p" if 12 < hour < 24 else "a")
    return hour % 12, minute, half


def same_time(text: str, other: str) -> bool | None:
    """Whether two texts (without spaces) are the same time; one without a.m. or p.m. may be either. None for other texts."""
    time, other_time = time_of_day(text), time_of_day(other)
    if time is None or other_time is None:
        return None
    bare = [re.match(r"\d{1,2}:\d\d$", each) for each in (text, other)]
    if all(bare):
        return time == other_time
    return time[:2] == other_time[:2] and (time[2] == other_time[2] or "" in (time[2], other_time[2]))


def same_ratio(answer: str, truth: str) -> bool | None:
    r"""Whether ``3 to 4``, or ``\frac34`` as an answer, is the ratio ``3:4`` in the same terms; None for other texts.

    If the truth is a fraction, the ratio does not answer it: 3 to 4 may mean 3 of 7.
    """
    for text, other in ((answer, truth), (truth, answer)):
        if RATIO.fullmatch(other):
            stated = _RATIO_IN_WORDS.fullmatch(text)
            if stated is None and other is truth and same_time(other, other) is None:
                stated = _FRACTION.fullmatch(text)
            if stated:
                return other.split(":") == [part for part in stated.groups() if part]
    return None


def restated(text: str) -> Iterator[str]:
    """Yield other readings of an answer in words: the number in digits, without parenthesis or adverb, "Yes" alone."""
    text = " ".join(without_markup(opened(text).replace("**", "")).split()).rstrip(" .")
    number = spelt_out(text)
    if number:
        yield number
    match = _PARENTHESIS.fullmatch(text) or _DIGITS_BEHIND.fullmatch(text)
    if match and number_word(match["word"]) == match["digits"]:
        yield match["digits"] + match["behind"]
    for pattern in (_POINTED, _IS_THE_ANSWER):
        if match := pattern.fullmatch(text):
            yield match[1]
    if match := _REMARK.fullmatch(text):
        yield match[1] + ("\\approx " if match[2] else "=") + match[3]
    if match := _MIXED.fullmatch(text):
        yield f"{match[1]} {match[2]}"
    if match := _YES_OR_NO.fullmatch(text):
        yield match[1] or match[2]


def based(text: str) -> tuple[str, int] | None:
    r"""Digits and base of ``1204_{9}``, ``1204_{\text{nine}}`` or ``1204 base 9``; None without a base."""
    text = re.sub(r"^0x([0-9A-Fa-f]+)$", r"\1_{16}", text)
    match = _BASED.fullmatch(text)
    if not match:
        return None
    base = match[2] or match[3]
    if not any(character.isdigit() or character.isupper() for character in match[1]) and base != "16":
        return None
    name = number_word(base) if base.isalpha() else base
    if name is None or (len(match[1]) == 1 and match[1].isalpha()):
        return None
    return (match[1].upper() if int(name) > 10 else match[1]).lstrip("0") or "0", int(name)


def canonical_word(text: str) -> str:
    """Canonical form of a word or name: without article, case and hyphens, or the first of its synonyms."""
    word = " ".join(_ARTICLE.sub("", text.casefold(), count=1).replace("-", " ").split())
    word = re.sub(r"\b(\d+)(?:st|nd|rd|th)\b", r"\1", word)
    word = re.sub(r"^((?:right|acute|obtuse)? ?(?:isosceles|equilateral|scalene)) triangle$", r"\1", word)
    return _SYNONYMS.get(word, word)


def same_words(answer: str, truth: str) -> bool:
    """Whether two normalised texts are the same words or names; the case of letters that are no words counts."""
    if not any(is_word(run) for run in re.findall("[A-Za-z]{2,}", truth)) and canonical_word(truth) not in _SYNONYMS:
        return answer == truth
    word, true_word = canonical_word(answer), canonical_word(truth)
    return word == true_word or _gist(word) == _gist(true_word)


_BESIDE_WORDS = re.compile(
    r"(?:(?:it is|it's|on|in|at) )?(?:(?:the|an?) )?(.+?)(?: (?:one|function|is (?:the )?winner"
    r"|(?:wins|will win|won)(?: (?:the )?game)?|has (?:(?:a|the) )?winning strategy))?"
)


def _gist(word: str) -> str:
    """A word without preposition, article and a noun that says nothing more."""
    match = _BESIDE_WORDS.fullmatch(word)
    return match[1] if match else word
