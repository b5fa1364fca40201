"""Your own reward: among the answers to one question, shorter right answers get a higher reward.

This is the length reward of Kimi k1.5 (Kimi Team 2025, arXiv 2501.12599, Section 2.3.3). Of the responses to one question, the
shortest gets +0.5, the longest -0.5, and the others lie between on a line. For wrong responses values above 0 become 0, so that
a short wrong answer gains nothing. If all responses are equally long, it is 0. It is added to the reward with a weight.

To use it, put this file beside the study's file, and add to the study:

    grpo:
      reward: "short_answers:short_answers"

or in one arm, to compare it with the plain reward on the same prompt:

    experiments:
      grpo_baselines:
        arms:
          plain: {}
          short: {reward: "short_answers:short_answers"}

Training uses it, and history.csv and validation.csv have its mean as `reward`. Runs are still compared by the task's
`answer_reward`; `response_length` shows its effect. (Each validation problem is answered once, so it is 0 there.)
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

WEIGHT = 0.2


def short_answers(
    prompts: list[str], completion_ids: list[list[int]], answer_reward: list[float], **columns: Any
) -> list[float]:
    """Add WEIGHT times the length reward (length in tokens) to the answer reward."""
    lengths = defaultdict(list)
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        lengths[prompt].append(len(ids))
    rewards = []
    for prompt, ids, right in zip(prompts, completion_ids, answer_reward, strict=True):
        shortest, longest = min(lengths[prompt]), max(lengths[prompt])
        by_length = 0.5 - (len(ids) - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(right + WEIGHT * (by_length if right == 1.0 else min(0.0, by_length)))
    return rewards
