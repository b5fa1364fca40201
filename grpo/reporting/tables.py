"""Tables for people (Markdown), for programs (CSV), and what `dvc metrics` follows beside the winners."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo.common.files import read_json, whole_folder, write_json, write_text
from grpo.reporting.baseline import best_of_n_table, breakdown_table, zero_shot_table
from grpo.reporting.what_it_would_take import NAME, contents, table
from grpo.results.claims import claims_table
from grpo.results.contrasts import not_a_matter_of_seeds, undecided
from grpo.results.runs import (
    Run,
    evaluations_counted,
    experiments,
    final_scores,
    read_baseline,
    read_best_of_n,
    read_runs,
    read_selection,
)
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.schema import Study


def write_tables(study: Study) -> None:
    """Write reports/tables/*, reports/results.csv and reports/summary.json."""
    baseline = read_baseline(study)
    sampled = read_best_of_n(study)
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"zero_shot": {prompt: values["answer_reward"] for prompt, values in baseline.items()}}
    claims = read_json(paths.CLAIMS, made_by="report", keys=("claims",))
    if sampled:
        summary["best_of_n"] = {prompt: _at_most_samples(values) for prompt, values in sampled.items()}
    with whole_folder(paths.TABLES) as folder:
        write_text(folder / "zero_shot.md", zero_shot_table(baseline))
        for by in ("level", "subject"):
            write_text(folder / f"zero_shot_by_{by}.md", breakdown_table(baseline, by))
        if sampled:
            write_text(folder / "best_of_n.md", best_of_n_table(sampled))
        write_text(folder / "claims.md", claims_table(claims, study.left_out))
        unknown = contents(undecided(study), not_a_matter_of_seeds(study))
        write_json(folder / f"{NAME}.json", unknown)
        write_text(folder / f"{NAME}.md", table(unknown["undecided"]))
        for experiment in experiments(study):
            runs, selection = read_runs(study, experiment), read_selection(experiment)
            rows += [result_row(study, run) for run in runs]
            write_text(folder / f"{experiment}.md", experiment_table(runs, selection))
    verdicts = [claim["verdict"] for claim in claims["claims"]]
    summary["claims"] = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
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
        "answer_reward": float(final_scores([run], study.last_k(run.experiment)).mean()),
        "last_k": study.last_k(run.experiment),
        "evaluations_counted": evaluations_counted(run.outcomes, study.last_k(run.experiment)),
        **run.metrics,
        "last/token_entropy": last["token_entropy"],
        "max/gradient_norm": run.history["gradient_norm"].max(),
        "identity": run.config["identity"],
        "same_as": run.config["same_as"] or "",
    }


def experiment_table(runs: list[Run], selection: dict[str, Any], times: dict[str, tuple[float, float]] | None = None) -> str:
    """Final results of each arm: the number that counts with its interval, how far it is behind, then what explains it.

    Args:
        times: seconds and GPU-hours of each arm's runs together; without it the table is the same in every repetition.
    """
    columns = [
        "arm",
        f"answer reward, mean of last {selection['last_k']} (95% interval)",
        *([f"below {selection['leader']} (95% interval)"] if len(selection["candidates"]) > 1 else []),
        "at start",
        "best (step)",
        "format reward",
        "response length",
        "token entropy",
        "largest gradient norm",
        *(["seconds", "GPU-hours"] if times is not None else []),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for candidate in selection["candidates"]:
        cells = _cells([run for run in runs if run.arm == candidate["arm"]], candidate, selection)
        if times is not None:
            seconds, gpu_hours = times[candidate["arm"]]
            cells += [f"{seconds:.0f}", f"{gpu_hours:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_ended_early(runs, selection)]) + "\n"


def _ended_early(runs: list[Run], selection: dict[str, Any]) -> list[str]:
    """Which runs count by fewer evaluations than the column's head says, and why; nothing where there are none."""

    def why(run: Run) -> str:
        for reason in ("diverged", "time_limit"):
            if run.metrics[f"{reason}_step"] is not None:
                return f", {'diverged' if reason == 'diverged' else 'its time was up'} at step {run.metrics[f'{reason}_step']}"
        return ""

    counted = {run.name: evaluations_counted(run.outcomes, selection["last_k"]) for run in runs}
    early = [f"{run.name} ({counted[run.name]}{why(run)})" for run in runs if counted[run.name] < selection["last_k"]]
    return ["", f"Fewer evaluations than {selection['last_k']} count in: {'; '.join(early)}."] if early else []


def _cells(runs: list[Run], candidate: dict[str, Any], selection: dict[str, Any]) -> list[str]:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    best = max(runs, key=lambda run: run.metrics["best/answer_reward"])
    name = f"**{candidate['arm']}**" if candidate["arm"] == selection["winner"] else candidate["arm"]
    ends = [str(run.metrics["diverged_step"]) for run in runs if run.metrics["diverged_step"] is not None]
    return [
        name + (f" (diverged at step {', '.join(ends)})" if ends else ""),
        format_interval(candidate),
        *([_behind(candidate)] if len(selection["candidates"]) > 1 else []),
        f"{mean([run.metrics['first/answer_reward'] for run in runs]):.3f}",
        f"{best.metrics['best/answer_reward']:.3f} ({best.metrics['best/step']})",
        f"{mean([run.metrics['val/format_reward'] for run in runs]):.3f}",
        f"{mean([run.metrics['val/response_length'] for run in runs]):.1f}",
        f"{mean([run.history['token_entropy'].iloc[-1] for run in runs]):.3f}",
        f"{max(run.history['gradient_norm'].max() for run in runs):.2f}",
    ]


def _behind(candidate: dict[str, Any]) -> str:
    return "leads" if candidate["behind"] is None else format_interval(candidate["behind"])
