"""When a run has clearly diverged, from what has been measured so far."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.study.sections import Divergence

STILL_LEARNT = 0.5  # with this share of its best reward left, a run that became short or sure has not collapsed


def divergence(
    rules: Divergence, validations: Sequence[dict[str, float]], entropies: Sequence[float], skipped_in_a_row: int
) -> str | None:
    """Why a run counts as diverged now, or None.

    Args:
        validations: every evaluation so far, the untrained policy's first: ``val/answer_reward``, ``val/response_length``.
        entropies: mean token entropy (nats) of the last update before each evaluation but the first.
        skipped_in_a_row: optimizer steps without a finite gradient, up to now.
    """
    if skipped_in_a_row >= rules.skipped_updates:
        return f"the gradient was not finite in {skipped_in_a_row} optimizer steps in a row"
    start, recent = validations[0], list(validations[1:])[-rules.patience :]
    if len(recent) < rules.patience:
        return None
    rewards = [row["val/answer_reward"] for row in recent]
    lengths = [row["val/response_length"] for row in recent]
    times = f"in {rules.patience} evaluations in a row"
    if max(rewards) < rules.reward_below_start * start["val/answer_reward"]:
        return f"answer reward {rewards[-1]:.3f}, under its start of {start['val/answer_reward']:.3f} {times}"
    best = max(row["val/answer_reward"] for row in validations)
    if best > 0 and max(rewards) >= STILL_LEARNT * best:
        return None
    # An expert iteration step that found nothing to learn has no entropy, and NaN is below nothing.
    if all(entropy < rules.entropy_below for entropy in entropies[-rules.patience :]):
        return f"token entropy collapsed to {entropies[-1]:.2g} nats {times}, answer reward {rewards[-1]:.3f}"
    if max(lengths) < rules.length_below * start["val/response_length"]:
        return f"response length collapsed to {lengths[-1]:.1f} tokens {times}, answer reward {rewards[-1]:.3f}"
    return None
