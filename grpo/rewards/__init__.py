"""Verifiable rewards: what an answer must look like and when it equals the ground truth."""

from __future__ import annotations

from grpo.rewards.functions import (
    REWARD_FNS,
    RewardFn,
    ScoredBatch,
    ScoreFn,
    keyword_inclusion_reward_fn,
    question_only_reward_fn,
    r1_zero_reward_fn,
    read_answer,
    score_batch,
    score_each,
)
from grpo.rewards.pool import grade_batch

__all__ = [
    "REWARD_FNS",
    "RewardFn",
    "ScoreFn",
    "ScoredBatch",
    "grade_batch",
    "keyword_inclusion_reward_fn",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "read_answer",
    "score_batch",
    "score_each",
]
