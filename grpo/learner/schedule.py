"""Learning rate schedules."""

from __future__ import annotations

import math

from grpo.study.methods import RunConfig


def learning_rate(config: RunConfig, update: int) -> float:
    """Learning rate of one update.

    It rises linearly from 0 over ``warmup_steps`` updates. Then it stays (``constant``), or it falls linearly or along half a
    cosine (SGDR, arXiv 1608.03983, Equation 5, without restarts), to reach 0 one update after the last. The rates equal those
    of transformers' ``get_scheduler`` (``constant`` is its ``constant_with_warmup``), so the first warm-up update has rate 0.
    They depend on the arguments only, so a resumed run continues with the same rates.

    Args:
        update: number of updates before this one, including skipped ones.
    """
    peak, warmup, total = config.learning_rate, config.warmup_steps, config.n_updates
    if update < warmup:
        return peak * update / warmup
    if config.lr_scheduler_type == "constant" or total is None:
        return peak
    done = (update - warmup) / (total - warmup)
    return peak * (1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
