"""Sentences on the keyword experiment: whether the reward was earned by writing sentences."""

from __future__ import annotations

import pandas as pd

from grpo.reporting.sentences import paragraphs
from grpo.results.runs import Run

FLAGS = {
    "val/lists_only": "only list the keywords",
    "val/repeats_prompt": "repeat the prompt",
    "val/is_sentence": "are sentences of the grammar that the model was pretrained on",
}


def discuss_keyword(runs: list[Run]) -> str:
    """State the share of each kind of response before and after training, and whether degenerate ones earn reward."""
    ends = pd.concat([run.validation[list(FLAGS)].iloc[[0, -1]].set_axis([0, 1]) for run in runs]).groupby(level=0).mean()
    kinds = [(words, *ends[column]) for column, words in FLAGS.items()]
    (text,) = paragraphs("keyword_sentences.md.j2", problems=runs[0].outcomes.shape[1], kinds=kinds)
    return text
