"""Tables for people (Markdown), for programs (CSV), and the few numbers that `dvc metrics` follows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo import paths
from grpo.evaluation.statistics import format_interval
from grpo.files import read_json, whole_folder, write_json, write_text
from grpo.reporting.results import Run, experiments, read_runs, read_selection
from grpo.selection import mean_of_last
from grpo.study import Study


def write_tables(study: Study) -> None:
    """Write reports/tables/*.md, reports/results.csv and reports/summary.json."""
    baseline = read_json(paths.BASELINE_METRICS, made_by="math_baseline")
    rows, summary = [], {"zero_shot": {prompt: values["answer_reward"] for prompt, values in baseline.items()}}
    with whole_folder(paths.TABLES) as folder:
        write_text(folder / "zero_shot.md", zero_shot_table(baseline))
        for experiment in experiments(study):
            runs, selection = read_runs(study, experiment), read_selection(experiment)
            rows += [result_row(study, run) for run in runs]
            write_text(folder / f"{experiment}.md", experiment_table(runs, selection))
            summary[experiment] = {
                "winner": selection["winner"],
                "answer_reward": {candidate["arm"]: round(candidate["value"], 4) for candidate in selection["candidates"]},
            }
    pd.DataFrame(rows).to_csv(paths.REPORTS / "results.csv", index=False, lineterminator="\n")
    write_json(paths.SUMMARY, summary)


def result_row(study: Study, run: Run) -> dict[str, Any]:
    """One run as a row of reports/results.csv."""
    last = run.history.iloc[-1]
    return {
        "experiment": run.experiment,
        "arm": run.arm,
        "seed": run.seed,
        f"answer_reward_last_{study.selection.last_k}": mean_of_last(paths.RUNS / run.name, study.selection.last_k),
        **run.metrics,
        "last/token_entropy": last["token_entropy"],
        "max/gradient_norm": run.history["gradient_norm"].max(),
        "identity": run.config["identity"],
        "same_as": run.config["same_as"] or "",
    }


def zero_shot_table(baseline: dict[str, Any]) -> str:
    """The three outcome categories under each prompt."""
    names = list(next(iter(baseline.values()))["categories"])
    lines = [
        "| prompt | problems | " + " | ".join(names) + " | answer reward (95% interval) | mean response length |",
        "|---|---|" + "---|" * (len(names) + 2),
    ]
    for prompt, values in baseline.items():
        counts = " | ".join(str(values["categories"][name]) for name in names)
        length = f"{values['response_length']:.1f}"
        lines.append(f"| {prompt} | {values['problems']} | {counts} | {format_interval(values['accuracy'])} | {length} |")
    return "\n".join(lines) + "\n"


def experiment_table(runs: list[Run], selection: dict[str, Any]) -> str:
    """Final results of each arm: the number that counts with its interval, then what explains it."""
    lines = [
        f"| arm | answer reward, mean of last {selection['last_k']} (95% interval) | at start | best (step) | format reward "
        "| response length | token entropy | largest gradient norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for candidate in selection["candidates"]:
        of_arm = [run for run in runs if run.arm == candidate["arm"]]

        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        best = max(of_arm, key=lambda run: run.metrics["best/answer_reward"])
        arm = f"**{candidate['arm']}**" if candidate["arm"] == selection["winner"] else candidate["arm"]
        lines.append(
            f"| {arm} | {format_interval(candidate)} "
            f"| {mean([r.metrics['first/answer_reward'] for r in of_arm]):.3f} "
            f"| {best.metrics['best/answer_reward']:.3f} ({best.metrics['best/step']}) "
            f"| {mean([r.metrics['val/format_reward'] for r in of_arm]):.3f} "
            f"| {mean([r.metrics['val/response_length'] for r in of_arm]):.1f} "
            f"| {mean([r.history['token_entropy'].iloc[-1] for r in of_arm]):.3f} "
            f"| {max(r.history['gradient_norm'].max() for r in of_arm):.2f} |"
        )
    return "\n".join(lines) + "\n"
