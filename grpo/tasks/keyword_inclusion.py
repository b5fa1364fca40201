"""The keyword inclusion task (UW CSE599-O, assignment 3): write a sentence that includes the given words.

The mini model's documents come from a small grammar: templates whose slots take a noun, an adjective or another listed word.
The same templates generate sentences and, as one regular expression, recognize them, so a sentence is what the grammar can
generate. Pairs of keywords are split into training and held-out pairs; no document has a held-out pair in its prompt.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence

from pydantic import NonNegativeInt

from grpo.common.errors import UserError
from grpo.common.records import Problem, Rollout
from grpo.tasks.formats import packaged
from grpo.tasks.task import Format, Share, Split, Task, rewards

Pair = tuple[str, str]
KEYWORD = Format(packaged("keyword"), stop=(".",))


def first_sentence(response: str) -> str | None:
    """The text up to the first full stop; None if there is none."""
    sentence, stop, _ = response.strip().partition(".")
    return sentence + stop if sentence and stop else None


# For a teacher that is a chat model.
CHAT = Format(f"{KEYWORD.template.strip()}. Answer with this one sentence only.", read=first_sentence, chat=True)

# Some words contain others (card and car, pencil and pen, gold and old), to test that only whole words count.
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
# Any pair of keywords fits some template. Each template has at least three other words, so that no sentence counts as a list of
# keywords.
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
_GRAMMAR = re.compile(
    "|".join(TEMPLATES).replace(".", r"\.").format_map({name: f"(?:{'|'.join(SLOTS[name])})" for name in SLOTS})
)
_PIECE = re.compile(r" ?\w+|[^\w\s]|\s")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_LINKING_WORDS = {"and", "or", "the", "a", "an", "with"}
_OTHER_WORDS_OF_A_LIST = 2
_PHRASES_OF_THE_PROMPT = ("sentence that includes the words", "includes the words:")


class Keyword(Task):
    """Sentences that include two keywords; the seed decides which pairs are held out for validation."""

    formats = {"keyword": KEYWORD, "chat": CHAT}

    def __init__(self, seed: int):
        self.seed = seed

    def problems(self, split: Split) -> list[Problem]:
        """One problem for each pair of keywords; the pair is both question and ground truth."""
        pairs = dict(zip(("train", "validation"), keyword_pairs(self.seed), strict=True))[split]
        return [Problem(f"keyword/{split}/{i}", ", ".join(pair), ", ".join(pair)) for i, pair in enumerate(pairs)]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """1.0 for a response with all keywords, else 0.0."""
        pairs = zip(answers, problems, strict=True)
        return [float(holds_all(answer, keywords_of(problem.ground_truth))) for answer, problem in pairs]

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Shares of responses that only list the keywords, repeat the prompt, or are sentences of the grammar."""
        flags = [degenerate(r.completion.text, keywords_of(r.problem.ground_truth)) for r in rollouts]
        return {key: sum(flag[key] for flag in flags) / len(flags) for key in flags[0]}

    def documents(  # type: ignore[override]
        self, seed: int, keyword_share: Share, in_full: NonNegativeInt = 0
    ) -> Iterator[tuple[str, str]]:
        """Yield (prompt, response) pairs without end; the prompts ask for training pairs only.

        Args:
            keyword_share: probability that a keyword of the prompt occurs in the response, independently for each.
            in_full: number of first responses that use every keyword. From these a small model learns to copy words in a
                minute; without them it takes several times as long.
        """
        rng = random.Random(f"keyword documents {seed}")
        pairs, _ = keyword_pairs(self.seed)
        for number in itertools.count():
            pair = rng.choice(pairs)
            used = [keyword for keyword in pair if number < in_full or rng.random() < keyword_share]
            yield KEYWORD.prompt(", ".join(pair)), f" {sentence(rng, used)}"

    def prompts_and_answers(self, problems: Sequence[Problem]) -> list[tuple[str, str]]:
        """Each problem as in the handout's data set: the prompt, and a sentence of the grammar with both keywords."""
        rng = random.Random(f"keyword answers {self.seed}")
        return [(KEYWORD.prompt(problem.question), sentence(rng, keywords_of(problem.question))) for problem in problems]

    def pieces(self, text: str) -> list[str]:
        """Split ``text`` into words, each with the space before it, and punctuation.

        Trained on whole documents, the tokenizer would merge a keyword with its neighbours in the prompt (``words: apple, ``),
        and the model would have to learn which tokens are the same keyword. Trained on these pieces, a keyword is one token.
        """
        return _PIECE.findall(text)

    def traces(self, format: str, seed: int) -> list[tuple[Problem, str]]:  # type: ignore[override]
        """Each training problem with a sentence of the grammar that includes both keywords."""
        rng = random.Random(f"keyword references {seed}")
        return [(problem, f" {sentence(rng, keywords_of(problem.question))}") for problem in self.problems("train")]


def holds_all(response: str, keywords: Sequence[str]) -> bool:
    """Whether every keyword occurs as a whole word, in upper or lower case."""
    return all(re.search(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", response, re.IGNORECASE) for keyword in keywords)


def keyword_inclusion_reward_fn(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """Reward of a response: 1.0 if every keyword occurs as a whole word, in upper or lower case, else 0.0.

    Any response that is not blank has the right form. Raises UserError if there are no keywords, or one of them is blank.
    """
    if isinstance(keywords, str) or not keywords or not all(keyword.strip() for keyword in keywords):
        raise UserError(f"keywords: expected a list of at least one word, none of them blank, but got {keywords!r}.")
    return rewards(KEYWORD.read(response) is not None, holds_all(response, keywords))


def keyword_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Shuffle all pairs of different keywords by the seed, and split them into training pairs and held-out pairs."""
    rng = random.Random(f"keyword pairs {seed}")
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in itertools.combinations(NOUNS + ADJECTIVES, 2)]
    rng.shuffle(pairs)
    cut = round(TRAINING_SHARE * len(pairs))
    return pairs[:cut], pairs[cut:]


def sentence(rng: random.Random, keywords: Sequence[str] = ()) -> str:
    """Generate a sentence of the grammar with at most two ``keywords`` at random places, and no noun or adjective twice."""
    wanted = {kind: [word for word in SLOTS[kind] if word in keywords] for kind in ("noun", "adjective")}
    roomy = [t for t in TEMPLATES if all(t.count(f"{{{kind}}}") >= len(words) for kind, words in wanted.items())]
    template = rng.choice(roomy)
    words = {}
    for kind, keep in wanted.items():
        spare = rng.sample([word for word in SLOTS[kind] if word not in keep], template.count(f"{{{kind}}}") - len(keep))
        words[kind] = rng.sample(keep + spare, len(keep) + len(spare))
    return _SLOT.sub(lambda slot: words[slot[1]].pop() if slot[1] in words else rng.choice(SLOTS[slot[1]]), template)


def is_sentence(text: str) -> bool:
    """Whether :func:`sentence` can generate ``text``."""
    drawn = [word for word in _WORD.findall(text) if word in NOUNS + ADJECTIVES]
    return _GRAMMAR.fullmatch(text) is not None and len(set(drawn)) == len(drawn)


def keywords_of(question: str) -> list[str]:
    """Split a question into keywords: ``["apple", "red"]`` from ``apple, red``."""
    return question.split(", ")


def degenerate(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """Classify a response by flags, each 0.0 or 1.0.

    Returns ``lists_only``: the response has the keywords and at most two other words, not counting words that link a list;
    ``repeats_prompt``: the response contains the request, regardless of case and spacing; ``is_sentence``: the response is a
    sentence of the grammar.
    """
    others = set(_WORD.findall(response.lower())) - _LINKING_WORDS - {keyword.lower() for keyword in keywords}
    squeezed = "".join(response.lower().split())
    return {
        "lists_only": float(holds_all(response, keywords) and len(others) <= _OTHER_WORDS_OF_A_LIST),
        "repeats_prompt": float(any(phrase.replace(" ", "") in squeezed for phrase in _PHRASES_OF_THE_PROMPT)),
        "is_sentence": float(is_sentence(response.strip())),
    }
