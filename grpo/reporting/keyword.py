"""Sentences on the keyword experiment: whether the reward was earned by writing sentences."""

from __future__ import annotations

from grpo.results.runs import Run

FLAGS = {
    "val/lists_only": "only list the keywords",
    "val/repeats_prompt": "repeat the prompt",
    "val/is_sentence": "are sentences of the grammar that the model was pretrained on",
}
NOTICEABLE = 0.05  # share of responses


def discuss_keyword(runs: list[Run]) -> str:
    """State the share of each kind of response before and after training, and whether degenerate ones earn reward."""
    kinds = "; ".join(
        f"{_mean(runs, column, 0):.1%} before and {_mean(runs, column, -1):.1%} after {words}"
        for column, words in FLAGS.items()
    )
    return f"Of the responses to {runs[0].outcomes.shape[1]} held-out pairs of keywords {kinds}. {_verdict(runs)}"


def _verdict(runs: list[Run]) -> str:
    degenerate = max(_mean(runs, column, -1) for column in list(FLAGS)[:2])
    lost = _mean(runs, "val/is_sentence", 0) - _mean(runs, "val/is_sentence", -1)
    if degenerate >= NOTICEABLE:
        return f"Part of the reward comes from degenerate responses: up to {degenerate:.1%} are."
    if lost >= NOTICEABLE:
        return f"The reward does not come from lists or repetitions, but partly costs grammar: {lost:.1%} fewer sentences."
    return "The reward does not come from degenerate responses."


def _mean(runs: list[Run], column: str, row: int) -> float:
    return float(sum(run.validation[column].iloc[row] for run in runs) / len(runs))
