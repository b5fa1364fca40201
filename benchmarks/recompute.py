"""Recompute the numbers of reports/record.json from the run folders, without using the package.

``python benchmarks/recompute.py [FOLDER]`` reads ``params.yaml``, ``data`` and the claims of a finished study and computes its
results, choices, zero-shot and best-of-N estimates, KL and verdicts. It prints how many numbers of each kind agree with the
record, and each that differs by more than rounding; then the exit code is 1. Formulas: docs/statistics.md.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from math import comb, inf
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from scipy import stats

Table = np.ndarray[Any, np.dtype[np.float64]]
Estimate = tuple[float, float, float]  # a value and its interval
MATH = ("math", "arithmetic")  # tasks that the published claims are about


class NotMeasured(Exception):
    """The study lacks what a claim needs."""


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path) if path.suffix == ".yaml" else json.loads(path.read_text())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------ estimates


def wilson(successes: float, trials: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval; a sum that is no whole number gets the ends of the whole numbers around it."""
    z, ends = stats.norm.ppf((1 + level) / 2), []
    for count, sign in ((math.floor(round(successes, 9)), -1), (math.ceil(round(successes, 9)), 1)):
        p = count / trials
        half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
        ends.append((p + z * z / (2 * trials) + sign * half) / (1 + z * z / trials))
    return successes / trials, max(0.0, ends[0]), min(1.0, ends[1])


def student(mean: float, error: float, df: float, level: float = 0.95) -> Estimate:
    half = stats.t.ppf((1 + level) / 2, df) * error
    return mean, mean - half, mean + half


def spread(table: Table, arms: int) -> tuple[float, float, float]:
    """Mean of a table (runs, problems), its standard error over new runs and problems, and Satterthwaite's degrees of freedom."""
    runs, problems = table.shape
    left = table - table.mean(axis=0) - table.mean(axis=1)[:, None] + table.mean()
    inside = (left**2).sum() / ((runs - 1) * (problems - 1)) / problems if runs > 1 else 0.0  # of a run's mean, from sampling
    between = table.mean(axis=1).var(ddof=1) if runs > 1 else 0.0
    by_runs = (between / runs, runs - 1) if between > inside else (inside / runs, (runs - 1) * (problems - 1))
    squares = table.mean(axis=0).var(ddof=0) * problems
    squares = 1.0 if arms == 2 and squares < 1e-9 else squares  # as if two equal arms differed in one problem
    by_problems = (max(0.0, squares / (problems - 1) / problems - inside / runs), problems - 1)
    parts = [by_runs if runs > 1 else (arms * 0.045**2, 4), by_problems]
    variance = sum(part for part, _ in parts)
    weight = sum(part**2 / df for part, df in parts)
    return table.mean(), math.sqrt(variance), max(1, math.floor(variance**2 / weight)) if weight else problems - 1


def mean(table: Table) -> Estimate:
    value, error, df = spread(table, 1)
    _, low, high = wilson(value * table.shape[1], table.shape[1]) if error < 1e-9 else student(value, error, df)
    return value, max(0.0, low), min(1.0, high)


def difference(first: Table, second: Table) -> Estimate:
    """First minus second, paired by seed and problem."""
    runs = min(len(first), len(second))
    value, low, high = student(*spread(first[:runs] - second[:runs], 2))
    return value, max(-1.0, low), min(1.0, high)


# ---------------------------------------------------------------------------------------------------- runs, experiments


class Run:
    """A run's result files, and whether it collapsed."""

    def __init__(self, folder: Path, name: str):
        self.name, path = name, folder / "data/runs" / name
        config = read(path / "config.yaml")
        rewards = [np.array(line["answer_reward"], float) for line in lines(path / "outcomes.jsonl")]
        share = config["evaluation"]["selection_problems"] * len(rewards[-1]) // config["evaluation"]["last_problems"]
        self.selection, self.final, self.last = rewards[-1][: share or None], rewards[-1][share:], rewards[-1]
        self.outcomes: Table = np.array([of[: len(rewards[0])] for of in rewards])
        self.values = {key: of["value"] for key, of in config["config"].items()}
        self.history, self.validation = pd.read_csv(path / "history.csv"), pd.read_csv(path / "validation.csv")
        self.stopped = read(path / "metrics.json")["diverged_step"]
        self.steps, self.kl = int(self.validation["step"].iloc[-1]), pd.DataFrame()
        self.collapse = self._collapse()

    def _collapse(self) -> str | None:
        """What shows that the run ends below half of its best evaluation or training reward by more than chance."""
        means, ended, found = self.outcomes.mean(axis=1), self.final.mean(), {}
        fall = self.outcomes[means.argmax()] - self.outcomes[-1]
        error = math.sqrt(max(fall.var(ddof=1), (1 / (len(fall) - 1)) * (fall.var() < 1e-12)) / len(fall))
        low = student(fall.mean(), error, len(fall) - 1, 0.95 ** (1 / len(means)))[1]
        if ended < means.max() / 2 and low > 0:
            found["evaluations"] = means.max()
        if "train/answer_reward" in self.history and "rollout_batch_size" in self.values:
            best = self.history.drop_duplicates("step")["train/answer_reward"].dropna()
            groups = self.values["rollout_batch_size"] // self.values["group_size"]
            if len(best) and ended < wilson(best.max() * groups, groups, 1 - 0.05 / len(best))[1] / 2:
                found["training rewards"] = best.max()
        return f"divergence at {self.stopped}" if self.stopped is not None else max(found, key=lambda kind: found[kind], default=None)

    def series(self, metric: str, how: str = "mean") -> "pd.Series[float]":
        """A metric by step."""
        column = metric.removeprefix("kl/")
        tables = [self.kl] if metric.startswith("kl/") else [self.history, self.validation]
        for table in tables:
            if column in table:
                values = table[column].astype(float)
                return values.where(np.isfinite(values), inf).groupby(table["step"]).agg(how)
        raise NotMeasured(f"no {metric}")

    def level(self, metric: str, at: str, first: float = 0, last: float = inf) -> float:
        """Logarithm of the median over the first or last sixteenth, the last quarter, or all of a stretch of steps."""
        values = self.series(metric).loc[first:last].to_numpy()
        if len(values) < 2:
            raise NotMeasured(f"fewer than two values of {metric}")
        few, many = math.ceil(len(values) / 16), math.ceil(len(values) / 4)
        part = {"start": values[:few], "end": values[-few:], "late": values[-many:], "throughout": values}[at]
        return math.log(max(np.median(part), 1e-8))

    def peak(self, metric: str, until: float = inf) -> float:
        """The highest median over a block of four steps."""
        values = self.series(metric, "max").loc[:until].to_numpy()
        return max((np.median(part) for part in np.array_split(values, max(1, len(values) // 4)) if len(part)), default=-inf)


def setting_of(arm: str) -> str:
    return re.sub(r"-rate_[^-]*$", "", arm)


class Experiment:
    """The runs of an experiment by arm, in the order of params.yaml, and what they choose."""

    def __init__(self, name: str, arms: dict[str, list[Run]], pinned: str | None):
        self.name, self.arms = name, arms
        self.fallen = {arm: [run.name for run in runs if run.collapse] for arm, runs in arms.items()}
        settings: dict[str, list[str]] = defaultdict(list)
        for arm in arms:
            settings[setting_of(arm)].append(arm)
        self.chosen = {setting: self.simplest(tried) for setting, tried in settings.items()}
        every = [*self.chosen.values()]
        self.leader, self.winner = self.ranked(every)[0], pinned or self.simplest(every)
        self.runner_up = next(iter(self.ranked(every)[1:]), None)
        self.steps = min((run.steps for runs in arms.values() for run in runs if run.stopped is None), default=0)

    def table(self, arm: str, of: str = "final") -> Table:
        return np.array([run.outcomes[0] if of == "start" else getattr(run, of) for run in self.arms[arm]])

    def ranked(self, arms: list[str]) -> list[str]:
        """The arms that may win, highest on the problems that select first."""
        whole = [arm for arm in arms if not self.fallen[arm]]
        some = [arm for arm in arms if len(self.fallen[arm]) < len(self.arms[arm])]
        return sorted(whole or some or arms, key=lambda arm: -self.table(arm, "selection").mean())

    def simplest(self, arms: list[str]) -> str:
        """The first arm within one standard error of the best."""
        ranked = self.ranked(arms)
        best = self.table(ranked[0], "selection")
        behind = {arm: spread(best - self.table(arm, "selection"), 2) for arm in ranked[1:]}
        return next(arm for arm in arms if arm == ranked[0] or (arm in behind and behind[arm][0] <= behind[arm][1]))


# --------------------------------------------------------------------------------------------------------------- claims


def judge(claim: dict[str, Any], own: bool, found: dict[str, Experiment], tasks: dict[str, str]) -> tuple[str, Estimate | None]:
    """The verdict on a claim by the rule of its kind, and the interval that decides."""
    keys = ("arm", "beats", "not_below", "collapses", "control")
    try:
        if not own and tasks[claim["experiment"]] not in MATH:
            raise NotMeasured("another task")
        sides = [name_of(claim[key], claim["experiment"], found) for key in keys if claim.get(key)]
        require(claim.get("requires", {}), found[claim["experiment"]])
        if len(sides) == 2 and sides[0] == sides[1]:
            verdict, interval = "disagrees", None
        else:
            verdict, interval = decide(claim, [(found[name], arm) for name, arm in sides], found[claim["experiment"]])
    except NotMeasured:
        return "not tested", None
    early = min(found[name].steps for name in {claim["experiment"], *(name for name, _ in sides)}) < claim.get("horizon", 0)
    any_step = "collapses" in claim or "share_above" in claim  # it may be confirmed at any step
    return ("not tested" if early and not (any_step and verdict == "agrees") else verdict), interval


def name_of(text: str, experiment: str, found: dict[str, Experiment]) -> tuple[str, str]:
    """The experiment and the arm that a claim names."""
    experiment, arm = text.rpartition("/")[0] or experiment, text.rpartition("/")[2]
    if experiment not in found:
        raise NotMeasured(experiment)
    of = found[experiment]
    arm = {"leader": of.leader, "first": [*of.arms][0], "last": [*of.arms][-1]}.get(arm, of.chosen.get(arm, arm))
    if arm not in of.arms:
        raise NotMeasured(arm)
    return experiment, arm


def require(needs: dict[str, Any], of: Experiment) -> None:
    """Check a claim's preconditions."""
    met = not needs.get("learns") or mean(of.table(of.leader))[1] > of.table(of.leader, "start").mean()
    lengths = [run.validation["val/response_length"].iloc[0] for run in of.arms[of.leader]]
    met = met and np.mean(lengths) >= needs.get("response_tokens", 0)
    for setting in needs.get("best_rate_inside", []):
        rates = {arm: float(runs[0].values["learning_rate"]) for arm, runs in of.arms.items() if setting_of(arm) == setting}
        met = met and len(rates) > 2 and min(rates.values()) < rates[of.chosen[setting]] < max(rates.values())
    if not met:
        raise NotMeasured("a precondition")


def above(interval: Estimate, bar: float, other: float = inf) -> str:
    _, low, high = interval
    return "agrees" if low > bar else "cannot tell" if high >= bar else "no difference" if low > other else "disagrees"


def beside(arm: str, control: str) -> str:
    """A claim about a cause: the arm shows it, and the control does not."""
    return arm if arm != "agrees" or control == "disagrees" else "disagrees" if control == "agrees" else "cannot tell"


def decide(claim: dict[str, Any], sides: list[tuple[Experiment, str]], own: Experiment) -> tuple[str, Estimate]:
    """The rules of the five kinds. ``sides``: the arm, then the other arm or the control."""
    runs = [of.arms[arm] for of, arm in sides]
    by = claim.get("by", 0.0)
    if "beats" in claim or "not_below" in claim:
        if len(runs[0]) == len(runs[1]) and all(
            a.history.equals(b.history) and np.array_equal(a.last, b.last) for a, b in zip(*runs, strict=True)
        ):
            raise NotMeasured("identical results")
        if claim.get("metric", "answer_reward") == "answer_reward":
            at = claim.get("at", "end")
            lengths = {run.steps for of_arm in runs for run in of_arm if run.stopped is None}
            if at == "end" and sides[0][0] is sides[1][0] and len(lengths) > 1:
                raise NotMeasured("different numbers of steps")
            gap = difference(*(of.table(arm, "start" if at == "start" else "final") for of, arm in sides))
            return (above(gap, by, -by) if "beats" in claim else above(gap, -by)), gap
        logs = []
        for pair in zip(*runs, strict=True):
            last = min(float(run.history["step"].max()) for run in pair)
            logs.append(pair[0].level(claim["metric"], claim["at"], 0, last) - pair[1].level(claim["metric"], claim["at"], 0, last))
        return above(ratio := over_runs(logs), by, 1 / by), ratio
    if "trend" in claim:
        shown = [trend(claim, of_arm) for of_arm in runs]
        return (beside(shown[0][0], shown[1][0]) if len(shown) > 1 else shown[0][0]), shown[0][1]
    if "collapses" in claim:
        hits = [[run.collapse is not None for run in of_arm] for of_arm in runs]
    else:
        hits = share(claim, runs, own)
    intervals = [wilson(sum(of), len(of)) for of in hits]
    return beside(*(above(one, 0.5) for one in intervals)), intervals[0]


def over_runs(logs: list[float]) -> Estimate:
    """The ratio whose logarithm is the mean over runs, with Student's interval."""
    if len(logs) < 2 or not np.isfinite(logs).all():
        raise NotMeasured("one run, or a metric that is not finite")
    low, value, high = (math.exp(min(end, 700)) for end in sorted(student(float(np.mean(logs)), stats.sem(logs), len(logs) - 1)))
    return value, low, high


def trend(claim: dict[str, Any], runs: list[Run]) -> tuple[str, Estimate]:
    """Whether the last level lies beyond ``by`` times the first."""
    first, last = [*claim.get("steps", []), *(0, inf)[len(claim.get("steps", [])) :]]
    if min(run.history["step"].max() for run in runs) < last < inf:
        raise NotMeasured("too few steps")
    logs = [run.level(claim["metric"], "late", first, last) - run.level(claim["metric"], "start", first, last) for run in runs]
    ratio, by = over_runs(logs), claim["by"]
    up, down = above(ratio, by), above((1 / ratio[0], 1 / ratio[2], 1 / ratio[1]), by)
    stays = "disagrees" if "agrees" in (up, down) else "cannot tell" if "cannot tell" in (up, down) else "agrees"
    return {"grows": up, "falls": down, "stays": stays}[claim["trend"]], ratio


def share(claim: dict[str, Any], sides: list[list[Run]], own: Experiment) -> list[list[bool]]:
    """Whether each run of the arm (without one: each that collapsed, before it did), and of the control, exceeds the bar."""
    metric, until = claim["metric"], {}
    if not sides:
        every = [run for runs in own.arms.values() for run in runs]
        lost = [run for run in every if run.collapse]
        sizes = [run.values["train_batch_size"] for run in lost]
        sides = [lost, [run for run in every if not run.collapse and run.values["train_batch_size"] in sizes]]
        for run in lost:
            means = run.outcomes.mean(axis=1)
            low = np.flatnonzero((np.arange(len(means)) > means.argmax()) & (means < means.max() / 2))
            until[run.name] = run.validation["step"].iloc[low[0] if len(low) else -1]
    if not all(sides):
        raise NotMeasured("no runs")
    bar = claim["share_above"] * np.median([run.series(metric).median() for run in sides[1]])
    return [[run.peak(metric, until.get(run.name, inf)) > bar for run in runs] for runs in sides]


# ----------------------------------------------------------------------------------------------------------- comparison


class Check:
    """Compares computed values with the record's, and counts them by kind."""

    def __init__(self) -> None:
        self.same: Counter[str] = Counter()
        self.all: Counter[str] = Counter()

    def __call__(self, kind: str, where: str, computed: Any, recorded: Any) -> None:
        """Compare a name, a number, or an estimate with its value, low and high."""
        if isinstance(recorded, dict) and "value" in recorded:
            recorded = [recorded[key] for key in ("value", "low", "high")]
        numeric = isinstance(computed, tuple | float) and recorded is not None
        same = np.allclose(computed, recorded, rtol=1e-6, atol=1e-9) if numeric else computed == recorded
        self.all[kind], self.same[kind] = self.all[kind] + 1, self.same[kind] + same
        if not same:
            print(f"DIFFERS {kind}, {where}: computed {computed}, recorded {recorded}")


def check_experiment(check: Check, of: Experiment, entry: dict[str, Any]) -> None:
    for key in ("leader", "runner_up", "winner"):
        check(key, of.name, getattr(of, key), entry[key])
    best = of.table(of.leader, "selection")
    margin = difference(best, of.table(of.runner_up, "selection")) if of.runner_up else None
    check("margin", of.name, margin, entry["margin"])
    check("arms", of.name, [*of.arms], [arm["arm"] for arm in entry["arms"]])
    for arm in entry["arms"]:
        name, where = arm["arm"], f"{of.name}/{arm['arm']}"
        check("value of an arm", where, mean(of.table(name)), arm)
        check("mean that selects", where, float(of.table(name, "selection").mean()), arm["selection"])
        check("start", where, float(of.table(name, "start").mean()), arm["start"])
        check("collapsed runs", where, of.fallen[name], [one["run"] for one in arm["collapsed"]])
        check("chosen rate", where, name in of.chosen.values(), arm["chosen"])
        below = None if name == of.leader else difference(of.table(of.leader), of.table(name))
        check("below the leader", where, below, arm["below"])


def check_samples(check: Check, folder: Path, record: dict[str, Any]) -> None:
    """Zero-shot accuracy and categories, and the estimates from several samples."""
    for prompt, of in record["baseline"].items():
        answers = lines(folder / f"data/math_baseline/{prompt}.jsonl")
        check("zero-shot accuracy", prompt, wilson(sum(one["answer_reward"] for one in answers), len(answers)), of["accuracy"])
        kinds = Counter(f"format {one['format_reward']:g}, answer {one['answer_reward']:g}" for one in answers)
        check("zero-shot categories", prompt, dict(kinds), {key: count for key, count in of["categories"].items() if count})
    for prompt, of in record["best_of_n"].items():
        samples = [pd.DataFrame(one["samples"]) for one in lines(folder / f"data/best_of_n/{prompt}.jsonl")]
        for n, estimates in ((int(n), estimates) for n, estimates in of["n"].items()):
            passed, best = [], []
            for one in samples:
                size, right = len(one), one["answer_reward"] == 1
                passed.append(1 - comb(size - right.sum(), n) / comb(size, n))
                rank = one["mean_log_prob"].rank(method="first", ascending=False).astype(int) - 1
                first = rank.map(lambda k, size=size, n=n: comb(size - 1 - k, n - 1) / comb(size, n))  # it is the best of n
                best.append((first * right.groupby(one["mean_log_prob"]).transform("mean")).sum())
            for kind, values in (("pass", passed), ("best", best)):
                found = student(float(np.mean(values)), float(stats.sem(values)), len(values) - 1)
                check(f"{kind}@N", f"{prompt}, {n}", (found[0], max(0.0, found[1]), min(1.0, found[2])), estimates[kind])


def check_kl(check: Check, folder: Path, record: dict[str, Any], runs: dict[str, Run]) -> None:
    """KL per token of each file of responses."""
    for path in sorted(folder.glob("data/kl/*.jsonl")):
        sums = pd.DataFrame(lines(path)).groupby(["run", "step"])[["sampled", "low_variance", "tokens"]].sum()
        rates = pd.DataFrame({"per_token": sums["sampled"], "per_token_low_variance": sums["low_variance"]}).div(sums["tokens"], axis=0)
        rates = rates.reset_index()
        for name, of in rates.groupby("run"):
            runs[str(name)].kl = of
        rates["arm"] = rates["run"].str.split("/").str[1]
        for (arm, step), of in rates.groupby(["arm", "step"]):
            entry = next(one for one in record["experiments"][path.stem]["kl"][arm] if one["step"] == step)
            for kind in ("per_token", "per_token_low_variance"):
                check("KL", f"{arm}, step {step}", float(of[kind].mean()), entry[kind]["value"])


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    params, record, check = read(folder / "params.yaml"), read(folder / "reports/record.json"), Check()
    entries = {name: entry for name, entry in params["experiments"].items() if entry["arms"]}
    pinned, found, runs = params["selection"].get("pinned") or {}, {}, {}
    for name, entry in entries.items():
        seeds = params["seeds"][: entry.get("seeds")]
        arms = {arm: [Run(folder, f"{name}/{arm}/{seed}") for seed in seeds] for arm in entry["arms"]}
        runs |= {run.name: run for of in arms.values() for run in of}
        found[name] = Experiment(name, arms, pinned.get(name))
        check_experiment(check, found[name], record["experiments"][name])
    check_kl(check, folder, record, runs)
    check_samples(check, folder, record)

    def order(name: str) -> tuple[bool, bool, bool, bool, float]:
        of, entry = found[name], entries[name]
        start = of.arms[of.winner][0].values.get("start_from")
        selected = float(of.table(of.winner, "selection").mean())
        return entry.get("task", "main") == "main", entry.get("method", "grpo") == "grpo", not start, not of.fallen[of.winner], selected

    best = found[max(found, key=order)]
    check("headline", "arm", [best.name, best.winner], [record["headline"]["experiment"], record["headline"]["arm"]])
    check("headline", "value", mean(best.table(best.winner)), record["headline"])
    tasks = {name: params["tasks"][entry.get("task", "main")]["use"] for name, entry in entries.items()}
    published = read(Path(__file__).parents[1] / "grpo/results/claims.yaml")["claims"]
    claims = [(claim, False) for claim in published if claim["experiment"] in found] + [(one, True) for one in params.get("claims", [])]
    judged = [one for one in record["claims"] if one["kind"]]  # without those that no study tests
    for (claim, own), recorded in zip(claims, judged, strict=True):
        verdict, interval = judge({"experiment": recorded["experiment"]} | claim, own, found, tasks)
        check("verdict", recorded["id"], verdict, recorded["verdict"])
        check("interval of a claim", recorded["id"], interval, recorded["interval"])
    for kind, count in check.all.items():
        print(f"{kind}: {check.same[kind]} of {count} agree")
    return int(check.same != check.all)


if __name__ == "__main__":
    sys.exit(main())
