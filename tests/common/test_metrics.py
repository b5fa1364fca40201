"""The table of metrics; `test_training_loop.py` has that what a run logs is in it."""

from __future__ import annotations

from grpo.common.metrics import METRICS, UNITS


def test_each_name_has_one_entry_and_a_title() -> None:
    assert len(UNITS) == len(METRICS) and all(metric.title for metric in METRICS)
    assert len({metric.label for metric in METRICS if metric.charted}) == sum(metric.charted for metric in METRICS)
