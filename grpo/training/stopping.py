"""When a run ends before its last step: it has clearly diverged, or its time is up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from grpo.study.methods import TrainingConfig
from grpo.study.settings import Divergence
from grpo.tracking.run_log import RunLog

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


@dataclass
class Stopping:
    """What decides whether a run ends now, as gathered so far.

    Attributes:
        skipped: optimizer steps without a finite gradient, in a row up to now.
        skipped_in_all: of the whole run.
        entropies: see :func:`divergence`.
        diverged_step, diverged_reason, time_limit_step: when and why the run was ended.
    """

    skipped: int = 0
    skipped_in_all: int = 0
    entropies: list[float] = field(default_factory=list)
    diverged_step: int | None = None
    diverged_reason: str = ""
    time_limit_step: int | None = None

    def count(self, updates: Sequence[dict[str, float]]) -> None:
        """Take note of a step's optimizer steps."""
        for update in updates:
            # In float16 a gradient that is too large only halves the loss scale; from 1 on it is as in any other precision.
            scaled = update.get("loss_scale", 1.0) > 1.0 and math.isfinite(update["loss"])
            self.skipped = self.skipped + 1 if update["skipped_update"] and not scaled else 0
            self.skipped_in_all += int(update["skipped_update"])

    def must_end(self, step: int, config: TrainingConfig, rules: Divergence | None, log: RunLog) -> bool:
        """Whether the run ends with this step, though it may not be its last one."""
        limit = config.wall_clock_limit_s
        in_between = step < config.n_steps  # a limit that is passed in the last step has cut nothing short
        if limit is not None and in_between and log.elapsed_s > limit:
            self.time_limit_step = step
        if rules is not None:
            reason = divergence(rules, log.validations, self.entropies, self.skipped)
            if reason:
                self.diverged_step, self.diverged_reason = step, reason
                tqdm.write(f"step {step}: diverged, {reason}. The run ends here and is kept (`divergence:` in params.yaml).")
        return self.diverged_step is not None or self.time_limit_step is not None

    def ending(self) -> dict[str, Any]:
        """For metrics.json: when and why the run was ended."""
        return {name: getattr(self, name) for name in ("diverged_step", "diverged_reason", "time_limit_step")}

    def state(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        vars(self).update(state)
