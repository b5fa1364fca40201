"""Tables (Markdown), results.csv, and summary.json for `dvc metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from grpo.common.files import whole_folder, write_json, write_text
from grpo.reporting.baseline import best_of_n_table, breakdown_table, zero_shot_table
from grpo.reporting.discussion import Numbers, as_plain
from grpo.reporting.sentences import decimals, interval
from grpo.reporting.what_it_would_take import NAME, contents, table
from grpo.results.claims import claims_table, read_verdicts, shown
from grpo.results.contrasts import not_a_matter_of_seeds, undecided
from grpo.results.markdown import markdown_table
from grpo.results.runs import Run, by_arm, evaluations_counted, final_scores, read_baseline, read_best_of_n
from grpo.study import paths
from grpo.study.schema import Study
from grpo.tasks.mixture import Mixture

_REWARD = "/answer_reward"


def write_tables(study: Study, numbers: Mapping[str, Numbers]) -> None:
    """Write reports/tables/*, reports/results.csv and reports/summary.json.

    Args:
        numbers: experiment -> :func:`grpo.reporting.discussion.numbers_of`.
    """
    baseline = read_baseline(study)
    sampled = read_best_of_n(study)
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"zero_shot": {prompt: values["answer_reward"] for prompt, values in baseline.items()}}
    verdicts = read_verdicts()
    if sampled:
        summary["best_of_n"] = {prompt: _at_most_samples(values) for prompt, values in sampled.items()}
    with whole_folder(paths.TABLES) as folder:
        write_text(folder / "zero_shot.md", zero_shot_table(baseline))
        for by in ("level", "subject"):
            write_text(folder / f"zero_shot_by_{by}.md", breakdown_table(baseline, by))
        if sampled:
            write_text(folder / "best_of_n.md", best_of_n_table(sampled))
        unknown = contents(undecided(study), not_a_matter_of_seeds(study))
        write_json(folder / f"{NAME}.json", unknown)
        write_text(folder / f"{NAME}.md", table(unknown["undecided"]))
        write_text(folder / "claims.md", claims_table(shown(verdicts, study)))
        write_json(folder / "numbers.json", {name: as_plain(of) for name, of in numbers.items()})
        for experiment, of in numbers.items():
            rows += [result_row(study, run) for arm in of["arms"] for run in arm["all"]]
            write_text(folder / f"{experiment}.md", experiment_table(of))
    summary["claims"] = dict(Counter(verdict.verdict for verdict in verdicts))
    pd.DataFrame(rows).to_csv(paths.REPORTS / "results.csv", index=False, lineterminator="\n")
    write_json(paths.SUMMARY, summary)


def _at_most_samples(values: dict[str, Any]) -> dict[str, float]:
    n, kinds = list(values["n"].items())[-1]
    return {f"{kind}_at_{n}": round(estimate["value"], 4) for kind, estimate in kinds.items()}


def result_row(study: Study, run: Run) -> dict[str, Any]:
    """A run's row of reports/results.csv."""
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


def experiment_table(numbers: Numbers) -> str:
    """Table of arms: answer reward, distance to the leader, form, accuracy given the form, length and collapsed runs."""
    leader, several = numbers["leader"]["arm"], len(numbers["arms"]) > 1
    columns = [
        "arm",
        "at start",
        f"answer reward, mean of last {numbers['last_k']} (95% over {numbers['covers']})",
        *([f"below {leader}"] if several else []),
        *("form right", "answer right, given the form", "response length"),
        *(["runs that collapsed"] if numbers["collapsed"] else []),
    ]
    rows = [_row(arm, numbers, several) for arm in numbers["arms"]]
    return markdown_table(columns, rows) + _ended_early(numbers)


def _row(arm: Numbers, numbers: Numbers, several: bool) -> list[str]:
    after = arm["after"]
    return [
        f"**{arm['arm']}**" if arm is numbers["winner"] and several else arm["arm"],
        decimals(arm["start"].value),
        interval(arm["final"]),
        *([("leads" if arm["below"] is None else interval(arm["below"]))] if several else []),
        *(["", ""] if after is None else [decimals(after.form), decimals(after.within)]),
        "" if arm["length"] is None else decimals(arm["length"][1], 1),
        *([f"{len(arm['collapses'])} of {len(arm['runs'])}"] if numbers["collapsed"] else []),
    ]


def further_sets_table(study: Study, runs: list[Run]) -> str:
    """Table of answer rewards on further evaluation sets, mean over seeds; empty without such sets."""
    return _by_column("set", {name: f"val/also/{name}{_REWARD}" for name in study.also_evaluated(_task(study, runs))}, runs)


def mixture_table(study: Study, runs: list[Run]) -> str:
    """Table of answer rewards on each task of a mixture, mean over seeds; empty for another task."""
    task = study.task(_task(study, runs))
    return _by_column("task", {name: f"val/{name}{_REWARD}" for name in task.parts} if isinstance(task, Mixture) else {}, runs)


def _task(study: Study, runs: list[Run]) -> str:
    return study.experiments[runs[0].experiment].task


def _by_column(head: str, columns: Mapping[str, str], runs: list[Run]) -> str:
    """Table of columns of validation.csv: first and last value of each arm, without NaN (steps without this evaluation)."""
    rows = []
    for name, column in columns.items():
        for arm, of_arm in by_arm(runs).items():
            measured = [values for run in of_arm if len(values := run.validation[column].dropna())]
            if measured:
                means = [sum(values.iloc[place] for values in measured) / len(measured) for place in (0, -1)]
                rows.append([name, arm, *map(decimals, means), str(len(measured))])
    return markdown_table([head, "arm", "before training", "at its last evaluation", "runs"], rows) if rows else ""


def details_table(numbers: Numbers, times: dict[str, tuple[float, float]]) -> str:
    """Table of arms: best evaluation, entropy, gradient norm, and total seconds.

    Args:
        times: arm -> seconds and GPU-hours; the table has a column of GPU-hours if there are any.
    """
    on_gpus = any(gpu_hours for _, gpu_hours in times.values())
    columns = ["arm", "best (step)", "token entropy", "gradient norm, median", "largest", "seconds"]
    rows = []
    for arm in numbers["arms"]:
        runs = arm["held"]
        best = max((run.metrics for run in runs), key=lambda metrics: metrics["best/answer_reward"])
        norms = pd.concat([run.history["gradient_norm"] for run in runs])
        entropy = sum(run.history["token_entropy"].iloc[-1] for run in runs) / len(runs)
        cells = [arm["arm"], f"{best['best/answer_reward']:.3f} ({best['best/step']})"]
        cells += [decimals(entropy), decimals(norms.median(), 2), decimals(norms.max(), 2), f"{times[arm['arm']][0]:.0f}"]
        rows.append([*cells, f"{times[arm['arm']][1]:.2f}"] if on_gpus else cells)
    return markdown_table([*columns, "GPU-hours"] if on_gpus else columns, rows)


def _ended_early(numbers: Numbers) -> str:
    """State which runs average fewer evaluations than the column's head says, and why; empty if there are none."""
    last_k, early = numbers["last_k"], []
    for run in (run for arm in numbers["arms"] for run in arm["all"]):
        if (counted := evaluations_counted(run.outcomes, last_k)) < last_k:
            reasons = {"diverged": run.metrics["diverged_step"], "time limit": run.metrics["time_limit_step"]}
            why = next((f", {reason} at step {step}" for reason, step in reasons.items() if step is not None), "")
            early.append(f"{run.name} ({counted}{why})")
    return f"\nFewer evaluations than {last_k} count in: {'; '.join(early)}.\n" if early else ""
