"""Tables for people (Markdown), for programs (CSV), and the few numbers that `dvc metrics` follows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo import paths
from grpo.evaluation.statistics import format_interval
from grpo.files import read_json, whole_folder, write_json, write_text
from grpo.reporting.baseline import best_of_n_table, breakdown_table, zero_shot_table
from grpo.reporting.results import Run, experiments, read_runs, read_selection
from grpo.selection import mean_of_last
from grpo.study import Study


def write_tables(study: Study) -> None:
    """Write reports/tables/*.md, reports/results.csv and reports/summary.json."""
    baseline = read_json(paths.BASELINE_METRICS, made_by="math_baseline")
    sampled = read_json(paths.BEST_OF_N_METRICS, made_by="best_of_n")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"zero_shot": {prompt: values["answer_reward"] for prompt, values in baseline.items()}}
    summary["best_of_n"] = {prompt: _at_most_samples(values) for prompt, values in sampled.items()}
    with whole_folder(paths.TABLES) as folder:
        write_text(folder / "zero_shot.md", zero_shot_table(baseline))
        for by in ("level", "subject"):
            write_text(folder / f"zero_shot_by_{by}.md", breakdown_table(baseline, by))
        write_text(folder / "best_of_n.md", best_of_n_table(sampled))
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


def _at_most_samples(values: dict[str, Any]) -> dict[str, float]:
    n, kinds = list(values["n"].items())[-1]
    return {f"{kind}_at_{n}": round(estimate["value"], 4) for kind, estimate in kinds.items()}


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
