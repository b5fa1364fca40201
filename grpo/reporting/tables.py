"""Tables for people (Markdown), for programs (CSV), and what `dvc metrics` follows beside the winners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from grpo.common.files import read_json, whole_folder, write_json, write_text
from grpo.reporting.baseline import best_of_n_table, breakdown_table, zero_shot_table
from grpo.reporting.discussion import Numbers, as_plain
from grpo.reporting.sentences import decimals, interval
from grpo.reporting.what_it_would_take import NAME, contents, table
from grpo.results.claims import claims_table
from grpo.results.contrasts import not_a_matter_of_seeds, undecided
from grpo.results.runs import Run, by_arm, evaluations_counted, final_scores, read_baseline, read_best_of_n
from grpo.study import paths
from grpo.study.schema import Study


def write_tables(study: Study, numbers: Mapping[str, Numbers]) -> None:
    """Write reports/tables/*, reports/results.csv and reports/summary.json.

    Args:
        numbers: of each experiment.
    """
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
        unknown = contents(undecided(study), not_a_matter_of_seeds(study))
        write_json(folder / f"{NAME}.json", unknown)
        write_text(folder / f"{NAME}.md", table(unknown["undecided"]))
        write_text(folder / "claims.md", claims_table(claims, study.left_out))
        write_json(folder / "numbers.json", {name: as_plain(of) for name, of in numbers.items()})
        for experiment, of in numbers.items():
            rows += [result_row(study, run) for arm in of["arms"] for run in arm["all"]]
            write_text(folder / f"{experiment}.md", experiment_table(of))
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


def experiment_table(numbers: Numbers) -> str:
    """Each arm's answer reward, how far it is below the leader, what the reward is made of, and its runs that collapsed."""
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
    return _markdown(columns, rows) + _ended_early(numbers)


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
    """The answer reward of each arm on each further evaluation set, mean over seeds; empty without such sets."""
    rows = []
    for name in study.also_evaluated(study.experiments[runs[0].experiment].task):
        column = f"val/also/{name}/answer_reward"
        for arm, of_arm in by_arm(runs).items():
            measured = [run.validation[column].dropna() for run in of_arm]  # NaN where it was not due
            means = [sum(values.iloc[place] for values in measured) / len(measured) for place in (0, -1)]
            rows.append([name, arm, *map(decimals, means), str(len(of_arm))])
    return _markdown(["set", "arm", "before training", "at its last evaluation", "runs"], rows) if rows else ""


def details_table(numbers: Numbers, times: dict[str, tuple[float, float]]) -> str:
    """What explains an arm's reward, and what it took: seconds and GPU-hours of its runs together.

    Args:
        times: of each arm; GPU-hours have a column where there are any.
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
    return _markdown([*columns, "GPU-hours"] if on_gpus else columns, rows)


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]]) + "\n"


def _ended_early(numbers: Numbers) -> str:
    """Which runs count by fewer evaluations than the column's head says, and why; nothing where there are none."""
    last_k, early = numbers["last_k"], []
    for run in (run for arm in numbers["arms"] for run in arm["all"]):
        if (counted := evaluations_counted(run.outcomes, last_k)) < last_k:
            reasons = {"diverged": run.metrics["diverged_step"], "its time was up": run.metrics["time_limit_step"]}
            why = next((f", {reason} at step {step}" for reason, step in reasons.items() if step is not None), "")
            early.append(f"{run.name} ({counted}{why})")
    return f"\nFewer evaluations than {last_k} count in: {'; '.join(early)}.\n" if early else ""
