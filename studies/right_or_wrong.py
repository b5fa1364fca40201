"""Advantages from wrong answers alone, for literature/pass_at_k.yaml."""

from torch import Tensor


def wrong_only(rewards: Tensor, lengths: Tensor) -> Tensor:
    """-1 for a wrong answer and 0 for a right one (negative sample reinforcement, arXiv 2506.01347); the reward is 0 or 1."""
    return rewards - 1
