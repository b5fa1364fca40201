r"""Reading of answers in words: sentences with a value, choice letters, names, times, numbers with a base.

A sentence is read strictly. It must have one value after a linking verb or a colon ("The answer is 5", "There are 12 ways",
"x is 3"), and no word that denies, doubts, compares or lists. Other texts stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpo.grader.number_words import LISTS, NUMBERS, WORDS, number_word, spelt_out

HEDGES = WORDS["hedges"]
ANSWERS = WORDS["answers"]
# Names of numbers, fractions and operations: sixths, quintillion, doubled, twofold.
_NUMERIC = re.compile(
    r".*(?:ths?|illions?|illiards?|ed|fold)|halves|thirds?|seconds? power|lakhs?|crores?|googol|gross|point|powers?|short|"
    r"top|off|away|shy|hundreds?|thousands?|dozens?|pairs?|scores?|inverse|negate|again|repeating|recurring|fails?|loses?"
)
_SHORT_NAME = re.compile("[A-Z][aeiou][a-z]")
_DOES = re.compile(
    rf"(?:(?:{LISTS['modals']}) (?:{'|'.join(WORDS['to do'])})|{'|'.join(sorted(WORDS['does']))})(?: (?:for|at))?",
    re.IGNORECASE,
)
_VERB = "|".join([_DOES.pattern, *(verb.strip() for verb in LISTS["verbs"].split("|"))])
_LINK = re.compile(
    rf"(?:(?<![A-Za-z\\])(?:{_VERB})(?![A-Za-z'\-])\s*:?|(?<=[A-Za-z$)*]):(?=\s|\*|\$|\\)|(?<=[A-Za-z]) ?=(?!=))\s*",
    re.IGNORECASE,
)
_NUMBER_THEN_WORDS = re.compile(
    r"((?:\\?\$)?[+-]?(?:\\?\$)?[0-9][0-9,.]*(?:/[0-9]+)?(?:\\?%)?\$?|\$[^$]*\$|\*\*[^*]*\*\*)\s+([A-Za-z][A-Za-z'’, -]*)[.!]?",
    re.DOTALL,
)
_MONEY = re.compile(r"\\?\$[0-9][0-9,.]*")
_IS_THE_ANSWER = re.compile(r"(.+?) is (?:the|our|my) (?:(?:final|correct|right) )?(?:answer|solution|result)", re.IGNORECASE)
_BOLD = re.compile(r"(?<![\w)}*])(?:\*\*|__)(?=[^\s*])([^*]+?)(?:\*\*|__)(?![\w*])")
_HEADING = re.compile(r"^#{1,6} +")
_OPENING = re.compile(
    r"(?:thus|therefore|hence|so|then|finally|consequently)(?:[,:]\s*|\s+(?!the\b))|(?:in total|in all|altogether|overall),\s*",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\{([^{}]*)\}")
_NAME = re.compile(r"[A-Z][a-z]+|[Tt]he")
_SUBJECT = re.compile(r"[A-Z][a-z]+|[Hh]e|[Ss]he|[Ii]t|[Tt]hey|[Ww]e|I|will|[Ww]ho")
_SYMBOL = re.compile(r"\$?\\?[A-Za-z](?:\([A-Za-z]\))?\$?|\$[A-Za-z+\-*/^(){} =\\]*\$")
# "The probability that both are red", and who does something: "each person", "the farmer".
_ABOUT = re.compile(
    rf"(?:(?:so|thus|then) )?(?:the )?(?:\w+ )?(?:{'|'.join(sorted(WORDS['subjects'] - WORDS['small']))}) "
    r"(?:that|of|when|where|for|in|from|on|which|who|to|until|she|he|they|it) ", re.IGNORECASE,
)  # fmt: skip
_DOER = re.compile(r"(?:the|each|every|one|a|his|her|their|my|our) [a-z]+(?: [a-z]+)?", re.IGNORECASE)
_DELIMITERS = re.compile(r"\\[()\[\]]|\$\$")
_CAPTION = re.compile(r"(?P<caption>[A-Za-z][A-Za-z ]*?) ?[:.]? ?(?:(?P<display>\$.+|\\begin\{.+)|(?P<value>[\d(\\].*))\.?")

_CHOICE = re.compile(r"\(?([A-J])[).:]\s*(.+)|(?:[Oo]ption|[Cc]hoice)\s*\(?([A-J])\)?[.:]?()", re.DOTALL)
_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?\s*(?:\\text\{)?\s*(?:([ap])\.?\s*m\.?|(o['’]?clock))?\}?", re.IGNORECASE)
_TIMES = {"noon": (0, 0, "p"), "12noon": (0, 0, "p"), "midnight": (0, 0, "a"), "12midnight": (0, 0, "a")}
RATIO = re.compile(r"\d+(?::\d+)+")
_RATIO_IN_WORDS = re.compile(r"(\d+) to (\d+)(?: to (\d+))?")
_FRACTION = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)")
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?:{_DAY} ?(?:of )?)?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?(?(1)| ?{_DAY})", re.IGNORECASE
)
# "7 (seven) apples" and "seven (7)"
_PARENTHESIS = re.compile(r"(?P<digits>[\d.,/]*\d) ?\((?P<word>[A-Za-z][A-Za-z -]*)\)(?P<behind>(?: [A-Za-z]+){0,3})")
_DIGITS_BEHIND = re.compile(r"(?P<word>[A-Za-z -]+) \((?P<digits>\d+)\)(?P<behind>)")
_WITH_ADVERB = re.compile(r"([-\d$\\].*[^\s,]),? (?:altogether|in total|in all|overall|total)!?")
_POINTED = re.compile(
    r"(?:at |(?:at )?(?:the )?(?:point|ordered pair|ordered triple|pair|vector|interval|set)s? )(\\?[$(\[{].*)", re.IGNORECASE
)
_YES_OR_NO = re.compile(r"(yes|no|true|false)(?:[,.!;:]| because| since)(?: (.*)|)", re.IGNORECASE)
_BASED = re.compile(
    r"\(?(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\)?(?:_\{?\(?([0-9]+|[a-z]+)\)?\}?|,?\(?base[ -]?\{?([0-9]+|[a-z]+)\}?\)?)"
)
_NAMED_SUBJECT = re.compile(
    r"([A-Z][a-z]+) (?:is|has|will|can|must|should|wins|won|receives|gets|takes|makes)((?: [A-Za-z'’-]+)*)"
)
_ARTICLE = re.compile(r"(?:the|an?)\s+", re.IGNORECASE)
_SYNONYMS: dict[str, str] = {spelling: group[0] for group in LISTS["synonyms"] for spelling in group}


def sentence_value(text: str) -> str | None:
    """The value that a sentence states; None if ``text`` is not such a sentence."""
    if len(text) > 400 or "?" in text or not re.search(r"[A-Za-z]{2}", text):
        return None
    text = _HEADING.sub("", _BOLD.sub(r"\1", " ".join(text.split()))).strip()
    text = _DELIMITERS.sub("$", text)
    plain = opened(text)
    opening = _OPENING.match(text)
    if opening and not _is_hedged(text[opening.end() :]):
        rest = text[opening.end() :].strip()
        return sentence_value(rest) or rest
    for link in reversed([match for match in _LINK.finditer(plain) if _is_outside_math(plain, match.start())]):
        lead, verb = plain[: link.start()].strip(" *"), link.group().strip().lower()
        rest = text[link.end() :] if text[link.end() :].count("{") == text[link.end() :].count("}") else plain[link.end() :]
        if verb == "=" and _SYMBOL.fullmatch(lead):
            return None  # an equation, in which the name counts
        lead += " there" if verb.startswith("there") else " we" if verb.startswith("we") else ""
        does = _DOES.fullmatch(verb) and _DOER.fullmatch(lead) and HEDGES.isdisjoint(words_of(lead))
        names = _is_lead(lead) or bool(does)
        if lead and names and re.search(r"\w", rest):
            return None if _is_hedged(rest) else without_tail(rest.strip())
    caption = _CAPTION.fullmatch(text)
    if caption:
        words = {*caption["caption"].lower().split()}
        for known, value in ((ANSWERS | WORDS["beside answers"], caption["value"] or caption["display"]),
                             (WORDS["subjects"] | WORDS["of matrices"], caption["display"])):  # fmt: skip
            if words <= known and value and not (known.isdisjoint(ANSWERS) is False and words.isdisjoint(ANSWERS)):
                return value
    shortened = without_tail(plain)
    return shortened if shortened != plain and not _is_hedged(plain) else None


def opened(text: str) -> str:
    r"""Replace ``\text{...}`` by its content and spaces, so that all characters keep their positions."""
    return _TEXT.sub(lambda match: match[1].rjust(len(match.group()) - 1) + " ", text)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without commands."""
    words = re.findall(r"[A-Za-z'’-]+", re.sub(r"\\[A-Za-z]+", " ", text))
    return [word.lower() for word in words if word != "May"]  # the month


def _is_hedged(rest: str) -> bool:
    """Whether a text with a number has words of doubt or comparison; "or" and "no" do not count, as lists have them."""
    return any(character.isdigit() for character in rest) and not HEDGES.isdisjoint({*words_of(rest)} - {"or", "no"})


def _is_outside_math(text: str, position: int) -> bool:
    return text.count("$", 0, position) % 2 == 0 and text.count("{", 0, position) == text.count("}", 0, position)


def _is_lead(lead: str) -> bool:
    """Whether all words before the verb name a value: "The answer", "The area of the triangle", "x", "Natalia"."""
    allowed = {"divided"} if "remainder" in lead else set()
    if not HEDGES.isdisjoint({*words_of(lead)} - allowed):
        return False
    words = [word.strip(",.:;*") for word in re.findall(r"\$[^$]*\$[,.]?|\S+", lead)]
    plain = [word.lower() for word in words]
    if ANSWERS.intersection(plain):
        return set(plain) <= ANSWERS | WORDS["beside answers"]
    if _ABOUT.match(" ".join(plain)):
        return True
    if not words:
        return False
    if len(words) <= 3 and all(_NAME.fullmatch(word) for word in words[:-1]) and _SUBJECT.fullmatch(words[-1]):
        return True
    return all(word in WORDS["subjects"] or _SYMBOL.fullmatch(original) for word, original in zip(plain, words, strict=True))


def without_tail(rest: str) -> str:
    """Shorten ``12 ways to do it.`` to ``12 ways``, as only the first word after a number can be its unit.

    In a chain of equalities, the last side is shortened.
    """
    work, sign, last = rest.rpartition("=")
    match = _NUMBER_THEN_WORDS.fullmatch(last.strip())
    tail = match[2].replace(",", " ").split() if match else []
    if not match or any(word != "May" and alters(word.lower()) for word in tail):
        return rest
    noun, following = tail[0].lower(), " ".join(tail[1:2]).lower()
    is_of_them = tail[0] == "of" and following in {"them", "these", "those"} and len(tail) == 2
    if (noun in WORDS["after numbers"] and not is_of_them) or (noun == "per" and following in WORDS["per"]):
        return rest
    if is_of_them or (noun in WORDS["adverbs"] and (len(tail) > 1 or noun != "in")) or _MONEY.fullmatch(match[1]):
        shortened = match[1]
    elif following in WORDS["adverbs"] and following not in {"per", "a", "an"}:
        shortened = f"{match[1]} {tail[0]}"
    elif len(tail) <= 2 or noun in {"square", "cubic", "sq", "cu"} or following in {"per", "a", "an"}:
        shortened = last.strip()
    else:
        shortened = f"{match[1]} {tail[0]}"
    return f"{work}{sign} {shortened}".strip() if sign and shortened != last.strip() else shortened if not sign else rest


def hedges(word: str) -> bool:
    """Whether a word (lower case) denies, doubts or is a number, and so cannot name a value."""
    return word in HEDGES or word in NUMBERS


def alters(word: str) -> bool:
    """Whether a word after a number may change or deny it, or is a number itself."""
    if hedges(word):
        return True
    return word not in WORDS["not numeric"] and _NUMERIC.fullmatch(word) is not None


def is_word(run: str) -> bool:
    """Whether a run of letters is a word or a name (of points: ABCD), and not a product of letters such as PV, mgh and abcd."""
    if len(run) < 4:
        return run.lower() in WORDS["short words"] or _SHORT_NAME.fullmatch(run) is not None
    return run.isupper() or re.search("[aeiou]", run[1:]) is not None


def is_noun(word: str, one: bool = False) -> bool:
    """Whether a word (lower case) may be a noun for what is counted: in the plural, or after ``one`` in the singular."""
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is", "wards"))
    of_number = not {word.removesuffix("s"), word.removesuffix("es")}.isdisjoint(NUMBERS)
    return word in WORDS["counted"] or ((one or plural) and word not in WORDS["no plurals"] and not of_number)


def digits_without_base(text: str, other: str) -> bool:
    """Whether two normalised texts are the same digits, and only one states a base (2 to 36), which has these digits."""
    for bare, stated in ((text, other), (other, text)):
        found = based(stated.replace(" ", ""))
        if found and based(bare) is None and re.fullmatch(r"[0-9A-Z]+(?:\.[0-9A-Z]+)?", bare) and bare == found[0]:
            return 2 <= found[1] <= 36 and all(int(digit, 36) < found[1] for digit in bare.replace(".", ""))
    return False


def choice(text: str) -> tuple[str, str] | None:
    r"""Split ``(C) 12`` into a choice's letter and its meaning: ("C", "12")."""
    match = _CHOICE.fullmatch(_TEXT.sub(r"\1 ", text.strip().strip("*$")).strip())
    if not match:
        return None
    letter, meaning = match[1] or match[3], (match[2] or "").strip()
    # "(A) or (B)" and "A. No, B" are not a choice.
    several = re.match(r"[,;/&)(]", meaning) or re.search(r"(?<![A-Za-z\\])[A-J](?![A-Za-z0-9^_+*-])", meaning)
    doubtful = meaning[:3] in {"is ", "and"} or any(word in HEDGES for word in words_of(meaning))
    return None if several or doubtful else (letter, meaning)


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


def day_of_year(text: str) -> tuple[str, str] | None:
    """Read ``6 June``, ``June 6th`` or ``6th of June`` as ("jun", "6")."""
    match = _DATE.fullmatch(text)
    return (match[2].lower(), match[1] or match[3]) if match else None


def restated(text: str) -> Iterator[str]:
    """Yield other readings of an answer in words: the number in digits, without parenthesis or adverb, "Yes" alone."""
    text = " ".join(text.replace("**", "").split()).rstrip(" .")
    number = spelt_out(text)
    if number:
        yield number
    match = _PARENTHESIS.fullmatch(text) or _DIGITS_BEHIND.fullmatch(text)
    if match and number_word(match["word"]) == match["digits"]:
        yield match["digits"] + match["behind"]
    for pattern in (_WITH_ADVERB, _POINTED, _IS_THE_ANSWER):
        if match := pattern.fullmatch(text):
            yield match[1]
    if match := _YES_OR_NO.fullmatch(text):
        says_no = match[1].lower() in {"no", "false"}
        denials = (HEDGES - WORDS["negations"]) | {"yes", "true"} if says_no else HEDGES | {"no", "false"}
        if denials.isdisjoint(words_of(match[2] or "")) and "?" not in text:
            yield match[1]


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
    return word == true_word or _gist(word) == _gist(true_word) or _subject(answer) == truth or _subject(truth) == answer


_BESIDE_WORDS = re.compile(r"(?:(?:it is|it's|on|in|at) )?(?:(?:the|an?) )?(.+?)(?: (?:one|function|wins|will win|won))?")


def _gist(word: str) -> str:
    """A word without preposition, article and a noun that says nothing more."""
    match = _BESIDE_WORDS.fullmatch(word)
    return match[1] if match else word


def _subject(sentence: str) -> str:
    """The name that is the subject of a sentence about it; empty for other texts, and for denials and doubts."""
    match = _NAMED_SUBJECT.fullmatch(sentence)
    return match[1] if match and HEDGES.isdisjoint(words_of(match[2])) else ""
