"""Wall-clock results (reports/timing): seconds of each run, reward over time, methods compared, seconds of a step."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import whole_folder, write_text
from grpo.reporting.charts import save_figures
from grpo.reporting.components import components_table, discuss_overlap, draw_components, times_of_steps
from grpo.reporting.curves import Panel, curves_figure, named, over_seconds
from grpo.reporting.pieces import one_process
from grpo.reporting.record import Record
from grpo.reporting.sentences import interval, table
from grpo.reporting.style import METHODS, Style, readable
from grpo.reporting.timing import time_row
from grpo.results.intervals import difference_of
from grpo.results.runs import REWARD, Run, by_arm, final_scores, first_scores, value
from grpo.study import paths
from grpo.study.schema import Study

REWARD_OVER_SECONDS = [Panel(REWARD, "seconds without evaluation", over_seconds)]


def write_timing(record: Record) -> None:
    """Write reports/timing: times.csv, figures over wall-clock time (SVG and PNG), methods.md and time_breakdown.md."""
    figures: dict[str, Figure] = {}
    with whole_folder(paths.TIMING_REPORT) as folder:
        rows = [time_row(record.study, run) for run in record.all_runs]
        pd.DataFrame(rows).to_csv(folder / "times.csv", index=False, lineterminator="\n")
        for experiment in record.with_piece("wall_clock"):
            figures[experiment] = curves_figure(arms_over_time(record, experiment), REWARD_OVER_SECONDS)
        if record.with_piece("methods"):
            found = methods(record)
            figures["methods"] = draw_methods(record.study, found)
            write_text(folder / "methods.md", methods_table(record.study, found))
        if compared := record.with_piece("colocated", "staleness"):
            times = times_of_steps([run for name in compared for run in record.runs[name]])
            figures["time_breakdown"] = draw_components(times)
            write_text(folder / "time_breakdown.md", f"{components_table(times)}\n{discuss_overlap(times)}\n")
        save_figures(figures, folder)


def arms_over_time(record: Record, experiment: str) -> dict[str, list[Run]]:
    """The arms in an experiment's figure over wall-clock time; with asynchronous ones also the one-process arm."""
    arms = named(record.runs[experiment])
    compared = one_process(record) if experiment in record.with_piece("staleness") else []
    return arms | ({f"{readable(compared[0].arm)}, one process": compared} if compared else {})


def methods(record: Record) -> dict[str, list[Run]]:
    """The runs that represent each method: the winners of SFT and expert iteration, and GRPO's best configuration."""
    found = {}
    for method, title in {"sft": "supervised fine-tuning", "expert_iteration": "expert iteration"}.items():
        for experiment in (name for name in record.runs if record.study.experiments[name].method == method):
            winner = record.results[experiment].winner
            found[f"{title} ({readable(winner)})"] = by_arm(record.runs[experiment])[winner]
    for arm, runs in by_arm([run for name in record.with_piece("methods") for run in record.runs[name]]).items():
        if value(runs[0], "start_from") is None:
            found[f"GRPO, best configuration ({readable(arm)})"] = runs
    return found


def methods_table(study: Study, found: dict[str, list[Run]]) -> str:
    """Table of methods: answer reward, difference from GRPO (the last one), and seconds."""
    scores = {title: final_scores(runs, study.last_k(runs[0].experiment)) for title, runs in found.items()}
    *_, grpo = scores
    rows = []
    for title, runs in found.items():
        times = pd.DataFrame([time_row(study, run) for run in runs])
        best = max(runs, key=lambda run: run.metrics["best/answer_reward"]).metrics
        rows.append(
            {
                "method": title,
                "answer reward": f"{scores[title].mean():.3f}",
                "above GRPO (95% interval)": "" if title == grpo else interval(difference_of(scores[grpo], scores[title])),
                "best (step)": f"{best['best/answer_reward']:.3f} ({best['best/step']})",
                "seconds per run": f"{np.mean(times['seconds']):.0f}",
                "of these training": f"{np.mean(times['training_seconds']):.0f}",
            }
        )
    untrained = {"method": "the base model, untrained", "answer reward": f"{first_scores(found[grpo]).mean():.3f}"}
    return table([dict.fromkeys(rows[0], "") | untrained, *rows])


def draw_methods(study: Study, found: dict[str, list[Run]]) -> Figure:
    """Draw the methods' validation answer reward over wall-clock time."""
    looks = {title: Style(METHODS[study.experiments[runs[0].experiment].method]) for title, runs in found.items()}
    return curves_figure(found, REWARD_OVER_SECONDS, looks)
