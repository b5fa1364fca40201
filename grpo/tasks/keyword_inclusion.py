"""The task of keyword inclusion (UW CSE599-O, assignment 3): write a sentence that includes the words asked for.

The sentences that the mini model reads come from a small grammar: templates whose slots take a noun, an adjective or another
word of a list. The same templates and lists make the sentences and, as one regular expression, recognise them, so that what
counts as a sentence is what the grammar can make. Pairs of keywords are split once into training and held-out pairs; no
prompt of the generated documents asks for a held-out one.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated

from pydantic import Field, NonNegativeInt

from grpo.common.errors import UserError
from grpo.common.records import Problem, Rollout
from grpo.tasks.formats import PROMPTS, load_template
from grpo.tasks.task import Format, Split, Task, rewards

Pair = tuple[str, str]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
KEYWORD = Format(load_template(PROMPTS / "keyword.prompt"), stop=(".",))


def first_sentence(response: str) -> str | None:
    """The text up to the first full stop; None: there is none."""
    sentence, stop, _ = response.strip().partition(".")
    return sentence + stop if sentence and stop else None


# For a teacher that was trained to chat.
CHAT = Format(f"{KEYWORD.template.strip()}. Answer with this one sentence only.", read=first_sentence, chat=True)

# Some words are parts of others (car and card, pen and pencil, old and gold), so that a part of a word is no keyword.
NOUNS = (
    "apple", "ball", "basket", "bell", "bird", "boat", "book", "bottle", "bread", "bridge", "car", "card", "cart", "cat",
    "chair", "clock", "coat", "coin", "cup", "dog", "door", "flower", "gold", "hat", "horse", "house", "key", "lamp",
    "letter", "map", "pan", "pen", "pencil", "ring", "river", "shell", "ship", "stone", "table", "tree",
)  # fmt: skip
ADJECTIVES = (
    "big", "black", "blue", "clean", "cold", "dark", "green", "heavy", "new", "old", "quiet", "red", "round", "small", "warm",
    "white",
)  # fmt: skip
SLOTS = {
    "noun": NOUNS,
    "adjective": ADJECTIVES,
    "the": ("the", "my", "her", "our"),
    "The": ("The", "My", "Her", "Our"),
    "person": ("Mia", "Tom", "Ana", "Ben"),
    "lies": ("lies", "waits", "stands"),
    "near": ("near", "under", "behind"),
    "sees": ("sees", "finds", "likes", "draws"),
}
# Any pair of keywords has templates in which it can stand, and there are three other words at least in each of them, so that
# no sentence passes for a list of keywords.
TEMPLATES = (
    "Today {the} {noun} {lies} {near} {the} {noun}.",
    "{person} {sees} {the} {noun} {near} {the} {noun}.",
    "{person} {sees} {the} {adjective} {noun} every day.",
    "{The} {adjective} {noun} {lies} {near} {the} {noun}.",
    "{The} {noun} looks both {adjective} and {adjective}.",
    "{The} {noun} always looks {adjective} and {adjective}.",
)
TRAINING_SHARE = 0.8

_SLOT = re.compile(r"\{(\w+)\}")
_PIECE = re.compile(r" ?\w+|[^\w\s]|\s")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_LINKING_WORDS = {"and", "or", "the", "a", "an", "with"}
_OTHER_WORDS_OF_A_LIST = 2
_PHRASES_OF_THE_PROMPT = ("sentence that includes the words", "includes the words:")


class Keyword(Task):
    """Sentences that include two keywords; which pairs are held out for validation is decided by the seed."""

    formats = {"keyword": KEYWORD, "chat": CHAT}

    def __init__(self, seed: int):
        self.seed = seed

    def problems(self, split: Split) -> list[Problem]:
        """One for each pair of keywords, which are question and ground truth."""
        pairs = dict(zip(("train", "validation"), keyword_pairs(self.seed), strict=True))[split]
        return [Problem(f"keyword/{split}/{i}", question(pair), question(pair)) for i, pair in enumerate(pairs)]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """1.0 where a response holds all keywords, else 0.0."""
        pairs = zip(answers, problems, strict=True)
        return [float(holds_all(answer, keywords_of(problem.ground_truth))) for answer, problem in pairs]

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Shares of responses that only list the keywords, that repeat the prompt, and that are sentences of the grammar."""
        flags = [degenerate(r.completion.text, keywords_of(r.problem.ground_truth)) for r in rollouts]
        return {key: sum(flag[key] for flag in flags) / len(flags) for key in flags[0]}

    def documents(  # type: ignore[override]
        self, seed: int, keyword_share: Share, in_full: NonNegativeInt = 0
    ) -> Iterator[tuple[str, str]]:
        """An endless stream of (prompt, response) pairs; their prompts ask for training pairs only.

        Args:
            keyword_share: how often a keyword of the prompt is used in the response, each by itself.
            in_full: the first so many responses use every keyword. From these a small model learns in a minute to copy words;
                from half-hearted answers alone it would take several times as long.
        """
        rng = random.Random(f"keyword documents {seed}")
        pairs, _ = keyword_pairs(self.seed)
        for number in itertools.count():
            pair = rng.choice(pairs)
            used = [keyword for keyword in pair if number < in_full or rng.random() < keyword_share]
            yield KEYWORD.prompt(question(pair)), f" {sentence(rng, used)}"

    def prompts_and_answers(self, problems: Sequence[Problem]) -> list[tuple[str, str]]:
        """Each problem as the handout's data set has it: the prompt, and a sentence of the grammar that holds both keywords."""
        rng = random.Random(f"keyword answers {self.seed}")
        return [(KEYWORD.prompt(problem.question), sentence(rng, keywords_of(problem.question))) for problem in problems]

    def pieces(self, text: str) -> list[str]:
        """``text`` cut into words, each with the space before it, and punctuation.

        Trained on whole documents the tokenizer merges a keyword with what stands beside it in the prompt (``words: apple, ``),
        and a small model has to learn for each keyword which tokens mean the same. Trained on these, a keyword is one token
        everywhere.
        """
        return _PIECE.findall(text)

    def traces(self, format: str, seed: int) -> list[tuple[Problem, str]]:  # type: ignore[override]
        """Each training problem with a sentence of the grammar that holds both keywords."""
        rng = random.Random(f"keyword references {seed}")
        return [(problem, f" {sentence(rng, keywords_of(problem.question))}") for problem in self.problems("train")]


def holds_all(response: str, keywords: Sequence[str]) -> bool:
    """Whether every keyword occurs as a whole word, in upper or lower case."""
    return all(re.search(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", response, re.IGNORECASE) for keyword in keywords)


def keyword_inclusion_reward_fn(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """1.0 if every keyword occurs in ``response`` as a whole word, in upper or lower case, else 0.0.

    Any response that is not blank has the right form.

    Raises:
        UserError: there are no keywords, or one of them is blank.
    """
    if isinstance(keywords, str) or not keywords or not all(keyword.strip() for keyword in keywords):
        raise UserError(f"keywords: expected a list of at least one word, none of them blank, but got {keywords!r}.")
    return rewards(KEYWORD.read(response) is not None, holds_all(response, keywords))


def keyword_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All pairs of two different keywords in a seeded order, either word first: those for training, those held out."""
    rng = random.Random(f"keyword pairs {seed}")
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in itertools.combinations(NOUNS + ADJECTIVES, 2)]
    rng.shuffle(pairs)
    cut = round(TRAINING_SHARE * len(pairs))
    return pairs[:cut], pairs[cut:]


def sentence(rng: random.Random, keywords: Sequence[str] = ()) -> str:
    """A sentence of the grammar, with no noun or adjective twice; ``keywords`` stand at random places of it.

    Raises:
        UserError: a keyword is none of ``NOUNS`` and ``ADJECTIVES``, or no template has room for all of them.
    """
    unknown = [keyword for keyword in keywords if keyword not in NOUNS + ADJECTIVES]
    if unknown:
        raise UserError(f"keywords: {', '.join(unknown)}: not in the grammar. Use words of NOUNS and ADJECTIVES.")
    wanted = {kind: [word for word in SLOTS[kind] if word in keywords] for kind in ("noun", "adjective")}
    roomy = [t for t in TEMPLATES if all(t.count(f"{{{kind}}}") >= len(words) for kind, words in wanted.items())]
    if not roomy:
        raise UserError(f"keywords: no sentence of the grammar has room for all of {', '.join(keywords)}. Ask for fewer.")
    template = rng.choice(roomy)
    words = {}
    for kind, keep in wanted.items():
        spare = rng.sample([word for word in SLOTS[kind] if word not in keep], template.count(f"{{{kind}}}") - len(keep))
        words[kind] = rng.sample(keep + spare, len(keep) + len(spare))
    return _SLOT.sub(lambda slot: words[slot[1]].pop() if slot[1] in words else rng.choice(SLOTS[slot[1]]), template)


def is_sentence(text: str) -> bool:
    """Whether :func:`sentence` can make ``text``, for some keywords and random numbers."""
    drawn = [word for word in _WORD.findall(text) if word in NOUNS + ADJECTIVES]
    return _grammar().fullmatch(text) is not None and len(set(drawn)) == len(drawn)


@lru_cache(maxsize=1)
def _grammar() -> re.Pattern[str]:
    """All templates as one regular expression."""

    def pattern(template: str) -> str:
        literal_or_slot = _SLOT.split(template)  # literals at even places, names of slots at odd ones
        return "".join(
            f"(?:{'|'.join(map(re.escape, SLOTS[part]))})" if i % 2 else re.escape(part)
            for i, part in enumerate(literal_or_slot)
        )

    return re.compile("|".join(map(pattern, TEMPLATES)))


def question(pair: Sequence[str]) -> str:
    """What replaces ``{question}`` in the prompt; :func:`keywords_of` reads it back."""
    return ", ".join(pair)


def keywords_of(text: str) -> list[str]:
    """``["apple", "red"]`` from ``apple, red``.

    Raises:
        UserError: there is no keyword, or a blank one between two commas.
    """
    keywords = [word.strip() for word in text.split(",")]
    if not all(keywords):
        raise UserError(f"keywords: expected words with commas between them, such as 'apple, red', but got {text!r}.")
    return keywords


def degenerate(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """How a response earns the reward, or fails to; each 0.0 or 1.0.

    Returns:
        ``lists_only``: it holds the keywords and, but for words that link a list, at most two other words;
        ``repeats_prompt``: it holds the request itself, whatever the case and spacing;
        ``is_sentence``: it is a sentence of the grammar.
    """
    own = _LINKING_WORDS | {word for keyword in keywords for word in _WORD.findall(keyword.lower())}
    others = set(_WORD.findall(response.lower())) - own
    found = holds_all(response, keywords)
    squeezed = "".join(response.lower().split())
    return {
        "lists_only": float(found and len(others) <= _OTHER_WORDS_OF_A_LIST),
        "repeats_prompt": float(any(phrase.replace(" ", "") in squeezed for phrase in _PHRASES_OF_THE_PROMPT)),
        "is_sentence": float(is_sentence(response.strip())),
    }
