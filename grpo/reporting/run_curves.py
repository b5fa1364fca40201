"""A figure of one run's curves."""

from __future__ import annotations

from pathlib import Path

from grpo.reporting.charts import draw_curves, frame, panels, save_figure
from grpo.reporting.curves import GIVEN_FORM, SHARES, STEP, TITLES, curves_of, has
from grpo.reporting.form_and_answer import FORM
from grpo.reporting.style import styles
from grpo.results.runs import REWARD, Run

SHOWN = (REWARD, FORM, GIVEN_FORM, "val/response_length", "token_entropy", "gradient_norm", "train/reward", "loss")


def draw_run(run: Run, path: Path) -> None:
    """Draw a GRPO run's curves over its steps, a panel for each metric of :data:`SHOWN` that it has; an SVG or a PNG."""
    shown = [column for column in SHOWN if has([run], column)]
    figure, axes = panels(len(shown), rows=2)
    for axis, column in zip(axes, shown, strict=True):
        draw_curves(axis, curves_of({run.arm: [run]}, column), styles([run.arm]))
        frame(axis, TITLES[column], STEP["grpo"], column in SHARES)
    save_figure(figure, path)
