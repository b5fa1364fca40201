"""reports/record.json: all that a study measured and concluded, from which tables, figures and texts are made.

Nothing in it differs between machines: seconds, ids and hardware are in reports/timing.csv (:mod:`grpo.reporting.timing`).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from grpo.common.files import read_json, write_json
from grpo.reporting.extra import extras, samples, zero_shot_examples
from grpo.reporting.labels import arm_labels
from grpo.results.claims import judge_claims
from grpo.results.findings import ArmResult, ExperimentResult, Interval
from grpo.results.intervals import difference_of
from grpo.results.published import read_published
from grpo.results.runs import Run, by_arm, final_scores, read_baseline, read_best_of_n, read_runs, value
from grpo.results.selection import read_result
from grpo.results.verdicts import Verdict
from grpo.study import paths
from grpo.study.methods import RATE_TIMES
from grpo.study.schema import Study
from grpo.study.settings import MAIN, Experiment, setting_of

Values = dict[str, Any]
FORM, LENGTH, ENTROPY = "val/format_reward", "val/response_length", "val/token_entropy"
TRENDS = (  # training metrics of which the record has first and last levels
    *("token_entropy", "gradient_norm", "loss", "train/answer_reward", "train/response_length", "clip_fraction", "ratio_max"),
    *("lag_mean", "mean_nll", "train/zero_signal_fraction"),
)
PART = 8  # a level is the mean over the first or the last eighth of the steps


def write_record(study: Study) -> Values:
    """Compute the record from a study's result files, write reports/record.json, and return it.

    Raises:
        UserError: a result file is missing or damaged.
    """
    runs = {name: read_runs(study, name) for name in study.active_experiments}
    record = record_of(study, runs, {name: read_result(study, name) for name in runs}, judge_claims(study))
    write_json(paths.RECORD, record)
    return record


def read_record() -> Values:
    """Read reports/record.json; a missing or damaged file is a UserError."""
    return read_json(paths.RECORD, made_by="tables", keys=("study", "headline", "experiments", "claims"))


def record_of(
    study: Study, runs: dict[str, list[Run]], results: dict[str, ExperimentResult], verdicts: list[Verdict]
) -> Values:
    """Compute the record from runs, results and verdicts; the other result files are read."""
    experiments = {name: _experiment(study, runs[name], results[name], verdicts) for name in runs}
    for name, entry in experiments.items():
        entry["extra"] = extras(study, runs[name], entry, runs, experiments)
    headline = _headline(study, runs, experiments)
    claims = [asdict(verdict) for verdict in verdicts]
    cited = {source for claim in claims for source in claim["reported"]}
    fine_tuned = any((of.method, of.task) == ("sft", MAIN) for of in map(study.experiments.get, runs) if of)
    found: Values = plain(
        {
            "study": study.study,
            "description": study.description,
            "seeds": study.seeds,
            "metric": study.metric.replace("_", " "),
            "by_design": study.by_design,
            "headline": headline,
            "methods": _methods(study, runs, experiments, headline),
            "baseline": {
                prompt: {
                    "right_form": of["format_reward"],
                    **{key: of[key] for key in ("accuracy", "categories", "problems", "response_length")},
                    **{key: of[key] for key in ("accuracy_by_level", "accuracy_by_subject") if key in of},
                    "examples": zero_shot_examples(prompt),
                }
                for prompt, of in read_baseline(study).items()
            },
            "best_of_n": read_best_of_n(study),
            "experiments": experiments,
            "claims": claims,
            "sources": {source: text for source, text in read_published().sources.items() if source in cited},
            "problems": {
                **{key: getattr(study.evaluation, f"{key}problems", None) for key in ("", "last_", "selection_", "zero_shot_")},
                "best_of_n": study.evaluation.best_of_n.problems if study.evaluation.best_of_n.prompts else None,
            },
            "dataset": {
                task: read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
                for task in dict.fromkeys((MAIN, *(study.experiments[name].task for name in runs)))
            },
            "sft": read_json(paths.sft_report(MAIN), f"sft_dataset@{MAIN}") if fine_tuned else None,
        }
    )
    return found


def plain(value: Any) -> Any:
    """Convert to values of JSON: tuples and arrays to lists, numbers that are not finite to None."""
    if isinstance(value, dict):
        return {str(key): plain(of) for key, of in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(of) for of in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ends(estimate: Interval | None) -> Values | None:
    """Value and ends of an interval."""
    return None if estimate is None else {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def label_arms(study: Study, runs: list[Run]) -> dict[str, str]:
    """The labels of an experiment's arms (:func:`grpo.reporting.labels.arm_labels`)."""
    arms = by_arm(runs)
    method = study.experiments[runs[0].experiment].method
    return arm_labels(
        method, {arm: {key: of["value"] for key, of in own[0].config["config"].items()} for arm, own in arms.items()}
    )


# ------------------------------------------------------------------------------------------------------- an experiment


def _experiment(study: Study, runs: list[Run], result: ExperimentResult, verdicts: list[Verdict]) -> Values:
    entry, arms, labels = study.experiments[result.experiment], by_arm(runs), label_arms(study, runs)
    leading = arms[result.leader]
    changed = dict.fromkeys(key for arm in result.arms for key in arm.overrides)
    first = result.arms[0].overrides
    return {
        "title": study.title(result.experiment),
        "question": entry.question,
        "note": entry.note,
        "method": entry.method,
        "task": entry.task,
        "builds_on": entry.builds_on,
        "steps": max(int(run.validation["step"].iloc[-1]) for run in runs),
        "changed": [key for key in changed if any(arm.overrides.get(key) != first.get(key) for arm in result.arms)],
        "leader": result.leader,
        "runner_up": result.runner_up,
        "winner": result.winner,
        "margin": ends(result.margin),  # on the problems that select
        "reason": result.reason,
        "arms": [_arm(arms[arm.arm], arm, labels[arm.arm], leading) | _rate(entry, arm) for arm in result.arms],
        "claims": [verdict.id for verdict in verdicts if verdict.experiment == result.experiment],
        "kl": _kl(study, result.experiment),
        "samples": samples(arms[result.winner][0].name),
    }


def told(experiment: Values) -> bool:
    """Whether an experiment's winner ends above every other setting, each at its best rate, on the problems that judge."""
    others = [arm["below"] for arm in experiment["arms"] if arm["chosen"] and arm["arm"] != experiment["leader"]]
    return experiment["winner"] == experiment["leader"] and all(below["low"] > 0 for below in others)


def _arm(runs: list[Run], result: ArmResult, label: str, leading: list[Run]) -> Values:
    """An arm's entry; all numbers are means over all of its runs, collapsed ones too."""
    start = {key: _mean(runs, column, 0) for key, column in (("format", FORM), ("length", LENGTH), ("entropy", ENTROPY))}
    end = {key: _mean(runs, column, -1) for key, column in (("format", FORM), ("length", LENGTH), ("entropy", ENTROPY))}
    at_start = float(np.mean([run.validation[run.column].iloc[0] for run in runs]))
    at_end = float(np.mean([run.validation[run.column].iloc[-1] for run in runs]))
    best = max(runs, key=lambda run: run.metrics[f"best/{run.metric}"]).metrics
    same_as = [run.config["same_as"] for run in runs]
    return {
        "arm": result.arm,
        "label": label,
        "setting": result.setting,
        "learning_rate": value(runs[0], "learning_rate"),
        "chosen": result.chosen,
        "overrides": result.overrides,
        "runs": result.runs,
        "same_as": same_as if any(same_as) else None,  # equal runs of an earlier experiment, which stand for these
        "by_run": result.by_run,
        **(ends(result.final) or {}),
        "problems": result.final.problems,
        "selection": result.selection,
        "start": at_start,
        "best": {"value": best[f"best/{runs[0].metric}"], "step": best["best/step"]},
        "collapsed": [asdict(one) for one in result.collapses],
        "stopped": {run.name: run.metrics["diverged_step"] for run in runs if run.metrics["diverged_step"] is not None},
        **end,
        "given_form": _share(at_end, end["format"]),
        "at_start": start | {"given_form": _share(at_start, start["format"])},
        "below": None if runs is leading else ends(difference_of(final_scores(runs), final_scores(leading))),
        "gained_and_lost": gained_and_lost(runs),
        "metrics": {name: levels for name in TRENDS if (levels := _levels(runs, name))},
        "curve": _curve(runs),
        **({"examples": runs[0].metrics["examples"]} if "examples" in runs[0].metrics else {}),
    }


def _kl(study: Study, experiment: str) -> Values | None:
    """By arm the KL of kept checkpoints to their start, as the stage ``kl`` measured it; None if the arms keep none."""
    if experiment not in (study.kl_in or ()):
        return None
    arms: Values = read_json(paths.KL_REPORTS / f"{experiment}.json", f"kl@{experiment}", keys=("arms",))["arms"]
    return {arm: [{key: of for key, of in step.items() if key != "by_run"} for step in steps] for arm, steps in arms.items()}


def _rate(entry: Experiment, arm: ArmResult) -> Values:
    """The multiple of the earlier winners' learning rate, for a setting that was tried at several."""
    tried = [name for name in entry.arms if setting_of(name) == arm.setting]
    return {"rate_times": entry.arms[arm.arm].get(RATE_TIMES, 1.0) if len(tried) > 1 else None}


def _mean(runs: list[Run], column: str, row: int) -> float | None:
    """Mean of a validation metric over runs at their first or last evaluation; None if not all have it."""
    if any(column not in run.validation for run in runs):
        return None
    return float(np.mean([run.validation[column].iloc[row] for run in runs]))


def _share(answer: float, form: float | None) -> float | None:
    """Accuracy given the form; None if no response has the form, or if answers are rewarded without it."""
    return answer / form if form and answer <= form else None


def mean_curve(runs: list[Run], column: str) -> pd.Series[float]:
    """Mean of a metric over runs by step. A validation metric of a run that stopped early keeps its last value."""
    table = "validation" if column.startswith("val/") else "history"
    curves = [getattr(run, table).groupby("step")[column].last() for run in runs]
    joined = pd.concat(curves, axis=1).sort_index()
    mean: pd.Series[float] = (joined.ffill() if table == "validation" else joined).mean(axis=1)
    return mean


def _levels(runs: list[Run], column: str) -> Values | None:
    """First and last level (mean over an eighth of the steps), smallest and largest value; None if not all runs have it."""
    if any(column not in run.history or run.history[column].isna().all() for run in runs):
        return None
    curve = mean_curve(runs, column).dropna()
    part = max(1, len(curve) // PART)
    return {
        "first": curve.iloc[:part].mean(),
        "last": curve.iloc[-part:].mean(),
        "smallest": curve.min(),
        "largest": max(run.history[column].max() for run in runs),
    }


def _curve(runs: list[Run]) -> Values:
    curve = mean_curve(runs, runs[0].column)
    return {"steps": curve.index.tolist(), runs[0].metric: [round(of, 4) for of in curve.tolist()]}


def gained_and_lost(runs: list[Run]) -> Values:
    """Problems that are right before training and at the last evaluation, those gained and those lost: means over runs."""
    pairs = [(run.outcomes[0] == 1, run.outcomes[-1] == 1) for run in runs]
    counts = [(first.sum(), last.sum(), (last & ~first).sum(), (first & ~last).sum()) for first, last in pairs]
    return dict(zip(("before", "after", "gained", "lost"), np.mean(counts, axis=0).tolist(), strict=True))


# ------------------------------------------------------------------------------------------------- the study as a whole


def _headline(study: Study, runs: dict[str, list[Run]], experiments: dict[str, Values]) -> Values:
    """The best winner of GRPO experiments on the main task that start from the base model; without any, others count.

    Winners without a collapsed run come first, then by mean on the problems that select, so that the shown mean is not the
    largest of several.
    """

    def order(name: str) -> tuple[bool, bool, bool, bool, float]:
        entry, arm = experiments[name], winner_of(experiments[name])
        from_base = not value_of(runs[name], arm["arm"], "start_from")
        return entry["task"] == MAIN, entry["method"] == "grpo", from_base, not arm["collapsed"], arm["selection"]

    name = max(experiments, key=order)
    arm = winner_of(experiments[name])
    config = next(run for run in runs[name] if run.arm == arm["arm"]).config["config"]
    keys = (
        "arm",
        "label",
        "value",
        "low",
        "high",
        "start",
        "problems",
        "format",
        "given_form",
        "length",
        "at_start",
        "collapsed",
    )
    return {
        "experiment": name,
        **{key: arm[key] for key in keys},
        "runs": len(arm["runs"]),
        "run": arm["runs"][0],
        "settings": [[key, of["value"], of["from"]] for key, of in config.items() if of["from"] not in ("study", "default")],
    }


def winner_of(entry: Values) -> Values:
    """The winner's entry among an experiment's arms in the record."""
    return arm_of(entry, entry["winner"])


def arm_of(entry: Values, name: str) -> Values:
    """An arm's entry in the record."""
    found: Values = next(arm for arm in entry["arms"] if arm["arm"] == name)
    return found


def value_of(runs: list[Run], arm: str, key: str) -> Any:
    """A setting of an arm; None if its method lacks it."""
    run = next(run for run in runs if run.arm == arm)
    return value(run, key) if key in run.config["config"] else None


def _methods(study: Study, runs: dict[str, list[Run]], experiments: dict[str, Values], headline: Values) -> list[Values]:
    """The winners of SFT and of expert iteration on the main task beside the headline, with the difference to the headline."""
    best = by_arm(runs[headline["experiment"]])[headline["arm"]]
    rows = []
    for name, entry in experiments.items():
        if entry["task"] != MAIN or (entry["method"] == "grpo" and name != headline["experiment"]):
            continue
        arm = winner_of(entry)
        own = by_arm(runs[name])[arm["arm"]]
        same = name != headline["experiment"] and final_scores(own).shape[1] == final_scores(best).shape[1]
        rows.append(
            {"method": entry["method"], "experiment": name}
            | {key: arm[key] for key in ("arm", "label", "value", "low", "high", "entropy", "length")}
            | {"above_headline": ends(difference_of(final_scores(best), final_scores(own))) if same else None}
        )
    return rows
