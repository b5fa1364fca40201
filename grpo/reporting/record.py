"""reports/record.json: all that a study measured and concluded, from which tables, figures and texts are made.

Nothing in it differs between machines: seconds, ids and hardware are in reports/timing.csv (:mod:`grpo.reporting.timing`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd

from grpo.common.files import read_json, read_jsonl, write_json, write_text
from grpo.common.yaml_file import read_mapping
from grpo.reporting.charts import over_runs, values_of
from grpo.reporting.labels import arm_labels
from grpo.results.claims import judge_claims, read_published, read_replicates
from grpo.results.controls import IN_WORDS, beyond_controls
from grpo.results.intervals import difference_of, mean_of, probability_of_improvement, wilson_interval
from grpo.results.outcomes_file import write_outcomes
from grpo.results.pairs import write_pairs
from grpo.results.runs import ExperimentRuns, Run, evidence_of, read_baseline, read_best_of_n, read_pass_at_k, value
from grpo.results.selection import Choice, choose
from grpo.results.verdicts import Verdict
from grpo.study import paths
from grpo.study.compose import CONTROLS_IN
from grpo.study.config import MAIN, setting_of
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study

Values = dict[str, Any]
AT_EVALUATIONS = {"format": "val/format_reward", "length": "val/response_length"}
TRENDS = (  # training metrics of which the record has first and last levels
    *("token_entropy", "gradient_norm", "loss", "train/answer_reward", "train/response_length", "clip_fraction", "ratio_max"),
    *("lag_mean", "mean_nll", "train/zero_signal_fraction"),
)
PART = 8  # a level is the mean over the first or the last eighth of the steps
SHOWN = 2  # samples before and after training, and examples of each zero-shot outcome
LONGEST = 1200  # characters of a response or question
SETTINGS = (  # of which the page has a table
    *("prompt", "n_grpo_steps", "n_sft_steps", "n_ei_steps", "learning_rate", "rollout_batch_size", "ei_batch_size"),
    *("group_size", "epochs_per_rollout_batch", "train_batch_size", "loss_type", "use_std_normalization"),
    *("length_normalization", "advantage", "reward"),
)
KEYWORD_KINDS = ("lists_only", "repeats_prompt", "is_sentence")


def write_record(study: Study) -> Values:
    """Compute the record from a study's result files, write record.json, outcomes.csv and pairs.csv in reports/, and return it.

    Raises UserError: a result file is missing or damaged.
    """
    evidence = {name: evidence_of(study, name) for name in study.active_experiments}
    verdicts = judge_claims(study, evidence, read_replicates(study).values())
    record = record_of(study, evidence, verdicts)
    write_outcomes(study, evidence)
    write_pairs(paths.PAIRS, {verdict.id: verdict.pairs for verdict in verdicts if verdict.pairs})
    write_json(paths.RECORD, record)
    write_text(paths.DIGESTS, digests_of(record))
    return record


def read_record(project: Path = Path()) -> Values:
    """Read reports/record.json of a project's folder; a missing or damaged file is a UserError."""
    return read_json(project / paths.RECORD, made_by="tables", keys=("study", "headline", "experiments", "claims"))


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a record that are neither dictionaries nor lists, each with its place, such as ``claims/0/verdict``."""
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{place}/{key}".lstrip("/"))
    else:
        yield place, value


def digests_of(record: Values) -> str:
    """Four hexadecimal digits for each of the :func:`leaves` and its place, by which `grpo verify` finds a changed one."""
    found = [f"{crc32(json.dumps(leaf).encode()) & 0xFFFF:04x}" for leaf in leaves(record)]
    return "".join(f"{' '.join(found[start : start + 24])}\n" for start in range(0, len(found), 24))


def record_of(study: Study, evidence: Mapping[str, ExperimentRuns], verdicts: Sequence[Verdict]) -> Values:
    """Compute the record from runs and verdicts; the other result files are read."""
    experiments = {name: _experiment(study, runs, choose(study, runs)) for name, runs in evidence.items()}
    claims = [
        {key: content for key, content in asdict(replace(verdict, pairs=None)).items() if key != "pairs"}
        for verdict in verdicts
    ]
    headline = _headline(evidence, experiments, own_experiments(experiments, claims))
    by_design = [pair for one in study.by_design for pair in (one.items() if isinstance(one, dict) else [("", one)])]
    cited = {source for claim in claims for source in claim["reported"]}
    fine_tuned = any((entry["method"], entry["task"]) == ("sft", MAIN) for entry in experiments.values())
    found: Values = plain(
        {
            "study": study.study,
            "description": study.description,
            "model": getattr(study.models[MAIN], "origin", "pretrained in this study"),
            "seeds": study.seeds,
            "metric": study.metric.replace("_", " "),
            "by_design": [one for key, one in by_design if not key or key in experiments],
            "headline": headline,
            **(
                {"controls": beyond_controls(study, evidence, (headline["experiment"], headline["arm"]))}
                if study.controls
                else {}
            ),
            "baseline": {
                prompt: {
                    **{key: result[key] for key in ("accuracy", "categories", "problems", "response_length")},
                    **({"reward": result["reward"]} if study.metric == "reward" else {}),  # the study's own
                    "examples": zero_shot_examples(prompt),
                }
                for prompt, result in read_baseline(study).items()
            },
            "best_of_n": read_best_of_n(study),
            **({"pass_at_k": read_pass_at_k(study)} if study.pass_at_k_in else {}),
            "experiments": experiments,
            "claims": claims,
            "sources": {source: text for source, text in read_published().sources.items() if source in cited},
            "problems": {key: getattr(study.evaluation, f"{key}_problems", None) for key in ("last", "selection")},
            "dataset": {
                task: read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
                for task in dict.fromkeys((MAIN, *(entry["task"] for entry in experiments.values())))
            },
            "sft": read_json(paths.sft_report(MAIN), f"sft_dataset@{MAIN}") if fine_tuned else None,
        }
    )
    return found


def plain(value: Any) -> Any:
    """Convert to values of JSON: tuples and arrays to lists, numbers that are not finite to None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def of_the_handouts() -> dict[str, set[str]]:
    """The handouts' experiments, each with the settings of its arms."""
    experiments = read_mapping(paths.shipped("studies") / "base.yaml")["experiments"]
    return {name: {setting_of(arm) for arm in entry["arms"]} for name, entry in experiments.items()}


def label_arms(study: Study, arms: Mapping[str, list[Run]]) -> dict[str, str]:
    """The labels of an experiment's arms: what controls and arms of the handouts are, in words; other arms keep their names.

    ``arms``: the experiment's runs by arm.
    """
    (experiment,) = {runs[0].experiment for runs in arms.values()}
    if not {setting_of(arm) for arm in arms} <= of_the_handouts().get(experiment, set()):
        return {arm: IN_WORDS.get(arm, arm) if experiment == CONTROLS_IN else arm for arm in arms}
    configs = {arm: {key: setting["value"] for key, setting in runs[0].config["config"].items()} for arm, runs in arms.items()}
    return arm_labels(study.experiments[experiment].method, configs)


# ------------------------------------------------------------------------------------------------------- an experiment


def _experiment(study: Study, found: ExperimentRuns, choice: Choice) -> Values:
    name, entry, labels = found.experiment, study.experiments[found.experiment], label_arms(study, found.arms)
    return {
        "title": study.title(name),
        "question": entry.question,
        "note": entry.note,
        "method": entry.method,
        "task": entry.task,
        "builds_on": entry.builds_on,
        "leader": choice.leader,
        "runner_up": choice.runner_up,
        "winner": choice.winner,
        "margin": choice.margin and choice.margin.ends(),  # on the problems that select
        "reason": choice.reason,
        "arms": [_arm(found, arm, labels[arm]) for arm in found.arms],
        "settings": _settings(found.arms),
        "kl": _kl(study, name),
        "samples": samples(found.arms[choice.winner][0].name),
        "extra": _extra(study, found),
    }


def _arm(found: ExperimentRuns, arm: str, label: str) -> Values:
    """An arm's entry; all numbers are means over all of its runs, collapsed ones too."""
    runs, scores, column = found.arms[arm], found.final(arm), found.arms[arm][0].column
    start, end = ({key: _mean(runs, column, row) for key, column in AT_EVALUATIONS.items()} for row in (0, -1))
    answers = [_mean(runs, "val/answer_reward", row) for row in (0, -1)]
    same_as = [run.config["same_as"] for run in runs]
    final, leads, ends = mean_of(scores), arm == found.leader, [run.end for run in runs]
    return {
        "arm": arm,
        "label": label,
        "setting": setting_of(arm),
        "learning_rate": value(runs[0], "learning_rate"),
        "chosen": arm in found.chosen.values(),
        "overrides": runs[0].config["overrides"],
        "runs": [run.name for run in runs],
        "same_as": same_as if any(same_as) else None,  # equal runs of an earlier experiment, which stand for these
        "by_run": ends,
        **final.ends(),
        "problems": final.problems,
        "selection": float(found.selection(arm).mean()),
        "start": _mean(runs, column, 0),
        "collapsed": found.collapsed(arm),
        **end,
        "given_form": _share(answers[1], end["format"]),
        "at_start": start | {"given_form": _share(answers[0], start["format"])},
        "below": None if leads else difference_of(scores, found.final(found.leader)).ends(),
        "improvement": None if leads else probability_of_improvement(ends, [run.end for run in found.runs(found.leader)]),
        "metrics": {name: levels for name in TRENDS if (levels := _levels(runs, name))},
        **({"examples": runs[0].metrics["examples"]} if "examples" in runs[0].metrics else {}),
    }


def _settings(arms: Mapping[str, list[Run]]) -> dict[str, list[Any]]:
    """The values of :data:`SETTINGS` among an experiment's arms; those that no arm has are left out."""
    found = {key: {str(one): one for runs in arms.values() for one in [value(runs[0], key)]} for key in SETTINGS}
    return {key: list(values.values()) for key, values in found.items() if {*values} != {"None"}}


def _kl(study: Study, experiment: str) -> Values | None:
    """By arm the KL of kept checkpoints to their start, as the stage ``kl`` measured it; None if the arms keep none."""
    if experiment not in study.kl_in:
        return None
    arms: Values = read_json(paths.KL_REPORTS / f"{experiment}.json", f"kl@{experiment}", keys=("arms",))["arms"]
    return {
        arm: [{key: content for key, content in step.items() if key != "by_run"} for step in steps]
        for arm, steps in arms.items()
    }


def _mean(runs: list[Run], column: str, row: int) -> float | None:
    """Mean of a validation metric over runs at their first or last evaluation; None if not all have it."""
    if any(column not in run.validation for run in runs):
        return None
    return float(np.mean([run.validation[column].iloc[row] for run in runs]))


def _share(answer: float | None, form: float | None) -> float | None:
    """Accuracy given the form; None if no response has the form, or if answers are rewarded without it."""
    return answer / form if answer is not None and form and answer <= form else None


def _levels(runs: list[Run], column: str) -> Values | None:
    """First and last level (mean over an eighth of the steps), smallest and largest value; None if not all runs have it."""
    if any(values_of(run, column) is None for run in runs):
        return None
    curve = over_runs(runs, column).mean(axis=1).dropna()
    part = max(1, len(curve) // PART)
    return {
        "first": curve.iloc[:part].mean(),
        "last": curve.iloc[-part:].mean(),
        "smallest": curve.min(),
        "largest": max(run.history[column].max() for run in runs),
    }


# ------------------------------------------------------------------------------------------------------------- samples


def zero_shot_examples(prompt: str) -> dict[str, list[Values]]:
    """The first responses of each outcome: category -> question, response, truth."""

    def line(record: Values) -> tuple[str, Values]:
        shown = {key: str(record[key])[-LONGEST:] for key in ("prompt", "response", "ground_truth")}
        return record["category"], {"problem": record["problem"], **shown}

    found: dict[str, list[Values]] = {}
    for category, shown in read_jsonl(paths.BASELINE / f"{prompt}.jsonl", "math_baseline", line):
        if len(found.setdefault(category, [])) < SHOWN:
            found[category].append(shown)
    return found


def samples(run: str) -> list[Values]:
    """Responses of the run ``EXPERIMENT/ARM/SEED`` to the same problems before and after training.

    Problems whose last answer is right come first.
    """
    keys = ("step", "problem", "prompt", "response", "ground_truth", "format_reward", "answer_reward", "reward")
    found = read_jsonl(paths.RUNS / run / "rollouts.jsonl", stage_of_run(run), lambda one: {key: one[key] for key in keys})
    first, last = min(one["step"] for one in found), max(one["step"] for one in found)
    at_end = [one for one in found if one["step"] == last]
    chosen = [one["problem"] for one in sorted(at_end, key=lambda one: one["answer_reward"] != 1)[:SHOWN]]
    return [
        one | {key: str(one[key])[-LONGEST:] for key in ("prompt", "response", "ground_truth")} | {"run": run}
        for step in (first, last)
        for one in found
        if one["step"] == step and one["problem"] in chosen
    ]


# --------------------------------------------------------------------------------------- what only some experiments have


def _extra(study: Study, found: ExperimentRuns) -> Values:
    """Kinds of responses, scores on the whole set, staleness, tasks of a mixture; keys without content are left out."""
    made, every = study.task(study.experiments[found.experiment].task), [run for runs in found.arms.values() for run in runs]
    extra = {
        "staleness": _staleness(found),
        "kinds": _kinds(every),
        "leaderboard": [_full(run) for run in every if "full/answer_reward" in run.metrics],
        "mixture": _by_part(found, getattr(made, "parts", ())),  # of a mixture (examples/mixture_task.py)
    }
    return {key: content for key, content in extra.items() if content}


def _kinds(runs: list[Run]) -> Values:
    """Shares of the keyword task's kinds of responses before and after training."""
    shares = {
        kind: {"before": _mean(runs, f"val/{kind}", 0), "after": _mean(runs, f"val/{kind}", -1)} for kind in KEYWORD_KINDS
    }
    return shares if all(share["before"] is not None for share in shares.values()) else {}


def _full(run: Run) -> Values:
    """A run's score on the whole validation set."""
    n = run.metrics["full/problems"]
    low, high = wilson_interval(run.metrics["full/answer_reward"] * n, n)
    ended = {"steps": run.metrics["steps"], "cut": run.metrics["time_limit_step"] is not None}
    return {"run": run.name, "value": run.metrics["full/answer_reward"], "low": low, "high": high, "problems": n, **ended}


def _by_part(found: ExperimentRuns, parts: Iterable[str]) -> list[Values]:
    """First and last answer reward of each arm by part of a mixture, means over runs, without steps that lack it (NaN)."""
    rows = []
    for name in parts:
        for arm, runs in found.arms.items():
            column = f"val/{name}/answer_reward"
            measured = [values for run in runs if column in run.validation and len(values := run.validation[column].dropna())]
            if measured:
                first, last = (float(np.mean([table.iloc[row] for table in measured])) for row in (0, -1))
                rows.append({"set": name, "arm": arm, "first": first, "last": last, "runs": len(measured)})
    return rows


def _staleness(found: ExperimentRuns) -> Values:
    """Lag, clipping, ratios and use of the replay buffer of each asynchronous arm."""
    rows = {}
    for arm, runs in found.arms.items():
        if not (settings := value(runs[0], "asynchronous")):
            continue
        history, last = pd.concat([run.history for run in runs]), pd.DataFrame([run.history.iloc[-1] for run in runs])
        left = float(last["replay/left"].sum()) if settings["replay_capacity"] > 1 else 0.0
        used = ("uses_mean", "never_drawn") if left else ()
        rows[arm] = {
            "lag_mean": history["lag_mean"].mean(),
            "lag_max": history["lag_max"].max(),
            "clip_fraction": history["clip_fraction"].mean(),
            "gradient_norm": history["gradient_norm"].median(),
            **{key: history[key].median() for key in ("ratio_min", "ratio_mean", "ratio_max")},
            **{key: (last["replay/left"] * last[f"replay/{key}"]).sum() / left for key in used},
        }
    return rows


# ------------------------------------------------------------------------------------------------- the study as a whole


def own_experiments(experiments: Collection[str], claims: Sequence[Values]) -> list[str]:
    """The experiments of which a study is about: those of its own claims, else those that are not the handouts'."""
    claimed = [claim["experiment"] for claim in claims if claim["own"]]
    return list(dict.fromkeys(claimed)) or [name for name in experiments if name not in of_the_handouts()]


def _headline(evidence: Mapping[str, ExperimentRuns], experiments: dict[str, Values], own: Sequence[str]) -> Values:
    """The best winner of GRPO experiments on the main task that start from the base model; without any, others count.

    The study's own experiments come first (:func:`own_experiments`), then winners without a collapsed run, then those with the
    highest mean on the problems that select, so that the shown mean is not the largest of several.
    """

    def order(name: str) -> tuple[bool | float, ...]:
        entry, arm = experiments[name], winner_of(experiments[name])
        started = value(evidence[name].arms[arm["arm"]][0], "start_from")
        kind = name in own, entry["task"] == MAIN, entry["method"] == "grpo", not started
        return *kind, not arm["collapsed"], arm["selection"]

    name = max([name for name in experiments if name != CONTROLS_IN] or experiments, key=order)
    arm = winner_of(experiments[name])
    keys = ("arm", "label", "value", "low", "high", "start", "problems")
    return {"experiment": name, "runs": len(arm["runs"]), **{key: arm[key] for key in keys}}


def winner_of(entry: Mapping[str, Any]) -> Values:
    """The winner's entry among an experiment's arms in the record."""
    return arm_of(entry, entry["winner"])


def arm_of(entry: Mapping[str, Any], name: str) -> Values:
    """An arm's entry in the record."""
    found: Values = next(arm for arm in entry["arms"] if arm["arm"] == name)
    return found
