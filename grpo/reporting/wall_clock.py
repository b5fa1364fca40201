"""Wall-clock results (reports/timing): seconds of runs and of a step by component, reward over time, methods compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import whole_folder, write_text
from grpo.reporting.charts import INK, METHODS, Style, bars, readable, save_figures
from grpo.reporting.curves import Panel, curves_figure, named, over_seconds
from grpo.reporting.record import Record
from grpo.reporting.sentences import interval, paragraph, table
from grpo.reporting.tables import best_evaluation
from grpo.reporting.timing import read_timing, time_row
from grpo.results.intervals import difference_of
from grpo.results.runs import REWARD, Run, by_arm, final_scores, first_scores, value
from grpo.study import paths
from grpo.study.schema import Study

REWARD_OVER_SECONDS = [Panel(REWARD, "seconds without evaluation", over_seconds)]
SFT = "supervised fine-tuning"
GOAL = 1.15  # goal: a step takes at most so many times the longer of generation and training
PARTS = {  # in a timing file -> in the table
    "rollout": "rollout",
    "scoring": "scoring",
    "training": "training",
    "synchronization": "weights sent",
    "generator_synchronization": "weights loaded",
    "waiting": "learner waits",
    "generator_waiting": "generator waits",
    "step": "step",
}
APART_ONLY = ("generator_synchronization", "waiting", "generator_waiting")
WEIGHTS, WAITING = "weights sent or loaded", "waiting for the other side"
COLOURS = {"rollout": "#0072B2", "scoring": "#E69F00", "training": "#009E73", WEIGHTS: "#CC79A7", WAITING: "#999999"}
# The parts of each bar, with their entries in the legend.
TURNS = {"rollout": "rollout", "scoring": "scoring", "training": "training", WEIGHTS: "synchronization"}
GENERATOR = {"rollout": "rollout", WEIGHTS: "generator_synchronization", WAITING: "generator_waiting"}
LEARNER = {"training": "training", WEIGHTS: "synchronization", WAITING: "waiting"}

Steps = Sequence[Mapping[str, float]]  # as in a timing file; times in seconds
Times = dict[str, Any]  # a row of :func:`times_of_steps`


def write_timing(record: Record) -> None:
    """Write reports/timing: times.csv, figures over wall-clock time (SVG and PNG), methods.md and time_breakdown.md."""
    figures: dict[str, Figure] = {}
    with whole_folder(paths.TIMING_REPORT) as folder:
        rows = [time_row(record.study, run) for run in record.all_runs]
        pd.DataFrame(rows).to_csv(folder / "times.csv", index=False, lineterminator="\n")
        for experiment in record.study.with_report("wall_clock"):
            figures[experiment] = curves_figure(arms_over_time(record, experiment), REWARD_OVER_SECONDS)
        if record.study.with_report("methods"):
            found = methods(record)
            figures["methods"] = draw_methods(record.study, found)
            write_text(folder / "methods.md", methods_table(record.study, found))
        if compared := record.runs_with("colocated", "staleness"):
            times = times_of_steps(compared)
            figures["time_breakdown"] = draw_components(times)
            write_text(folder / "time_breakdown.md", f"{components_table(times)}\n{discuss_overlap(times)}\n")
        save_figures(figures, folder)


def arms_over_time(record: Record, experiment: str) -> dict[str, list[Run]]:
    """The arms in an experiment's figure over wall-clock time; with asynchronous ones also the one-process arm."""
    arms = named(record.runs[experiment])
    compared = record.one_process if experiment in record.study.with_report("staleness") else []
    return arms | ({f"{readable(compared[0].arm)}, one process": compared} if compared else {})


def methods(record: Record) -> dict[str, list[Run]]:
    """The runs that represent each method: the winners of SFT and expert iteration, and GRPO's best configuration."""
    found = {}
    for method, title in {"sft": SFT, "expert_iteration": "expert iteration"}.items():
        for experiment in (name for name in record.runs if record.study.experiments[name].method == method):
            winner = record.results[experiment].winner
            found[f"{title} ({readable(winner)})"] = by_arm(record.runs[experiment])[winner]
    for arm, runs in by_arm(record.runs_with("methods")).items():
        if value(runs[0], "start_from") is None:
            found[f"GRPO, best configuration ({readable(arm)})"] = runs
    return found


def methods_table(study: Study, found: dict[str, list[Run]]) -> str:
    """Table of methods: answer reward, difference from supervised fine-tuning and from GRPO (the last one), and seconds."""
    scores = {title: final_scores(runs, study.last_k(runs[0].experiment)) for title, runs in found.items()}
    *_, grpo = scores
    others = [*((SFT, title) for title in scores if title.startswith(SFT)), ("GRPO", grpo)]
    rows = []
    for title, runs in found.items():
        times = pd.DataFrame([time_row(study, run) for run in runs])
        rows.append(
            {
                "method": title,
                "answer reward": f"{scores[title].mean():.3f}",
                **{
                    f"above {name} (95% interval)": ""
                    if title == other
                    else interval(difference_of(scores[other], scores[title]))
                    for name, other in others
                },
                "best (step)": best_evaluation(runs),
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


def times_of_steps(runs: list[Run]) -> list[Times]:
    """Average each arm's times over the steady steps of all its runs.

    Returns:
        a row per arm: ``arm``, ``lag`` (``max_policy_lag``; None in one process), ``restarts`` (of actors, over all its runs),
        ``samples`` (responses of a step), ``steps`` (number averaged) and, unless it is 0, :func:`mean_times` of the steps.
    """
    found = []
    for arm, of_arm in by_arm(runs).items():
        apart = value(of_arm[0], "asynchronous")
        lag = None if apart is None else int(apart["max_policy_lag"])
        timings = [(run.validation["step"].tolist(), read_timing(run)) for run in of_arm]
        steps = [step for evaluated, timing in timings for step in steady_steps(timing["steps"], evaluated, lag)]
        restarts = sum(sum(timing["restarts"].values()) for _, timing in timings)
        about = {"arm": arm, "lag": lag, "restarts": restarts, "samples": value(of_arm[0], "rollout_batch_size")}
        found.append(about | {"steps": len(steps)} | mean_times(steps))
    return found


def steady_steps(steps: Steps, evaluated: Collection[int], lag: int | None) -> list[Mapping[str, float]]:
    """The steps that no evaluation affects.

    The rollouts of the 1 + ``lag`` steps after an evaluation were requested before it. The generator finishes them during the
    evaluation, so the learner does not wait for them, and the generator is idle before those of the next step. These
    2 + ``lag`` steps are left out; in one process (None), the first one.

    Args:
        evaluated: the steps after which the policy was evaluated, including 0 (the untrained model).
    """
    left_out = 1 if lag is None else 2 + lag
    affected = {step + i for step in evaluated for i in range(1, left_out + 1)}
    return [step for step in steps if step["step"] not in affected]


def mean_times(steps: Steps) -> Times:
    """Mean seconds of ``PARTS`` (0 if a run has no such part); empty without steps.

    Also the ``longer`` of rollout and training, with its ``share`` of the step (1 if all else overlaps with it).
    """
    if not steps:
        return {}
    means = pd.DataFrame(steps).reindex(columns=[f"{part}_s" for part in PARTS]).fillna(0.0).mean()
    times: Times = dict(zip(PARTS, means.tolist(), strict=True))
    longer = max(times["rollout"], times["training"])
    return times | {"longer": longer, "share": longer / times["step"]}


def draw_components(found: list[Times]) -> Figure:
    """Draw the seconds of a step: one bar for one process, two (generator above learner) for asynchronous arms.

    A number beside each gives the longer of rollout and training by the step, a stroke the goal: ``GOAL`` times the longer.
    """
    widths: dict[str, dict[str, float]] = {}
    marks, goals = [], []
    for times in found:
        name = readable(times["arm"])
        if not times["steps"]:
            widths[f"{name}: too few steps"] = {}
            continue
        apart, goal = times["lag"] is not None, GOAL * times["longer"]
        sides = {"generator": GENERATOR, "learner": LEARNER} if apart else {"one process": TURNS}
        own = {f"{name}: {side}": {kind: times[part] for kind, part in parts.items()} for side, parts in sides.items()}
        end = max(sum(parts.values()) for parts in own.values())
        marks.append((len(widths), max(end, goal) if apart else end, f"{times['share']:.2f}"))
        goals += [(place, goal) for place in range(len(widths), len(widths) + len(own)) if apart]
        widths |= own
    frame = pd.DataFrame.from_dict(widths, orient="index").reindex(index=list(widths), columns=list(COLOURS)).fillna(0.0)
    figure, axes = bars(frame, COLOURS, 1.7 + 0.24 * len(widths))
    for place, goal in goals:
        axes.vlines(goal, place - 0.45, place + 0.45, color=INK, linewidth=2)
    for place, end, share in marks:
        axes.annotate(share, (end, place), (4, 0), textcoords="offset points", va="center")
    axes.set_xlabel(
        f"seconds of a step, mean;\nnumber: the longer of rollout and\ntraining by the step;\nstroke: {GOAL:g} times the longer"
    )
    return figure


def components_table(found: list[Times]) -> str:
    """Mean seconds of a step and its parts, samples per second, speedup over one process; one row per arm (Markdown)."""
    single = _one_process(found)

    def cell(times: Times, part: str) -> str:
        unknown = not times["steps"] or (times["lag"] is None and part in APART_ONLY)
        return "" if unknown else f"{times[part]:.3f}"

    return table(
        {"arm": times["arm"], "steps": times["steps"]}
        | {title: cell(times, part) for part, title in PARTS.items()}
        | {"longer of rollout and training, share of step": f"{times['share']:.2f}" if times["steps"] else ""}
        | {"samples per second": f"{times['samples'] / times['step']:.0f}" if times["steps"] else ""}
        | (
            {f"speedup over {single['arm']}": f"{single['step'] / times['step']:.2f}" if times["steps"] else ""}
            if single
            else {}
        )
        for times in found
    )


def _one_process(found: list[Times]) -> Times | None:
    """The first arm in one process with measured steps."""
    return next((times for times in found if times["steps"] and times["lag"] is None), None)


def discuss_overlap(found: list[Times]) -> str:
    """State which arms reach the goal for overlap, and how long a step takes compared with one process."""
    timed = [times for times in found if times["steps"]]
    apart = [times for times in timed if times["lag"] is not None]
    overlapping = [times for times in apart if times["lag"]]
    groups = {
        "These meet it": [times for times in overlapping if times["step"] <= GOAL * times["longer"]],
        "These miss it": [times for times in overlapping if times["step"] > GOAL * times["longer"]],
        "With no lag the two take turns and cannot meet it": [times for times in apart if not times["lag"]],
    }
    return paragraph(
        "components_sentences.md.j2",
        goal=GOAL,
        groups=groups,
        apart=apart,
        single=_one_process(found),
        short=[times for times in found if not times["steps"]],
        early=[times for times in apart if times["share"] > 1],
        restarted=[times for times in found if times["restarts"]],
    )
