"""Tables (Markdown), results.csv, and summary.json for `dvc metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from grpo.common.files import whole_folder, write_json, write_text
from grpo.common.safe_text import short
from grpo.reporting import what_it_would_take
from grpo.reporting.charts import averaged
from grpo.reporting.curves import ENTROPY, NORM
from grpo.reporting.discussion import Numbers, as_plain
from grpo.reporting.record import Record
from grpo.reporting.sentences import decimals, interval, markdown_table, table
from grpo.results.findings import Verdict
from grpo.results.runs import Run, by_arm, evaluations_counted, final_scores
from grpo.study import paths
from grpo.study.schema import Study
from grpo.tasks.mixture import Mixture

KINDS = {"pass": "pass@N", "best": "Best@N", "majority": "majority@N"}


def write_tables(record: Record) -> None:
    """Write reports/tables/*, reports/results.csv and reports/summary.json."""
    study = record.study
    texts = general_tables(record) | {name: experiment_table(of) for name, of in record.numbers.items()}
    texts["what_it_would_take"] = what_it_would_take.table(record.unknown["undecided"])
    with whole_folder(paths.TABLES) as folder:
        for name, text in texts.items():
            write_text(folder / f"{name}.md", text)
        write_json(folder / "what_it_would_take.json", record.unknown)
        write_json(folder / "numbers.json", {name: as_plain(of) for name, of in record.numbers.items()})
    rows = [result_row(study, run) for run in record.all_runs]
    pd.DataFrame(rows).to_csv(paths.REPORTS / "results.csv", index=False, lineterminator="\n")
    summary: dict[str, Any] = {"zero_shot": {prompt: values["answer_reward"] for prompt, values in record.baseline.items()}}
    if record.sampled:
        summary["best_of_n"] = {prompt: _at_most_samples(values) for prompt, values in record.sampled.items()}
    write_json(paths.SUMMARY, summary | {"claims": Counter(verdict.verdict for verdict in record.claims)})


def general_tables(record: Record) -> dict[str, str]:
    """The tables that are not of one experiment: name -> Markdown."""
    return {
        "zero_shot": zero_shot_table(record.baseline),
        **{f"zero_shot_by_{by}": breakdown_table(record.baseline, by) for by in ("level", "subject")},
        **({"best_of_n": best_of_n_table(record.sampled)} if record.sampled else {}),
        "claims": claims_table(record.verdicts),
    }


def claims_table(verdicts: list[Verdict]) -> str:
    """What was reported and what was measured, with a verdict, for each claim."""
    rows = [
        [
            verdict.statement,
            verdict.experiment,
            "<br>".join(f"{source}: {text}" for source, text in verdict.reported.items()),
            verdict.measured,
            f"**{verdict.label}**<br>{verdict.reason}",
        ]
        for verdict in verdicts
    ]
    return markdown_table(["claim", "experiment", "reported", "measured here", "verdict"], rows)


def zero_shot_table(baseline: dict[str, Any]) -> str:
    """Number of responses in each outcome category, answer reward and length, by prompt."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)
    return table(
        {"prompt": prompt, "problems": values["problems"]}
        | {name: values["categories"].get(name, 0) for name in names}
        | {
            "answer reward (95% interval)": interval(values["accuracy"]),
            "mean response length": f"{values['response_length']:.1f}",
        }
        for prompt, values in baseline.items()
    )


def breakdown_table(baseline: dict[str, Any], by: str) -> str:
    """Accuracy with its 95% Wilson interval by ``level`` or ``subject``, one column per prompt."""
    parts = {prompt: values[f"accuracy_by_{by}"] for prompt, values in baseline.items()}
    return table(
        {by: short(name), "problems": values["problems"]} | {prompt: interval(part[name]) for prompt, part in parts.items()}
        for name, values in next(iter(parts.values())).items()
    )


def best_of_n_table(metrics: dict[str, Any]) -> str:
    """pass@N, Best@N and majority vote for each N and prompt."""
    return table(
        {"prompt": prompt, "N": n} | {title: interval(kinds[kind]) for kind, title in KINDS.items()}
        for prompt, values in metrics.items()
        for n, kinds in values["n"].items()
    )


def _at_most_samples(values: dict[str, Any]) -> dict[str, float]:
    n, kinds = list(values["n"].items())[-1]
    return {f"{kind}_at_{n}": round(estimate["value"], 4) for kind, estimate in kinds.items()}


def result_row(study: Study, run: Run) -> dict[str, Any]:
    """A run's row of reports/results.csv."""
    last_k = study.last_k(run.experiment)
    return {
        "experiment": run.experiment,
        "arm": run.arm,
        "seed": run.seed,
        "answer_reward": float(final_scores([run], last_k).mean()),
        "last_k": last_k,
        "evaluations_counted": evaluations_counted(run.outcomes, last_k),
        **run.metrics,
        "last/token_entropy": run.history[ENTROPY].iloc[-1],
        "max/gradient_norm": run.history[NORM].max(),
        "identity": run.config["identity"],
        "same_as": run.config["same_as"] or "",
    }


def experiment_table(numbers: Numbers) -> str:
    """Table of arms: answer reward, distance to the leader, form, accuracy given the form, length and collapsed runs."""
    leader, last_k, several = numbers["leader"]["arm"], numbers["last_k"], len(numbers["arms"]) > 1
    rows = []
    for arm in numbers["arms"]:
        after = arm["after"]
        row = {
            "arm": f"**{arm['arm']}**" if arm is numbers["winner"] and several else arm["arm"],
            "at start": decimals(arm["start"].value),
            f"answer reward, {averaged(last_k)} (95% over {numbers['covers']})": interval(arm["final"]),
        }
        if several:
            row[f"below {leader}"] = interval(arm["below"]) if arm["below"] else "leads"
        row["form right"] = decimals(after.form) if after else ""
        row["answer right, given the form"] = decimals(after.within) if after else ""
        row["response length"] = decimals(arm["length"][1], 1) if arm["length"] else ""
        if numbers["collapsed"]:
            row["runs that collapsed"] = f"{len(arm['collapses'])} of {len(arm['runs'])}"
        rows.append(row)
    early = [
        f"{run.name} ({counted}{_ended(run)})"
        for arm in numbers["arms"]
        for run in arm["all"]
        if (counted := evaluations_counted(run.outcomes, last_k)) < last_k
    ]
    return table(rows) + (f"\nFewer evaluations than {last_k} count in: {'; '.join(early)}.\n" if early else "")


def _ended(run: Run) -> str:
    """Why a run ended early."""
    reasons = {"diverged": run.metrics["diverged_step"], "time limit": run.metrics["time_limit_step"]}
    return next((f", {reason} at step {step}" for reason, step in reasons.items() if step is not None), "")


def further_sets_table(study: Study, runs: list[Run]) -> str:
    """Table of answer rewards on further evaluation sets, mean over seeds; empty without such sets."""
    sets = study.also_evaluated(study.experiments[runs[0].experiment].task)
    return _by_column("set", {name: f"val/also/{name}/answer_reward" for name in sets}, runs)


def mixture_table(study: Study, runs: list[Run]) -> str:
    """Table of answer rewards on each task of a mixture, mean over seeds; empty for another task."""
    task = study.task(study.experiments[runs[0].experiment].task)
    parts = task.parts if isinstance(task, Mixture) else ()
    return _by_column("task", {name: f"val/{name}/answer_reward" for name in parts}, runs)


def _by_column(head: str, columns: Mapping[str, str], runs: list[Run]) -> str:
    """Table of columns of validation.csv: first and last value of each arm, without NaN (steps without this evaluation)."""
    rows = []
    for name, column in columns.items():
        for arm, of_arm in by_arm(runs).items():
            measured = [values for run in of_arm if len(values := run.validation[column].dropna())]
            if measured:
                first, last = (decimals(sum(of.iloc[place] for of in measured) / len(measured)) for place in (0, -1))
                row = {head: name, "arm": arm, "before training": first, "at its last evaluation": last}
                rows.append(row | {"runs": len(measured)})
    return table(rows) if rows else ""


def best_evaluation(runs: list[Run]) -> str:
    """The highest answer reward of any evaluation, and its step: ``0.712 (48)``."""
    best = max((run.metrics for run in runs), key=lambda metrics: float(metrics["best/answer_reward"]))
    return f"{best['best/answer_reward']:.3f} ({best['best/step']})"


def details_table(numbers: Numbers, times: dict[str, tuple[float, float]]) -> str:
    """Table of arms: best evaluation, entropy, gradient norm, and total seconds.

    Args:
        times: arm -> seconds and GPU-hours; the table has a column of GPU-hours if there are any.
    """
    on_gpus = any(gpu_hours for _, gpu_hours in times.values())
    rows = []
    for arm in numbers["arms"]:
        runs, (seconds, gpu_hours) = arm["held"], times[arm["arm"]]
        norms = pd.concat([run.history[NORM] for run in runs])
        row = {
            "arm": arm["arm"],
            "best (step)": best_evaluation(runs),
            "token entropy in training": decimals(sum(run.history[ENTROPY].iloc[-1] for run in runs) / len(runs)),
            "gradient norm, median": decimals(norms.median(), 2),
            "largest": decimals(norms.max(), 2),
            "seconds": f"{seconds:.0f}",
        }
        rows.append(row | ({"GPU-hours": f"{gpu_hours:.2f}"} if on_gpus else {}))
    return table(rows)
