"""The learning rate of each update."""

from __future__ import annotations

import math

from grpo.study.methods import RunConfig


def learning_rate(config: RunConfig, update: int) -> float:
    """The rate of one update: it rises linearly from 0 over ``warmup_steps`` updates, and then stays (``constant``), or falls
    linearly or along half a cosine so that it would be 0 one update after the last.

    The rates are those of transformers' ``get_scheduler`` (``constant`` is its ``constant_with_warmup``), so the first of the
    warm-up updates has rate 0. The cosine: SGDR, arXiv 1608.03983, Equation 5, without restarts. A run that is taken up again
    goes on with the same rates, as they depend on the arguments alone.

    Args:
        update: how many updates the run has had before, skipped ones too.
    """
    peak, warmup, total = config.learning_rate, config.warmup_steps, config.n_updates
    if update < warmup:
        return peak * update / warmup
    if config.lr_scheduler_type == "constant" or total is None:
        return peak
    done = (update - warmup) / (total - warmup)
    return peak * (1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
