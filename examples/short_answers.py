"""A reward of one's own: a right answer is worth more, the shorter it is among the answers to its question.

This is the length reward of Kimi k1.5 (Kimi Team 2025, arXiv 2501.12599, Section 2.3.3). Of the responses to one question,
the shortest gets +0.5 and the longest -0.5, with all others in between on a line; for a wrong one what is above 0 is left
out, so that a short wrong answer earns nothing by being short. It is added to the reward with a weight. Where all responses
are equally long, it is 0.

To use it, put this file into the study's folder (`folder:` in params.yaml), and in the study:

    grpo:
      reward: "short_answers:short_answers"

or in one arm, to compare it with the plain reward on the same prompt:

    experiments:
      grpo_baselines:
        arms:
          plain: {}
          short: {reward: "short_answers:short_answers"}

Training follows it, and history.csv and validation.csv tell its mean as `reward`; runs are still compared by the task's
`answer_reward`, and `response_length` shows what it does. (A validation problem is answered once, so there it is 0.)
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

WEIGHT = 0.2


def short_answers(
    prompts: list[str], completion_ids: list[list[int]], answer_reward: list[float], **columns: Any
) -> list[float]:
    """The answer's reward, and WEIGHT times that of its length in tokens."""
    lengths = defaultdict(list)
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        lengths[prompt].append(len(ids))
    rewards = []
    for prompt, ids, right in zip(prompts, completion_ids, answer_reward, strict=True):
        shortest, longest = min(lengths[prompt]), max(lengths[prompt])
        by_length = 0.5 - (len(ids) - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(right + WEIGHT * (by_length if right == 1.0 else min(0.0, by_length)))
    return rewards
