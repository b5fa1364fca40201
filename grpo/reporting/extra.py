"""What the record has of single kinds of experiments: traces, rounds of expert iteration, staleness, kinds of responses."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pandas as pd

from grpo.common.files import read_jsonl
from grpo.results.intervals import difference_of
from grpo.results.runs import Run, by_arm, final_scores, value
from grpo.results.statistics import wilson_interval
from grpo.study import paths
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study
from grpo.tasks.mixture import Mixture

Values = dict[str, Any]
SUM = re.compile(r"(-?(?<!\d)\d{1,18}) ([+-]) (\d{1,18}) = (-?\d{1,18})(?!\d)")
SHOWN = 2  # samples before and after training, and examples of each zero-shot outcome
LONGEST = 1200  # characters of a response or question
KEYWORD_KINDS = ("lists_only", "repeats_prompt", "is_sentence")
VARIED = ("ei_batch_size", "group_size", "epochs_per_ei_step")  # settings that arms of expert iteration vary


def extras(
    study: Study, runs: list[Run], entry: Values, of_all: dict[str, list[Run]], experiments: dict[str, Values]
) -> Values:
    """Collect what only this kind of experiment has; keys without content are left out.

    Args:
        entry: the experiment's entry in the record.
        of_all, experiments: all runs and entries, by experiment.
    """
    winner = by_arm(runs)[entry["winner"]]
    found = {
        "rounds": _rounds(runs, winner) if entry["method"] == "expert_iteration" else None,
        "traces": _traces(runs) if entry["method"] == "sft" else None,
        "staleness": _staleness(runs, of_all),
        "kinds": _kinds(runs),
        "leaderboard": [_full(run) for run in runs if "full/answer_reward" in run.metrics],
        "further_sets": _by_column({n: f"val/also/{n}/{study.metric}" for n in study.also_evaluated(entry["task"])}, runs),
        "mixture": _by_column({n: f"val/{n}/answer_reward" for n in _parts(study, entry["task"])}, runs),
        "parts": {by: _by_problem(study, entry["task"], winner, by) for by in ("level", "subject")},
    }
    return {key: of for key, of in found.items() if of}


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

    Problems whose last answer is right and whose written sums are correct come first: a right answer may follow a wrong sum.
    """
    keys = ("step", "problem", "prompt", "response", "ground_truth", "format_reward", "answer_reward", "reward")
    found = read_jsonl(paths.RUNS / run / "rollouts.jsonl", stage_of_run(run), lambda one: {key: one[key] for key in keys})
    first, last = min(one["step"] for one in found), max(one["step"] for one in found)
    at_end = [one for one in found if one["step"] == last]
    best_first = sorted(at_end, key=lambda one: not (one["answer_reward"] == 1 and sums_hold(one["response"])))
    chosen = [one["problem"] for one in best_first[:SHOWN]]
    return [
        one | {key: str(one[key])[-LONGEST:] for key in ("prompt", "response", "ground_truth")} | {"run": run}
        for step in (first, last)
        for one in found
        if one["step"] == step and one["problem"] in chosen
    ]


def sums_hold(response: str) -> bool:
    """Whether every sum and difference of numbers of up to 18 digits in a response is correct; ``4 - 5 = 1`` is not."""
    return all(int(a) + int(sign + b) == int(c) for a, sign, b, c in SUM.findall(response))


# ------------------------------------------------------------------------------------------------- by kind of experiment


def _traces(runs: list[Run]) -> Values:
    """The effect of more examples, and of leaving out those that do not earn the reward, on the final answer reward."""
    arms = sorted(by_arm(runs).values(), key=lambda of: of[0].metrics["examples"])
    every, filtered = ([of for of in arms if value(of[0], "filtered") is which] for which in (False, True))
    return {
        "more": _difference(every[0], every[-1]) if len(every) > 1 else None,
        "filtering": _difference(every[-1], filtered[-1]) if every and filtered else None,
    }


def _difference(first: list[Run], second: list[Run]) -> Values:
    """Final answer reward of an arm minus that of another."""
    found = difference_of(final_scores(first), final_scores(second))
    names = {"arm": second[0].arm, "against": first[0].arm}
    return names | {key: getattr(found, key) for key in ("value", "low", "high")}


def _rounds(runs: list[Run], winner: list[Run]) -> Values:
    """The winner's mean reward and entropy after each round, and pairs of arms that differ in one setting only."""
    arms = by_arm(runs)
    by_step = pd.concat([run.validation for run in winner]).groupby("step").mean()
    pairs = []
    for key in VARIED:
        groups: dict[str, list[str]] = {}
        for arm, own in arms.items():
            groups.setdefault(json.dumps([value(own[0], other) for other in VARIED if other != key]), []).append(arm)
        for members in groups.values():
            ordered = sorted(members, key=lambda arm: float(value(arms[arm][0], key)))
            pairs += [{"setting": key} | _difference(arms[a], arms[b]) for a, b in itertools.pairwise(ordered)]
    columns = {"answer_reward": winner[0].column, "entropy": "val/token_entropy"}
    return {
        "steps": by_step.index.tolist(),
        **{name: by_step[column].tolist() for name, column in columns.items() if column in by_step},
        "pairs": pairs,
    }


def _kinds(runs: list[Run]) -> Values:
    """Shares of the keyword task's kinds of responses before and after training."""
    columns = {kind: f"val/{kind}" for kind in KEYWORD_KINDS}
    if any(column not in run.validation for run in runs for column in columns.values()):
        return {}
    return {
        kind: {
            when: float(np.mean([run.validation[column].iloc[row] for run in runs]))
            for when, row in (("before", 0), ("after", -1))
        }
        for kind, column in columns.items()
    }


def _full(run: Run) -> Values:
    """A run's score on the whole validation set."""
    n = run.metrics["full/problems"]
    low, high = wilson_interval(run.metrics["full/answer_reward"] * n, n)
    ended = {"steps": run.metrics["steps"], "cut": run.metrics["time_limit_step"] is not None}
    return {"run": run.name, "value": run.metrics["full/answer_reward"], "low": low, "high": high, "problems": n, **ended}


def _parts(study: Study, task: str) -> tuple[str, ...]:
    made = study.task(task)
    return tuple(made.parts) if isinstance(made, Mixture) else ()


def _by_column(columns: dict[str, str], runs: list[Run]) -> list[Values]:
    """First and last value of each arm by column, means over runs, without NaN (steps without this evaluation)."""
    rows = []
    for name, column in columns.items():
        for arm, own in by_arm(runs).items():
            measured = [values for run in own if column in run.validation and len(values := run.validation[column].dropna())]
            if measured:
                first, last = (float(np.mean([of.iloc[row] for of in measured])) for row in (0, -1))
                rows.append({"set": name, "arm": arm, "first": first, "last": last, "runs": len(measured)})
    return rows


def _by_problem(study: Study, task: str, runs: list[Run], by: str) -> Values:
    """Answer reward before and after training by a property of the problems, if they have it; means over runs."""
    count = runs[0].outcomes.shape[1]
    made_by = f"dataset@{task}"
    kinds = read_jsonl(paths.validation(task), made_by, lambda record: str(record.get(by) or ""))[:count]
    if len(set(kinds)) < 2:
        return {}
    first, last = (pd.Series(np.mean([run.outcomes[row] for run in runs], axis=0)).groupby(pd.Series(kinds)) for row in (0, -1))
    sizes, before, after = first.size(), first.mean(), last.mean()
    return {kind: {"problems": int(sizes[kind]), "before": before[kind], "after": after[kind]} for kind in sizes.index}


# ----------------------------------------------------------------------------------------------------- asynchronous runs


def _staleness(runs: list[Run], of_all: dict[str, list[Run]]) -> Values:
    """Lag, clipping, ratios and use of the replay buffer of each asynchronous arm, and whether lag 0 equals one process."""
    apart = {arm: own for arm, own in by_arm(runs).items() if own[0].config["config"].get("asynchronous", {}).get("value")}
    others = [run for of in of_all.values() for run in of if not run.config["config"].get("asynchronous", {}).get("value")]
    found = {}
    for arm, own in apart.items():
        history, settings = pd.concat([run.history for run in own]), value(own[0], "asynchronous")
        last = pd.DataFrame([run.history.iloc[-1] for run in own])
        left = float(last["replay/left"].sum()) if settings["replay_capacity"] > 1 else 0.0
        reused = (
            {key: (last["replay/left"] * last[f"replay/{key}"]).sum() / left for key in ("uses_mean", "never_drawn")}
            if left
            else {}
        )
        found[arm] = {
            "lag_mean": history["lag_mean"].mean(),
            "lag_max": history["lag_max"].max(),
            "bound": lag_bound(settings),
            "clip_fraction": history["clip_fraction"].mean(),
            "gradient_norm": history["gradient_norm"].median(),
            **{key: history[key].median() for key in ("ratio_min", "ratio_mean", "ratio_max")},
            **reused,
            "parted": _agreement(own, others) if settings["max_policy_lag"] == 0 and settings["replay_capacity"] == 1 else None,
        }
    return found


def lag_bound(settings: Values) -> int:
    """The largest lag of a token (policy versions) that the settings ``asynchronous:`` allow.

    New rollouts lag by at most ``max_policy_lag``; those in a buffer of N batches are up to N - 1 steps older.
    """
    oldest = int(settings["max_policy_lag"] + settings["replay_capacity"] - 1)
    return oldest if settings["replay_max_age"] is None else min(oldest, int(settings["replay_max_age"]))


def _agreement(own: list[Run], others: list[Run]) -> Values | None:
    """The arm in one process with equal settings, if any, and the first evaluation at which each seed's results differ."""
    ignored = ("asynchronous", "n_grpo_steps", "loss_type")

    def settings(run: Run) -> Values:
        return {key: of["value"] for key, of in run.config["config"].items() if key not in ignored}

    pairs = [(run, next((o for o in others if o.seed == run.seed and settings(o) == settings(run)), None)) for run in own]
    found = [(run, other) for run, other in pairs if other is not None]
    if not found:
        return None
    return {
        "arm": f"{found[0][1].experiment}/{found[0][1].arm}",
        "seeds": len(found),
        "at": [first_difference(*pair) for pair in found],
    }


def first_difference(first: Run, second: Run) -> int | None:
    """The step of the first evaluation at which two runs differ on a problem; None if those that both have are equal."""
    steps = [run.validation["step"].tolist() for run in (first, second)]
    for step in steps[0]:
        if step in steps[1]:
            a, b = (run.outcomes[of.index(step)] for run, of in zip((first, second), steps, strict=True))
            if not np.array_equal(a, b):
                return int(step)
    return None
