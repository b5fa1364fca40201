"""The task of smollm2.yaml: a sentence with three given words, asked in a chat with a real language model.

It is keyword inclusion (UW CSE599-O, assignment 3) with English words. The reward is the share of the words that the response
has. It does not see whether the response is English, so a model can learn to list the words.
"""

import random
import re
from collections.abc import Sequence

from grpo.common.records import Rollout
from grpo.tasks import Format, Problem, Task
from grpo.tasks.keyword_inclusion import holds_all
from grpo.tasks.task import Split

WORDS = """
    anchor apple arrow attic bag baker balcony banana barn basket beach bell bench bicycle bird blanket boat book boot
    bottle bowl box branch bread brick bridge broom brush bucket bus butter button cabin cake camera candle captain
    carpet castle cat ceiling chain chair cheese cherry church clock cloud coat coffee coin cook corner cow cradle
    crown cup curtain daughter desk doctor dog doll door drawer dress drum duck engine farmer feather fence field
    finger fire fish flag floor flower forest fork fountain fox friend frog garden gate ghost glass glove goat
    grandmother guitar hammer harbor hat hill honey horse hospital house island jacket judge kettle key king kitchen
    kite knife ladder lake lamp leaf lemon letter library lion mailbox map market meadow mirror moon mountain mouse
    museum nail needle neighbor nest newspaper nurse orange oven painter paper parrot path pen pepper piano pillow
    pilot pirate plate pocket pond potato queen rabbit rain ring river road robot roof rope rose sailor salt sand
    school scissors shell sheep ship shirt shoe shop shovel sister snow soap soldier soup spider spoon stable stairs
    star station stone storm suitcase sun table teacher tent thief ticket tiger tower train tree truck umbrella uncle
    valley violin wagon wall wheel whistle window wolf
""".split()  # noqa: SIM905
LINKS = {"a", "an", "and", "the", "with"}  # words between those of a list
FEW = 3  # other words that a response has at most to count as a list


class Keywords(Task):
    """Triples of English nouns. The validation triples do not occur in training; their words do."""

    formats = {"chat": Format("Write one short sentence with the words {question}.", chat=True)}

    def __init__(self, train_size: int = 2048, validation_size: int = 256, seed: int = 0):
        self.sizes, self.seed = {"validation": validation_size, "train": train_size}, seed

    def problems(self, split: Split) -> list[Problem]:
        rng, triples = random.Random(f"keywords {self.seed}"), dict[frozenset[str], list[str]]()
        while len(triples) < sum(self.sizes.values()):
            drawn = rng.sample(WORDS, 3)
            triples.setdefault(frozenset(drawn), drawn)
        held_out = self.sizes["validation"]
        of_split = list(triples.values())[:held_out] if split == "validation" else list(triples.values())[held_out:]
        return [Problem(f"{split}/{'-'.join(t)}", f"{t[0]}, {t[1]} and {t[2]}", ", ".join(t)) for t in of_split]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """The share of the three words that occur as whole words."""
        asked = [words_of(problem) for problem in problems]
        return [sum(holds_all(a, [word]) for word in words) / len(words) for a, words in zip(answers, asked, strict=True)]

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Shares of responses: with all words, that only list them, that repeat one of them, and that end by themselves."""
        found = [kinds_of(r.completion.text, words_of(r.problem)) for r in rollouts]
        ends = sum(r.completion.finish_reason != "length" for r in rollouts) / len(rollouts)
        return {kind: sum(one[kind] for one in found) / len(found) for kind in found[0]} | {"ends": ends}


def words_of(problem: Problem) -> list[str]:
    return problem.ground_truth.split(", ")


def kinds_of(response: str, words: Sequence[str]) -> dict[str, bool]:
    """What the reward does not see."""
    said = re.findall(r"\w+", response.lower())
    whole = holds_all(response, words)
    return {
        "all_words": whole,
        "lists_only": whole and len(set(said) - LINKS - set(words)) <= FEW,
        "repeats_a_word": any(said.count(word) > 1 for word in words),
    }
