"""Early end of a run: it has diverged, or it has reached its time limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from grpo.study.methods import TrainingConfig
from grpo.study.settings import Divergence, Score

STILL_LEARNT = 0.5  # with this share of its best reward, a run of short or low-entropy responses has not collapsed
RISEN = 0.1  # a best reward so far above the start is no chance of 100 problems


def divergence(
    rules: Divergence,
    validations: Sequence[dict[str, float]],
    entropies: Sequence[float],
    skipped_in_a_row: int,
    metric: Score = "answer_reward",
) -> str | None:
    """Say why a run counts as diverged; None if it does not.

    Args:
        validations: all evaluations so far, the starting policy's first; each with ``val/METRIC`` and ``val/response_length``.
        metric: the reward by which runs are compared. Rules on shares of a reward need a positive one.
        entropies: mean token entropy (nats) of the last update before each evaluation except the first.
        skipped_in_a_row: the latest consecutive optimizer steps without a finite gradient.
    """
    if skipped_in_a_row >= rules.skipped_updates:
        return f"the gradient was not finite in {skipped_in_a_row} optimizer steps in a row"
    start, recent = validations[0], list(validations[1:])[-rules.patience :]
    if len(recent) < rules.patience:
        return None
    column, name = f"val/{metric}", metric.replace("_", " ")
    began, rewards = start[column], [row[column] for row in recent]
    lengths = [row["val/response_length"] for row in recent]
    times = f"in {rules.patience} evaluations in a row"
    if max(rewards) < rules.reward_below_start * began and began > 0:
        return f"{name} {rewards[-1]:.3f}, under its start of {began:.3f} {times}"
    best = max(row[column] for row in validations)
    if rules.stop_when_collapsed and best - began > RISEN and best > 0 and max(rewards) < rules.collapsed_below * best:
        return f"{name} {rewards[-1]:.3f}, under {rules.collapsed_below:g} of its best of {best:.3f} {times}"
    if best > 0 and max(rewards) >= STILL_LEARNT * best:
        return None
    # An expert iteration step without an update has entropy NaN, which compares as False.
    if all(entropy < rules.entropy_below for entropy in entropies[-rules.patience :]):
        return f"token entropy collapsed to {entropies[-1]:.2g} nats {times}, {name} {rewards[-1]:.3f}"
    if max(lengths) < rules.length_below * start["val/response_length"]:
        return f"response length collapsed to {lengths[-1]:.1f} tokens {times}, {name} {rewards[-1]:.3f}"
    return None


@dataclass
class Stopping:
    """Counts that decide whether a run ends, and why it ended.

    Attributes:
        metric: the reward by which runs are compared.
        skipped: the latest consecutive optimizer steps without a finite gradient.
        skipped_in_all: all such steps of the run.
        entropies: see :func:`divergence`.
        diverged_step, diverged_reason, time_limit_step: when and why the run ended early.
    """

    metric: Score = "answer_reward"
    skipped: int = 0
    skipped_in_all: int = 0
    entropies: list[float] = field(default_factory=list)
    diverged_step: int | None = None
    diverged_reason: str = ""
    time_limit_step: int | None = None

    def count(self, updates: Sequence[dict[str, float]]) -> None:
        """Count the skipped optimizer steps of one step."""
        for update in updates:
            # In float16 an overflow halves the loss scale. Only at a scale of 1 or less is it a fault of the run.
            scaled = update.get("loss_scale", 1.0) > 1.0 and math.isfinite(update["loss"])
            self.skipped = self.skipped + 1 if update["skipped_update"] and not scaled else 0
            self.skipped_in_all += int(update["skipped_update"])

    def must_end(
        self,
        step: int,
        config: TrainingConfig,
        rules: Divergence | None,
        seen: Sequence[dict[str, float]],
        seconds: float,
    ) -> bool:
        """Whether the run ends early, after this step; ``seen`` are all evaluations so far, ``seconds`` its duration."""
        limit = config.wall_clock_limit_s
        in_between = 0 < step < config.n_steps  # a limit exceeded in the last step has cut nothing short
        if limit is not None and in_between and seconds > limit:
            self.time_limit_step = step
        if rules is not None:
            reason = divergence(rules, seen, self.entropies, self.skipped, self.metric)
            if reason:
                self.diverged_step, self.diverged_reason = step, reason
                tqdm.write(f"step {step}: diverged, {reason}. The run ends here and is kept (`divergence:` in params.yaml).")
        return self.diverged_step is not None or self.time_limit_step is not None

    def state(self) -> dict[str, Any]:
        """The counts, to be saved."""
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
