"""Compute a study's results, choices and verdicts again from its runs' scores, without :mod:`grpo.results`.

The scores come from reports/outcomes.csv (its columns: :mod:`grpo.results.outcomes_file`) or from a run folder. Formulas:
docs/statistics.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from math import comb, inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from scipy import optimize, stats

from grpo.common.files import read_text

Table = np.ndarray[Any, np.dtype[np.float64]]
Estimate = tuple[float, float, float]  # a value and its interval
Values = dict[str, Any]
SCORES = ("start", "before", "best", "last")
TEXTS = ("run", "metric", "start_from", "levels", "history", "samples")


class NotMeasured(Exception):
    """The study lacks what a claim needs."""


class Difference(NamedTuple):
    """A place whose content is not what follows from the runs."""

    file: str
    place: str
    written: str
    recomputed: str


def lines(path: Path) -> list[Any]:
    """Read a file with a JSON value in each line."""
    return [json.loads(line) for line in read_text(path, made_by="").splitlines()]


# -------------------------------------------------------------------------------------------------------------- runs


def rows_of_file(path: Path) -> dict[str, Values]:
    """Read reports/outcomes.csv: run -> row."""
    rows: dict[str, Values] = {}
    for text in pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records"):
        row: Values = {
            str(key): (content if key in TEXTS else float(content)) if content else None
            for key, content in text.items()
            if key not in SCORES
        }
        row |= {key: np.array([*text[key]] if text[key].isdigit() else text[key].split(), float) for key in SCORES}
        rows[text["run"]] = row | {"levels": json.loads(text["levels"])}
    return rows


def row_of_folder(folder: Path, name: str, levels: Iterable[str]) -> Values:
    """Read a run folder to what reports/outcomes.csv says of it, with these levels."""
    config = YAML(typ="safe").load(folder / "config.yaml")
    values = {key: setting["value"] for key, setting in config["config"].items()}
    records = lines(folder / "outcomes.jsonl")
    metric = "reward" if "reward" in records[0] else "answer_reward"
    every = [np.array(record[metric], float) for record in records]
    shared = np.array([scores[: len(every[0])] for scores in every])
    best = int(shared.mean(axis=1).argmax())
    history, validation = (pd.read_csv(folder / f"{table}.csv") for table in ("history", "validation"))
    rewards = history.drop_duplicates("step").get(f"train/{metric}", pd.Series(dtype=float)).dropna()
    share = config["evaluation"]["selection_problems"] * len(every[-1]) // config["evaluation"]["last_problems"]
    grouped = values.get("rollout_batch_size") is not None and metric != "reward"
    length = validation.get("val/response_length")
    return {
        "run": name,
        "metric": metric,
        "selection": share,
        "evaluations": len(every),
        "steps": int(validation["step"].iloc[-1]),
        "trained": float(history["step"].max()),
        "stopped": json.loads(read_text(folder / "metrics.json", made_by=""))["diverged_step"],
        "learning_rate": values.get("learning_rate"),
        "start_from": values.get("start_from"),
        "response_length": None if length is None else length.iloc[0],
        "groups": values["rollout_batch_size"] // values["group_size"] if grouped else None,
        "train_steps": len(rewards) or None,
        "train_best": rewards.max() if len(rewards) else None,
        "start": shared[0],
        "before": shared[-2],
        "best": shared[best] if best < len(shared) - 1 else np.array([]),
        "last": every[-1],
        "levels": {key: _level([history, validation, _kept(name)], *re.split(r" (?:to )?", key)) for key in levels},
        "history": hashlib.sha256((folder / "history.csv").read_bytes()).hexdigest()[:12],
    }


def _kept(name: str) -> pd.DataFrame:
    """What reports/kl says of a run's kept checkpoints; as it is measured of few, the last counts at every step."""
    experiment, arm, _ = name.split("/")
    path = Path("reports/kl") / f"{experiment}.json"
    steps = json.loads(read_text(path, made_by=f"kl@{experiment}"))["arms"].get(arm, []) if path.exists() else []
    values = [step["by_run"][name] for step in steps if name in step["by_run"]]
    prefixed = [{("val/" if key.endswith("_reward") else "kl/") + key: value for key, value in step.items()} for step in values]
    return pd.DataFrame(prefixed).drop(columns="val/answer_reward", errors="ignore").assign(step=0)[-1:]


def _level(tables: list[pd.DataFrame], metric: str, at: str, last: str) -> float:
    """The median over the first or last sixteenth, the last quarter, or all of the steps up to one; or the highest value."""
    table = next(table for table in tables if metric in table)
    every = table[metric].where(np.isfinite(table[metric].astype(float)), inf)
    if at == "peak":
        return float(every[table["step"] <= float(last)].max())
    values = every.groupby(table["step"]).mean().loc[: float(last)].to_numpy()  # type: ignore[misc]
    few, many = math.ceil(len(values) / 16), math.ceil(len(values) / 4)
    return float(np.median({"start": values[:few], "end": values[-few:], "late": values[-many:], "throughout": values}[at]))


class Run:
    """What follows from a run's row: its result, and whether it collapsed."""

    def __init__(self, row: Values):
        share, last = int(row["selection"]), row["last"]
        self.row, self.name, self.start = row, row["run"], row["start"]
        self.selection, self.final, shared = last[: share or None], last[share:], last[: len(row["start"])]
        self.best, self.stopped = row["best"] if len(row["best"]) else shared, row["stopped"] is not None
        moves = not self.stopped and row["evaluations"] > 2
        self.rise = shared - row["before"] if moves else np.zeros(len(shared))  # what the last evaluation added, by problem
        fall, count = self.best - shared, len(shared)
        error = math.sqrt((fall.var(ddof=1) or 1 / (count - 1)) / count)
        by_chance = student(fall.mean(), error, count - 1, 0.95 ** (1 / row["evaluations"]))[1] <= 0
        groups, tried = int(row["groups"] or 0), row["train_steps"]
        low = wilson(row["train_best"] * groups, groups, 1 - 0.05 / tried)[1] if groups and tried else 0.0
        fell = (self.final.mean() < self.best.mean() / 2 and not by_chance) or self.final.mean() < low / 2
        self.collapsed = bool(self.stopped or fell)


# --------------------------------------------------------------------------------------------------------- intervals


def wilson(successes: float, n: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval; a sum that is no whole number gets the ends of the whole numbers around it."""
    z, total = stats.norm.ppf((1 + level) / 2), round(successes, 9)
    shares = (math.floor(total) / n, math.ceil(total) / n)
    half = [z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) for p in shares]
    low, high = ((p + z * z / (2 * n) + width) / (1 + z * z / n) for p, width in zip(shares, (-half[0], half[1]), strict=True))
    return successes / n, max(0.0, low), min(1.0, high)


def student(mean: float, error: float, df: float, level: float = 0.95, ends: tuple[float, float] = (-inf, inf)) -> Estimate:
    """Student's interval, kept within ``ends``."""
    half = stats.t.ppf((1 + level) / 2, df) * error
    return mean, max(ends[0], mean - half), min(ends[1], mean + half)


def inside(table: Table) -> float:
    """Variance of one run's mean by the draws of its responses: what is left beside runs and problems, (runs, problems)."""
    runs, problems = table.shape
    left = table - table.mean(axis=0) - table.mean(axis=1)[:, None] + table.mean()
    return float((left**2).sum() / ((runs - 1) * (problems - 1)) / problems) if runs > 1 < problems else 0.0


def spread(table: Table, arms: int) -> tuple[float, float, float]:
    """Mean of a table (runs, problems), its standard error over runs and problems, and Satterthwaite's degrees of freedom."""
    runs, problems = table.shape
    rest, between = inside(table), table.mean(axis=1).var(ddof=1) if runs > 1 else 0.0
    by_runs = (between / runs, runs - 1) if between > rest else (rest / runs, (runs - 1) * (problems - 1) or 1)
    parts = [by_runs if runs > 1 else (arms * 0.045**2, 4)]
    if problems > 1:
        squares = table.mean(axis=0).var() * problems
        squares = 1.0 if arms == 2 and squares < 1e-9 else squares  # as if two equal arms differed in one problem
        parts.append((max(0.0, squares / (problems - 1) / problems - rest / runs), problems - 1))
    variance, weight = sum(part for part, _ in parts), sum(part**2 / df for part, df in parts)
    df = max(1, math.floor(variance**2 / weight + 1e-9)) if weight else max(1, problems - 1)
    return float(table.mean()), math.sqrt(variance), df


def mean(table: Table) -> Estimate:
    """The mean of an arm."""
    value, error, df = spread(table, 1)
    return wilson(value * table.shape[1], table.shape[1]) if error < 1e-9 else student(value, error, df, ends=(0.0, 1.0))


def difference(first: Table, second: Table) -> Estimate:
    """First minus second, paired by seed and problem."""
    runs = min(len(first), len(second))
    return student(*spread(first[:runs] - second[:runs], 2), ends=(-1.0, 1.0))


def chance_above(runs: list[Run], others: list[Run]) -> float:
    """The share of pairs in which the first run ends above the other; a tie is half a pair."""
    first, second = ([run.final.mean() for run in side] for side in (runs, others))
    return float(stats.mannwhitneyu(first, second).statistic) / (len(first) * len(second))


# ---------------------------------------------------------------------------------------------- choices and verdicts


def setting_of(arm: str) -> str:
    """An arm's name without its learning rate."""
    return re.sub(r"-rate_[^-]*$", "", arm)


class Experiment:
    """The runs of an experiment by arm, in the order of params.yaml, and what they choose."""

    def __init__(self, arms: dict[str, list[Run]], pinned: str | None):
        self.arms, tried = arms, defaultdict(list)
        for arm in arms:
            tried[setting_of(arm)].append(arm)
        self.chosen = {setting: self.simplest(rates) for setting, rates in tried.items()}
        self.leader, *others = self.ranked([*self.chosen.values()])
        self.runner_up, self.winner = next(iter(others), None), pinned or self.simplest([*self.chosen.values()])

    def table(self, arm: str, part: str = "final") -> Table:
        """Scores of an arm, (runs, problems)."""
        return np.array([getattr(run, part) for run in self.arms[arm]])

    def ranked(self, arms: list[str]) -> list[str]:
        """The arms that may win, highest on the problems that select first."""
        fallen = {arm: np.mean([run.collapsed for run in self.arms[arm]]) for arm in arms}
        eligible = [arm for arm in arms if not fallen[arm]] or [arm for arm in arms if fallen[arm] < 1] or arms
        return sorted(eligible, key=lambda arm: -self.table(arm, "selection").mean())

    def simplest(self, arms: list[str]) -> str:
        """The first arm within one standard error of the best."""
        best, *others = self.ranked(arms)
        behind = {arm: spread(self.table(best, "selection") - self.table(arm, "selection"), 2) for arm in others}
        return next(arm for arm in arms if arm == best or (arm in behind and behind[arm][0] <= behind[arm][1]))

    def noise(self, arm: str) -> Estimate:
        """Standard deviation of a run's mean over seeds, the part of it by draws of responses, and that over problems."""
        table = self.table(arm)
        runs, problems = table.shape
        draws = inside(table) if runs > 1 else math.nan
        over = max(0.0, table.mean(axis=0).var(ddof=1) / problems - inside(table) / runs) if problems > 1 else math.nan
        return math.sqrt(table.mean(axis=1).var(ddof=1) if runs > 1 else math.nan), math.sqrt(draws), math.sqrt(over)


def verdict_on(claim: Values, comparable: bool, found: Mapping[str, Experiment]) -> tuple[str, Estimate | None, float | None]:
    """The verdict on a claim, the interval that decides, and the distance from the margin that the design finds."""
    own, needs = found[claim["experiment"]], claim["requires"]
    sides: list[tuple[str, str]] = []
    for named in (claim[key] for key in ("arm", "beats", "not_below") if claim.get(key)):
        experiment, arm = named.rpartition("/")[0] or claim["experiment"], named.rpartition("/")[2]
        if experiment not in found:
            return "not tested", None, None
        entry = found[experiment]
        places = {"leader": entry.leader, "first": next(iter(entry.arms)), "last": [*entry.arms][-1]}
        sides.append((experiment, places.get(arm, entry.chosen.get(arm, arm) if arm not in entry.arms else arm)))
        comparable &= sides[-1][1] in entry.arms
    met = not needs["learns"] or mean(own.table(own.leader))[1] > own.table(own.leader, "start").mean()
    for setting in needs["best_rate_inside"]:
        rates = {arm: float(runs[0].row["learning_rate"]) for arm, runs in own.arms.items() if setting_of(arm) == setting}
        met = met and len(rates) > 2 and min(rates.values()) < rates[own.chosen[setting]] < max(rates.values())
    if needs["response_tokens"]:
        met = met and np.mean([run.row["response_length"] for run in own.arms[own.leader]]) >= needs["response_tokens"]
    if not (comparable and met) or len(set(sides)) < 2:
        return "not tested", None, None
    try:
        verdict, interval, seen = decide(claim, sides, found)
    except NotMeasured:
        return "not tested", None, None
    about = [run for name, arm in sides for run in found[name].arms[arm]]
    early = min((run.row["steps"] for run in about if not run.stopped), default=0) < claim["horizon"]
    return ("not tested" if early else verdict), interval, seen


def above(interval: Estimate, bar: float, other: float = inf) -> str:
    """The word for where an interval lies."""
    _, low, high = interval
    return "holds" if low > bar else "open" if high >= bar else "same" if low > other else "does not hold"


def decide(claim: Values, sides: list[tuple[str, str]], found: Mapping[str, Experiment]) -> tuple[str, Estimate, float]:
    """The rules; ``sides``: experiment and name of the arm, then of the other arm."""
    runs, by, at = [found[name].arms[arm] for name, arm in sides], claim["by"], claim.get("at", "end")
    pairs = [*zip(*runs, strict=False)]
    alike = all(a.row["history"] == b.row["history"] and np.array_equal(a.row["last"], b.row["last"]) for a, b in pairs)
    if alike and len(runs[0]) == len(runs[1]):
        raise NotMeasured("identical results")
    if (metric := claim.get("metric", "answer_reward")) != "answer_reward":
        keys = [f"{metric} {at} to {min(a.row['trained'], b.row['trained']):g}" for a, b in pairs]
        if len(keys) < 2 or any(key not in run.row["levels"] for key, pair in zip(keys, pairs, strict=True) for run in pair):
            raise NotMeasured(metric)
        levels = np.array([[run.row["levels"][key] for run in pair] for key, pair in zip(keys, pairs, strict=True)])
        is_reward = metric == "val/old_task_reward"  # compared by a difference
        logs = levels if is_reward else np.log(np.maximum(levels, 1e-8))
        if not np.isfinite(logs).all():
            raise NotMeasured("a level that is not finite")
        value, error, df = spread(logs[:, :1] - logs[:, 1:], 2)
        ends = student(value, error, df)
        if is_reward:
            ends = (ends[0], max(-1.0, ends[1]), min(1.0, ends[2]))
            return above(ends, by, -by), ends, seen_by(error, df)
        ratio = (math.exp(min(ends[0], 700)), math.exp(min(ends[1], 700)), math.exp(min(ends[2], 700)))
        return above(ratio, by, 1 / by), ratio, math.exp(min(seen_by(error, df), 700))
    same_steps = len({run.row["steps"] for side in runs for run in side if not run.stopped}) < 2
    if at != "start" and sides[0][0] == sides[1][0] and not same_steps:
        raise NotMeasured("different numbers of steps")
    first, second = (found[name].table(arm, "start" if at == "start" else "final")[: len(pairs)] for name, arm in sides)
    gap, seen = difference(first, second), seen_by(*spread(first - second, 2)[1:])
    verdict = above(gap, by, -by) if "beats" in claim else above(gap, -by)
    if at != "end" or verdict not in ("holds", "does not hold"):
        return verdict, gap, seen
    _, low, high = difference(*(np.array([run.rise for run in side[: len(pairs)]]) for side in runs))
    return ("not tested" if (high < 0 if verdict == "holds" else low > 0) else verdict), gap, seen


def seen_by(error: float, df: float) -> float:
    """The distance from the margin at which 80% of intervals leave it."""
    bar = stats.t.ppf(0.975, df)
    return float(optimize.brentq(lambda distance: stats.nct.sf(bar, df, distance) - 0.8, 0.0, 10 * bar) * error)


# -------------------------------------------------------------------------------------------------------- comparison


def compare(file: str, place: str, recomputed: Any, written: Any) -> Iterator[Difference]:
    """Compare two values of JSON; numbers up to rounding, a tuple with value, low and high."""
    if isinstance(recomputed, tuple) and isinstance(written, dict):
        for key, number in zip(("value", "low", "high"), recomputed, strict=True):
            yield from compare(file, f"{place}/{key}".strip("/"), number, written[key])
    elif isinstance(recomputed, list) and isinstance(written, list) and len(recomputed) == len(written):
        for number, (one, other) in enumerate(zip(recomputed, written, strict=True)):
            yield from compare(file, f"{place}/{number}", one, other)
    elif not _same(recomputed, written):
        yield Difference(file, place, _shown(written), _shown(recomputed))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | np.ndarray) and isinstance(other, list | np.ndarray):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    numbers = isinstance(one, int | float | np.number) and isinstance(other, int | float | np.number)
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9) if numbers else bool(one == other)


def _shown(value: Any) -> str:
    return f"{np.size(value)} scores" if isinstance(value, np.ndarray) else str(value)


def compare_experiment(file: str, name: str, experiment: Experiment, result: Values) -> Iterator[Difference]:
    """Compare an experiment with its entry in the record."""
    place, best = f"experiments/{name}", experiment.table(experiment.leader, "selection")
    for key in ("leader", "runner_up", "winner"):
        yield from compare(file, f"{place}/{key}", getattr(experiment, key), result[key])
    margin = difference(best, experiment.table(experiment.runner_up, "selection")) if experiment.runner_up else None
    yield from compare(file, f"{place}/margin", margin, result["margin"])
    yield from compare(file, f"{place}/arms", [*experiment.arms], [arm["arm"] for arm in result["arms"]])
    for number, (arm, entry) in enumerate(zip(experiment.arms, result["arms"], strict=False)):
        runs = experiment.arms[arm]
        found = {
            "": mean(experiment.table(arm)),
            "by_run": [float(run.final.mean()) for run in runs],
            "runs": [run.name for run in runs],
            "problems": len(runs[0].final),
            "selection": float(experiment.table(arm, "selection").mean()),
            "start": float(experiment.table(arm, "start").mean()),
            "collapsed": [run.name for run in runs if run.collapsed],
            "chosen": arm in experiment.chosen.values(),
            "below": None
            if arm == experiment.leader
            else difference(experiment.table(experiment.leader), experiment.table(arm)),
            "improvement": None if arm == experiment.leader else chance_above(runs, experiment.arms[experiment.leader]),
        }
        for key, value in found.items():
            yield from compare(file, f"{place}/arms/{number}/{key}".rstrip("/"), value, entry[key] if key else entry)


def compare_samples(file: str, folder: Path, record: Values) -> Iterator[Difference]:
    """Compare zero-shot results, the estimates from several samples, and KL, with what data/ has of them."""
    for prompt, result in record["baseline"].items():
        if (path := folder / f"math_baseline/{prompt}.jsonl").exists():
            answers = lines(path)
            right = wilson(sum(one["answer_reward"] for one in answers), len(answers))
            yield from compare(file, f"baseline/{prompt}/accuracy", right, result["accuracy"])
            kinds = dict(Counter(one["category"] for one in answers))
            written = {key: count for key, count in result["categories"].items() if count}
            yield from compare(file, f"baseline/{prompt}/categories", kinds, written)
    for prompt, result in record["best_of_n"].items():
        path = folder / f"best_of_n/{prompt}.jsonl"
        for n, entry in result["n"].items() if path.exists() else ():
            found: dict[str, list[float]] = {"pass": [], "best": []}
            for one in lines(path):
                samples = sorted(
                    ((sample["mean_log_prob"], sample["answer_reward"] == 1) for sample in one["samples"]), reverse=True
                )
                size, right_ones, drawn = len(samples), sum(is_right for _, is_right in samples), int(n)
                equal = [np.mean([is_right for other, is_right in samples if other == score]) for score, _ in samples]
                found["pass"].append(1 - comb(size - right_ones, drawn) / comb(size, drawn))
                chances = (comb(size - 1 - k, drawn - 1) / comb(size, drawn) for k in range(size))
                found["best"].append(float(sum(chance * share for chance, share in zip(chances, equal, strict=True))))
            for kind, values in found.items():
                estimate = student(float(np.mean(values)), float(stats.sem(values)), len(values) - 1, ends=(0.0, 1.0))
                yield from compare(file, f"best_of_n/{prompt}/n/{n}/{kind}", estimate, entry[kind])
    for path in sorted(folder.glob("kl/*.jsonl")):
        columns = {"per_token": "sampled", "per_token_low_variance": "low_variance", "forward_per_token": "forward"}
        by_step = pd.DataFrame(lines(path)).groupby(["run", "step"])
        sums, means = by_step.sum(numeric_only=True), by_step.mean(numeric_only=True)  # each over the rows that have a value
        tokens = {kind: sums["forward_tokens" if column == "forward" else "tokens"] for kind, column in columns.items()}
        rewards = means[[column for column in ("answer_reward", "old_task_reward") if column in means]]
        rates = pd.DataFrame({kind: sums[columns[kind]] / count for kind, count in tokens.items()}).join(rewards).reset_index()
        kl = (record["experiments"].get(path.stem) or {}).get("kl") or {}
        for (arm, step), rows in rates.groupby([rates["run"].str.split("/").str[1], "step"]):
            for entry in (one for one in kl.get(arm, ()) if one["step"] == step):
                for kind in rates.columns[2:]:
                    place = f"experiments/{path.stem}/kl/{arm}, step {step}: {kind}"
                    yield from compare(file, place, float(rows[kind].mean()), entry[kind]["value"])


def compare_reach(folder: Path, experiments: Mapping[str, Experiment], alone: set[str]) -> Iterator[Difference]:
    """Compare reach.csv with the curves beside it; ``alone``: the runs whose seconds count, in an arm that has any."""
    if not (path := folder / "reach.csv").exists():
        return
    rows: list[list[Any]] = []
    for name, experiment in experiments.items():
        curves = pd.read_csv(folder / f"{name}.csv", dtype={"arm": str})
        means: dict[str, tuple[Any, ...]] = {}
        for arm in (arm for arm in experiment.arms if arm in experiment.chosen.values()):
            own = curves[curves["arm"] == arm]
            steps = sorted(set(own["step"]))
            by_run = {
                f"{name}/{arm}/{run['seed'].iloc[0]}": run.set_index("step").reindex(steps, method="ffill")
                for _, run in own.groupby("seed")
            }
            timed = [run for run in by_run if run in alone] or [*by_run]
            rewards = np.mean([run.iloc[:, 2] for run in by_run.values()], axis=0)
            means[arm] = steps, rewards, np.mean([by_run[run]["core_seconds"] for run in timed], axis=0)
        start, end = min(curve[1][0] for curve in means.values()), max(curve[1][-1] for curve in means.values())
        level = (start + end) / 2
        for arm, (steps, rewards, seconds) in means.items() if end > start else ():
            places = [place for place, reward in enumerate(rewards) if reward >= level]
            after = places[0] if places else 0
            before = max(0, after - 1)
            share = (level - rewards[before]) / (rewards[after] - rewards[before]) if after else 0.0
            at = (
                [float(axis[before] + share * (axis[after] - axis[before])) for axis in (steps, seconds)]
                if places
                else [None, None]
            )
            rows.append([name, arm, level, *at])
    table = pd.read_csv(path, dtype={"experiment": str, "arm": str}).astype(object)
    written = table.where(table.notna(), None).to_numpy().tolist()
    for number, (one, other) in enumerate(zip_longest(rows, written), 2):
        if one is None or other is None or not all(map(_as_rounded, one, other)):
            yield Difference(str(path), f"line {number}", str(other), str(one))


def _as_rounded(one: Any, written: Any) -> bool:
    """Whether a number was written to four decimals; other values are equal."""
    return one == written or (isinstance(one, float) and isinstance(written, float) and abs(one - written) < 5.001e-5)
