"""Tables (Markdown) from the record; reports/results.csv; reports/summary.json for `dvc metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from grpo.common.files import atomic_folder, write_csv, write_json, write_text
from grpo.common.safe_text import short
from grpo.reporting.figures import ESTIMATES, chosen, settings_by_rate
from grpo.reporting.labels import NEVER, decimals, interval, scientific, table
from grpo.reporting.record import Values, arm_of
from grpo.results.runs import read_runs
from grpo.results.verdicts import comparison
from grpo.study import paths
from grpo.study.schema import Study


def write_tables(study: Study, record: Values) -> None:
    """Write reports/tables/*.md, reports/results.csv and reports/summary.json."""
    with atomic_folder(paths.TABLES) as folder:
        for name, text in tables_of(record).items():
            write_text(folder / f"{name}.md", text)
    write_csv(paths.REPORTS / "results.csv", results_table(study, record))
    write_json(paths.SUMMARY, summary(record))


def tables_of(record: Values, more: Mapping[str, Sequence[dict[str, str]]] | None = None) -> dict[str, str]:
    """The tables in Markdown by name; one without rows is left out. ``more``: further cells of chosen arms, by experiment."""
    metric = record["metric"]
    texts = {
        "zero_shot": zero_shot_table(record["baseline"]),
        "best_of_n": best_of_n_table(record["best_of_n"]),
        "pass_at_k": pass_at_k_table(record.get("pass_at_k", {})),
        "claims": claims_table(record["claims"]),
        "settings": settings_table(record["experiments"]),
    }
    for name, entry in record["experiments"].items():
        texts |= {name: experiment_table(entry, metric, (more or {}).get(name))}
        texts |= {f"{name}-{kind}": text for kind, text in further_tables(entry, metric).items()}
    return {name: text for name, text in texts.items() if text}


def summary(record: Values) -> Values:
    """What `dvc metrics` shows of the study as a whole, in the columns of each experiment's reports/metrics/EXPERIMENT.json."""
    top, prompts = record["headline"], list(record["baseline"].values())
    return {
        "end": round(top["value"], 4),
        "winner": top["experiment"],
        "zero_shot": round(prompts[0].get("reward", prompts[0]["accuracy"]["value"]), 4),  # under the first prompt
    }


def results_table(study: Study, record: Values) -> pd.DataFrame:
    """A row for each run: its arm, its end, the metrics of its last evaluation, and from which run it was taken over."""
    rows = []
    for name, entry in record["experiments"].items():
        for run in read_runs(study, name):
            arm = arm_of(entry, run.arm)
            rows.append(
                {"experiment": name, "arm": run.arm, "seed": run.seed, "label": arm["label"], "chosen": arm["chosen"]}
                | {"learning_rate": arm["learning_rate"], "end": arm["by_run"][arm["runs"].index(run.name)]}
                | {"collapsed": run.name in arm["collapsed"]}
                | run.metrics
                | {
                    "last/token_entropy": run.history["token_entropy"].iloc[-1],
                    "max/gradient_norm": run.history["gradient_norm"].max(),
                }
                | {"identity": run.config["identity"], "same_as": run.config["same_as"] or ""}
            )
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------------------- an experiment


OF_THE_ARM = {"higher": "lower", "lower": "higher", "same": "same", "open": "open"}  # what the leader's difference says of it


def experiment_table(entry: Values, metric: str, more: Sequence[dict[str, str]] | None = None) -> str:
    """The chosen arms: end, distance to the leader and how often a run ends above its runs, form, length, and collapsed runs.

    Means and intervals are over all runs, collapsed ones too. The winner is bold. ``more``: further cells of each chosen arm,
    by their heads.
    """
    shown = chosen(entry)
    several, starts = len(shown) > 1, {round(arm["start"], 6) for arm in shown}
    highest, rows = max(arm["value"] for arm in shown), []
    for arm in shown:
        label, leads = short_label(arm), "leads" if arm["value"] == highest else "leads on the problems that choose"
        row = {"arm": f"**{label}**" if several and arm["arm"] == entry["winner"] else label}
        if len(starts) > 1:
            row["at start"] = decimals(arm["start"])
        row[f"{metric} at the end (95%)"] = interval(arm)
        if several:
            below = arm["below"]
            row["below the leader"] = f"{interval(below)}, {OF_THE_ARM[comparison(below)]}" if below else leads
            row["probability of improvement"] = decimals(arm["improvement"], 2)
        row |= {"right form": decimals(arm["format"]), "right, given the form": decimals(arm["given_form"])}
        rows.append(row | {"tokens": decimals(arm["length"], 1), "collapsed": f"{len(arm['collapsed'])} of {len(arm['runs'])}"})
    return table(row | further for row, further in zip(rows, more, strict=True)) if more else table(rows)


def short_label(arm: Values) -> str:
    """An arm's label for a table; a label with a stranger's values is shown as code."""
    return str(arm["label"]) if str(arm["label"]).replace("×", "x").isascii() else short(arm["label"])


def further_tables(entry: Values, metric: str = "answer reward") -> dict[str, str]:
    """Rates tried, tasks of a mixture, scores on the whole validation set, and KL of kept checkpoints: kind -> table."""
    extra, labels = entry["extra"], {arm["arm"]: short_label(arm) for arm in entry["arms"]}
    rates = [
        {"setting": setting, "learning rate": scientific(arm["learning_rate"]), "chosen": "chosen" if arm["chosen"] else ""}
        | {"on the selection problems": decimals(arm["selection"]), f"{metric} at the end (95%)": interval(arm)}
        | {"collapsed": f"{len(arm['collapsed'])} of {len(arm['runs'])}"}
        for setting, arms in settings_by_rate(entry).items()
        for arm in arms
        if not all(arm["chosen"] for arm in arms)
    ]
    sets = [
        {"set": short(part["set"]), "arm": labels[part["arm"]], "before training": decimals(part["first"])}
        | {"at its last evaluation": decimals(part["last"]), "runs": part["runs"]}
        for part in extra.get("mixture", ())
    ]
    whole = [
        {"run": run["run"], "score (95%)": interval(run), "problems": run["problems"], "steps": run["steps"]}
        | {"ended by": "time limit" if run["cut"] else "last step"}
        for run in extra.get("leaderboard", ())
    ]
    kl = [
        {"arm": labels[arm], "step": step["step"], "answer reward (95%)": interval(step["answer_reward"])}
        | {
            "reverse KL, nats a token": interval(step["per_token"]),
            "forward KL, nats a token": interval(step["forward_per_token"]),
        }
        | ({"old task, answer reward (95%)": interval(step["old_task_reward"])} if "old_task_reward" in step else {})
        for arm, steps in (entry["kl"] or {}).items()
        for step in steps
    ]
    return {"rates": table(rates), "sets": table(sets), "leaderboard": table(whole), "kl": table(kl)}


# ------------------------------------------------------------------------------------------------------- the study as a whole


def zero_shot_table(baseline: Mapping[str, Any]) -> str:
    """Number of responses in each outcome category, rewards and length, by prompt."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)
    return table(
        {"prompt": prompt, "problems": values["problems"]}
        | {name: values["categories"].get(name, 0) for name in names}
        | ({"reward": decimals(values["reward"])} if "reward" in values else {})
        | {"answer reward (95%)": interval(values["accuracy"]), "tokens": decimals(values["response_length"], 1)}
        for prompt, values in baseline.items()
    )


def settings_table(experiments: Mapping[str, Values]) -> str:
    """The settings of each experiment's runs, with all values that its arms have, and what each arm changes."""
    rows = [
        {"experiment": entry["title"], "task": entry["task"]}
        | {
            _head(key): ", ".join("default" if one is None else str(one) for one in values)
            for key, values in entry["settings"].items()
        }
        for entry in experiments.values()
    ]
    changes = (
        "; ".join(f"{arm['arm']}: {changed(arm) or 'nothing'}" for arm in entry["arms"]) for entry in experiments.values()
    )
    heads = [*dict.fromkeys(key for row in rows for key in row), "arms change"]
    filled = (row | {heads[-1]: change} for row, change in zip(rows, changes, strict=True))
    return table({head: short(row[head]) if row.get(head) else "" for head in heads} for row in filled)


def _head(setting: str) -> str:
    return "steps" if setting.endswith("_steps") else setting.replace("_", " ")


def changed(arm: Values) -> str:
    """What an arm changes, in the words of `params.yaml`."""
    return ", ".join(f"{key} {value}" for key, value in arm["overrides"].items() if key not in NEVER)


def best_of_n_table(metrics: Mapping[str, Any]) -> str:
    """pass@N, Best@N and majority vote for each N and prompt."""
    return table(
        {"prompt": prompt, "N": n} | {title: interval(kinds[kind]) for kind, title in ESTIMATES.items()}
        for prompt, values in metrics.items()
        for n, kinds in values["n"].items()
    )


def pass_at_k_table(metrics: Mapping[str, Any]) -> str:
    """pass@k of base, middle and end of the sampled runs, and the end's difference to the base."""
    return table(
        {"run": short(name), "k": k}
        | {f"{place}, step {result['step']}": interval(result["k"][k]) for place, result in found["places"].items()}
        | {"end minus base": f"{interval(end['above_base'])}, {comparison(end['above_base'])}"}
        for name, found in metrics.items()
        for k, end in found["places"]["end"]["k"].items()
    )


def claims_table(claims: list[Values]) -> str:
    """What was reported and what was measured, with a verdict, for each claim."""
    return table(
        {
            "claim": claim["statement"],
            "experiment": claim["experiment"],
            "reported": "<br>".join(f"{source}: {text}" for source, text in claim["reported"].items()),
            "measured here": claim["measured"],
            "verdict": f"**{claim['verdict']}**<br>{claim['reason']}",
        }
        for claim in claims
    )
