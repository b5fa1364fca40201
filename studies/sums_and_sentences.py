"""Arithmetic for a model that is also pretrained on sentences with keywords, for literature/forgetting.yaml."""

import random
from collections.abc import Iterator
from typing import Any

from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.keyword_inclusion import KEYWORD, Keyword
from grpo.tasks.task import Share

BEFORE_THE_WORDS = KEYWORD.prompt("\n").partition("\n")[0]


class SumsAndSentences(Arithmetic):
    """The arithmetic task. Its pretraining documents are partly those of the keyword task, which becomes the old task."""

    def documents(  # type: ignore[override]
        self, seed: int, sentence_share: Share, sentences: dict[str, Any], **sums: Any
    ) -> Iterator[tuple[str, str]]:
        """Yield (prompt, response) pairs of both tasks without end.

        Args:
            sentence_share: share of documents of the keyword task.
            sentences: arguments of its ``documents``; the other ones are those of :meth:`Arithmetic.documents`.
        """
        rng, of_sums = random.Random(f"both {seed}"), super().documents(seed, **sums)
        of_sentences = Keyword(seed=0).documents(seed, **sentences)  # the seed of the old task, so that its pairs are held out
        while True:
            yield next(of_sentences if rng.random() < sentence_share else of_sums)

    def pieces(self, text: str) -> list[str]:
        """Split documents of the keyword task into words, as it does itself."""
        return Keyword(seed=0).pieces(text) if text.startswith(BEFORE_THE_WORDS) else [text]
