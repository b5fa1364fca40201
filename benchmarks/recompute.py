"""Recompute the numbers of reports/record.json from the run folders, without using the package.

``python benchmarks/recompute.py [FOLDER]`` reads params.yaml, data and the claims of a finished study. It computes results,
choices, zero-shot and best-of-N estimates, KL and verdicts, and prints how many agree with the record, and each that differs by
more than rounding; then the exit code is 1. Formulas: docs/statistics.md.
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
COUNTS: dict[str, list[bool]] = defaultdict(list)  # by kind of number: whether each agrees


class NotMeasured(Exception):
    """The study lacks what a claim needs."""


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wilson(successes: float, n: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval; a sum that is no whole number gets the ends of the whole numbers around it."""
    z, total = stats.norm.ppf((1 + level) / 2), round(successes, 9)
    shares = (math.floor(total) / n, math.ceil(total) / n)
    half = [z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) for p in shares]
    low, high = ((p + z * z / (2 * n) + of) / (1 + z * z / n) for p, of in zip(shares, (-half[0], half[1]), strict=True))
    return successes / n, max(0.0, low), min(1.0, high)


def student(mean: float, error: float, df: float, level: float = 0.95, ends: tuple[float, float] = (-inf, inf)) -> Estimate:
    half = stats.t.ppf((1 + level) / 2, df) * error
    return mean, max(ends[0], mean - half), min(ends[1], mean + half)


def spread(table: Table, arms: int) -> tuple[float, float, float]:
    """Mean of a table (runs, problems), its standard error over runs and problems, and Satterthwaite's degrees of freedom."""
    runs, problems = table.shape
    left = table - table.mean(axis=0) - table.mean(axis=1)[:, None] + table.mean()
    inside = (left**2).sum() / ((runs - 1) * (problems - 1)) / problems if runs > 1 else 0.0  # of a run's mean, by sampling
    between = table.mean(axis=1).var(ddof=1) if runs > 1 else 0.0
    by_runs = (between / runs, runs - 1) if between > inside else (inside / runs, (runs - 1) * (problems - 1))
    squares = table.mean(axis=0).var() * problems
    squares = 1.0 if arms == 2 and squares < 1e-9 else squares  # as if two equal arms differed in one problem
    by_problems = (max(0.0, squares / (problems - 1) / problems - inside / runs), problems - 1)
    parts = [by_runs if runs > 1 else (arms * 0.045**2, 4), by_problems]
    variance, weight = sum(part for part, _ in parts), sum(part**2 / df for part, df in parts)
    return float(table.mean()), math.sqrt(variance), max(1, math.floor(variance**2 / weight)) if weight else problems - 1


def mean(table: Table) -> Estimate:
    value, error, df = spread(table, 1)
    return wilson(value * table.shape[1], table.shape[1]) if error < 1e-9 else student(value, error, df, ends=(0.0, 1.0))


def difference(first: Table, second: Table) -> Estimate:
    """First minus second, paired by seed and problem."""
    runs = min(len(first), len(second))
    return student(*spread(first[:runs] - second[:runs], 2), ends=(-1.0, 1.0))


class Run:
    """A run's result files, and whether it collapsed."""

    def __init__(self, folder: Path, name: str):
        self.name, path = name, folder / "data/runs" / name
        config = YAML(typ="safe").load(path / "config.yaml")
        rewards = [np.array(line["answer_reward"], float) for line in lines(path / "outcomes.jsonl")]
        share = config["evaluation"]["selection_problems"] * len(rewards[-1]) // config["evaluation"]["last_problems"]
        self.selection, self.final, self.last = rewards[-1][: share or None], rewards[-1][share:], rewards[-1]
        self.outcomes: Table = np.array([of[: len(rewards[0])] for of in rewards])
        self.start, self.means = self.outcomes[0], self.outcomes.mean(axis=1)
        self.values = {key: of["value"] for key, of in config["config"].items()}
        self.tables = [pd.read_csv(path / "history.csv"), pd.read_csv(path / "validation.csv")]
        self.stopped = json.loads((path / "metrics.json").read_text())["diverged_step"] is not None
        self.steps = int(self.tables[1]["step"].iloc[-1])
        self.collapsed = self.stopped or self.fell()

    def fell(self) -> bool:
        """Whether it ends below half of its best evaluation or training reward, by more than chance."""
        fall, count = self.outcomes[self.means.argmax()] - self.outcomes[-1], self.outcomes.shape[1]
        error = math.sqrt((fall.var(ddof=1) or 1 / (count - 1)) / count)
        by_chance = student(fall.mean(), error, count - 1, 0.95 ** (1 / len(self.means)))[1] <= 0
        if "train/answer_reward" not in self.tables[0] or "rollout_batch_size" not in self.values:
            low = 0.0
        else:
            reward = self.tables[0].drop_duplicates("step")["train/answer_reward"].dropna()
            groups = self.values["rollout_batch_size"] // self.values["group_size"]
            low = wilson(reward.max() * groups, groups, 1 - 0.05 / len(reward))[1] if len(reward) else 0.0
        return bool((self.final.mean() < self.means.max() / 2 and not by_chance) or self.final.mean() < low / 2)

    def rise(self) -> Table:
        """What its last evaluation added to the one before, by problem; nothing if it was stopped or evaluated once."""
        return np.zeros(len(self.start)) if self.stopped or len(self.means) < 3 else self.outcomes[-1] - self.outcomes[-2]

    def level(self, metric: str, at: str, last: float) -> float:
        """Logarithm of the median over the first or last sixteenth, the last quarter, or all of the steps up to one."""
        table = next((table for table in self.tables if metric in table), None)
        if table is None:
            raise NotMeasured(metric)
        every = table[metric].where(np.isfinite(table[metric].astype(float)), inf)
        by_step = every.groupby(table["step"]).mean()
        values = by_step.loc[:last].to_numpy()  # type: ignore[misc]
        if len(values) < 2:
            raise NotMeasured(metric)
        if at == "peak":
            return math.log(max(every[table["step"] <= last].max(), 1e-8))
        few, many = math.ceil(len(values) / 16), math.ceil(len(values) / 4)
        part = {"start": values[:few], "end": values[-few:], "late": values[-many:], "throughout": values}[at]
        return math.log(max(np.median(part), 1e-8))


def setting_of(arm: str) -> str:
    return re.sub(r"-rate_[^-]*$", "", arm)


class Experiment:
    """The runs of an experiment by arm, in the order of params.yaml, and what they choose."""

    def __init__(self, arms: dict[str, list[Run]], pinned: str | None):
        self.arms, tried = arms, defaultdict(list)
        for arm in arms:
            tried[setting_of(arm)].append(arm)
        self.chosen = {setting: self.simplest(of) for setting, of in tried.items()}
        self.leader, *others = self.ranked([*self.chosen.values()])
        self.runner_up, self.winner = (others or [None])[0], pinned or self.simplest([*self.chosen.values()])

    def table(self, arm: str, of: str = "final") -> Table:
        return np.array([getattr(run, of) for run in self.arms[arm]])

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


def verdict_on(claim: dict[str, Any], comparable: bool, found: dict[str, Experiment]) -> tuple[str, Estimate | None]:
    """The verdict on a claim, and the interval that decides."""
    own, needs, sides = found[claim["experiment"]], claim.get("requires", {}), []
    for key in ("arm", "beats", "not_below"):
        if claim.get(key):
            experiment, arm = claim[key].rpartition("/")[0] or claim["experiment"], claim[key].rpartition("/")[2]
            of = found.get(experiment)
            place = of and {"leader": of.leader, "first": next(iter(of.arms)), "last": [*of.arms][-1]}.get(
                arm, of.chosen.get(arm, arm)
            )
            comparable &= of is not None and place in of.arms
            sides.append((experiment, place))
    lengths = [run.tables[1]["val/response_length"].iloc[0] for run in own.arms[own.leader]]
    met = not needs.get("learns") or mean(own.table(own.leader))[1] > own.table(own.leader, "start").mean()
    for setting in needs.get("best_rate_inside", []):
        rates = {arm: float(runs[0].values["learning_rate"]) for arm, runs in own.arms.items() if setting_of(arm) == setting}
        met = met and len(rates) > 2 and min(rates.values()) < rates[own.chosen[setting]] < max(rates.values())
    if not (comparable and met and np.mean(lengths) >= needs.get("response_tokens", 0)):
        return "not tested", None
    if len(set(sides)) < 2:
        return "not tested", None
    try:
        verdict, interval = decide(claim, sides, found)
    except NotMeasured:
        return "not tested", None
    about = [run for name, arm in sides for run in found[name].arms[arm]]
    early = min((run.steps for run in about if not run.stopped), default=0) < claim.get("horizon", 0)
    return ("not tested" if early else verdict), interval


def above(interval: Estimate, bar: float, other: float = inf) -> str:
    _, low, high = interval
    return "holds" if low > bar else "open" if high >= bar else "same" if low > other else "does not hold"


def decide(claim: dict[str, Any], sides: list[tuple[str, str]], found: dict[str, Experiment]) -> tuple[str, Estimate]:
    """The rules; ``sides``: experiment and name of the arm, then of the other arm."""
    runs, by, at = [found[name].arms[arm] for name, arm in sides], claim["by"], claim.get("at", "end")
    pairs = [*zip(*runs, strict=False)]
    if all(a.tables[0].equals(b.tables[0]) and np.array_equal(a.last, b.last) for a, b in pairs):
        raise NotMeasured("identical results")
    if (metric := claim.get("metric", "answer_reward")) != "answer_reward":
        last = [min(float(run.tables[0]["step"].max()) for run in pair) for pair in pairs]
        logs = [a.level(metric, at, end) - b.level(metric, at, end) for (a, b), end in zip(pairs, last, strict=True)]
        return above(ratio := over_runs(logs), by, 1 / by), ratio
    if at == "end" and sides[0][0] == sides[1][0] and len({run.steps for of in runs for run in of if not run.stopped}) > 1:
        raise NotMeasured("different numbers of steps")
    gap = difference(*(found[name].table(arm, "start" if at == "start" else "final") for name, arm in sides))
    verdict = above(gap, by, -by) if "beats" in claim else above(gap, -by)
    if at != "end" or verdict not in ("holds", "does not hold"):
        return verdict, gap
    rises = [np.array([run.rise() for run in of[: len(pairs)]]) for of in runs]
    _, low, high = difference(*rises)
    return ("not tested" if (high < 0 if verdict == "holds" else low > 0) else verdict), gap


def over_runs(logs: list[float]) -> Estimate:
    """The ratio whose logarithm is the mean over runs, with Student's interval."""
    if len(logs) < 2 or not np.isfinite(logs).all():
        raise NotMeasured("one run, or a metric that is not finite")
    value, low, high = (math.exp(min(of, 700)) for of in student(float(np.mean(logs)), stats.sem(logs), len(logs) - 1))
    return value, low, high


def check(kind: str, where: str, computed: Any, recorded: Any) -> None:
    """Compare a name, a number, or an estimate with its value, low and high."""
    if isinstance(recorded, dict) and "value" in recorded:
        recorded = [recorded[key] for key in ("value", "low", "high")]
    computed = tuple(float(of) for of in computed) if isinstance(computed, tuple) else computed
    numeric = isinstance(computed, tuple | float) and recorded is not None
    COUNTS[kind].append(bool(np.allclose(computed, recorded, rtol=1e-6, atol=1e-9)) if numeric else computed == recorded)
    if not COUNTS[kind][-1]:
        print(f"DIFFERS {kind}, {where}: computed {computed}, recorded {recorded}")


def check_experiment(name: str, of: Experiment, result: dict[str, Any]) -> None:
    best = of.table(of.leader, "selection")
    check(
        "leader, runner-up, winner",
        name,
        [of.leader, of.runner_up, of.winner],
        [result[key] for key in ("leader", "runner_up", "winner")],
    )
    check("margin", name, difference(best, of.table(of.runner_up, "selection")) if of.runner_up else None, result["margin"])
    check("arms", name, [*of.arms], [arm["arm"] for arm in result["arms"]])
    for entry in result["arms"]:
        arm, where = entry["arm"], f"{name}/{entry['arm']}"
        check("value of an arm", where, mean(of.table(arm)), entry)
        check("mean that selects, start", where, float(of.table(arm, "selection").mean()), entry["selection"])
        check("mean that selects, start", where, float(of.table(arm, "start").mean()), entry["start"])
        fallen = [run.name for run in of.arms[arm] if run.collapsed]
        check("collapsed runs", where, fallen, entry["collapsed"])
        check("chosen rate", where, arm in of.chosen.values(), entry["chosen"])
        below = None if arm == of.leader else difference(of.table(of.leader), of.table(arm))
        check("below the leader", where, below, entry["below"])


def check_samples(folder: Path, record: dict[str, Any]) -> None:
    """Zero-shot accuracy and categories, and the estimates from several samples."""
    for prompt, of in record["baseline"].items():
        answers = lines(folder / f"data/math_baseline/{prompt}.jsonl")
        check("zero-shot accuracy", prompt, wilson(sum(one["answer_reward"] for one in answers), len(answers)), of["accuracy"])
        kinds = Counter(f"format {one['format_reward']:g}, answer {one['answer_reward']:g}" for one in answers)
        check("zero-shot categories", prompt, dict(kinds), {key: count for key, count in of["categories"].items() if count})
    for prompt, n, entry in (
        (prompt, int(n), entry) for prompt, of in record["best_of_n"].items() for n, entry in of["n"].items()
    ):
        found: dict[str, list[float]] = {"pass": [], "best": []}
        for one in lines(folder / f"data/best_of_n/{prompt}.jsonl"):
            samples = sorted(((of["mean_log_prob"], of["answer_reward"] == 1) for of in one["samples"]), reverse=True)
            size, right = len(samples), [of for _, of in samples]
            equal = [np.mean([of for other, of in samples if other == score]) for score, _ in samples]
            found["pass"].append(1 - comb(size - sum(right), n) / comb(size, n))
            found["best"].append(sum(comb(size - 1 - k, n - 1) / comb(size, n) * of for k, of in enumerate(equal)))
        for kind, of in found.items():
            estimate = student(float(np.mean(of)), float(stats.sem(of)), len(of) - 1, ends=(0.0, 1.0))
            check(f"{kind}@N", f"{prompt}, {n}", estimate, entry[kind])


def check_kl(folder: Path, record: dict[str, Any]) -> None:
    """KL per token of each file of responses."""
    for path in sorted(folder.glob("data/kl/*.jsonl")):
        sums = pd.DataFrame(lines(path)).groupby(["run", "step"])[["sampled", "low_variance", "tokens"]].sum()
        rates = sums[["sampled", "low_variance"]].div(sums["tokens"], axis=0).reset_index()
        rates.columns = pd.Index(["run", "step", "per_token", "per_token_low_variance"])
        for (arm, step), of in rates.groupby([rates["run"].str.split("/").str[1], "step"]):
            entry = next(one for one in record["experiments"][path.stem]["kl"][arm] if one["step"] == step)
            for kind in ("per_token", "per_token_low_variance"):
                check("KL", f"{arm}, step {step}", float(of[kind].mean()), entry[kind]["value"])


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    params, record = YAML(typ="safe").load(folder / "params.yaml"), json.loads((folder / "reports/record.json").read_text())
    entries = {name: {"task": "main", "method": "grpo"} | of for name, of in params["experiments"].items() if of["arms"]}
    pinned, found = params["selection"].get("pinned", {}), {}
    for name, entry in entries.items():
        names = {arm: [f"{name}/{arm}/{seed}" for seed in params["seeds"][: entry.get("seeds")]] for arm in entry["arms"]}
        found[name] = Experiment({arm: [Run(folder, run) for run in of] for arm, of in names.items()}, pinned.get(name))
        check_experiment(name, found[name], record["experiments"][name])
    check_kl(folder, record)
    check_samples(folder, record)

    def order(name: str) -> tuple[Any, ...]:
        of, entry = found[name], entries[name]
        won = of.arms[of.winner]
        kind = (entry["task"] == "main", entry["method"] == "grpo", not won[0].values.get("start_from"))
        return *kind, not any(run.collapsed for run in won), of.table(of.winner, "selection").mean()

    best, headline = max(found, key=order), record["headline"]
    check("headline", "arm", [best, found[best].winner], [headline["experiment"], headline["arm"]])
    check("headline", "value", mean(found[best].table(found[best].winner)), headline)
    published = YAML(typ="safe").load(Path(__file__).parents[1] / "grpo/results/claims.yaml")["claims"]
    claims = [one for one in published if one["experiment"] in found] + params.get("claims", [])
    for claim, entry in zip(claims, [one for one in record["claims"] if one["kind"]], strict=True):  # kind: it is not untested
        task = params["tasks"][entries[entry["experiment"]]["task"]]["use"]
        comparable = entry["own"] or task in ("math", "arithmetic")  # the tasks that published claims are about
        verdict, interval = verdict_on({"experiment": entry["experiment"]} | claim, comparable, found)
        check("verdict", entry["id"], verdict, entry["verdict"])
        check("interval of a claim", entry["id"], interval, entry["interval"])
    for kind, same in COUNTS.items():
        print(f"{kind}: {sum(same)} of {len(same)} agree")
    return int(not all(all(same) for same in COUNTS.values()))


if __name__ == "__main__":
    sys.exit(main())
