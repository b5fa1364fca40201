"""Recompute the report's numbers from the run folders, without using the package.

``python benchmarks/recompute.py [FOLDER]`` reads ``data/runs`` of a finished study, computes the numbers of the report's first
screen and of the tables and lead sentences of its sections, and compares them with ``reports/``. It prints each sentence or
table row that it checked; the exit code is 1 if one differs by more than rounding. Formulas: docs/statistics.md.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from scipy import stats

Table = np.ndarray[Any, np.dtype[np.float64]]
Estimate = tuple[float, float, float]  # a value and its interval
NUMBER = re.compile(r"(?<![\w.-])-?\d+\.\d{3}(?!\d)")
PLAIN = re.compile(r"\[[^]]*\]\([^)]*\)|[*`]")
LAST = {"expert_iteration_experiment": 1}  # number of last evaluations that are averaged; 3 for all others


class Run:
    """The results of a run, read from its folder."""

    def __init__(self, folder: Path):
        self.experiment, self.arm, seed = folder.parts[-3:]
        self.name, self.seed = f"{self.experiment}/{self.arm}/{seed}", int(seed)
        lines = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
        self.answers: Table = np.array([line["answer_reward"] for line in lines])
        self.validation, self.history = pd.read_csv(folder / "validation.csv"), pd.read_csv(folder / "history.csv")
        self.stopped = json.loads((folder / "metrics.json").read_text())["diverged_step"] is not None
        config = YAML(typ="safe").load(folder / "config.yaml")
        self.same_as, self.values = config["same_as"], config["config"]
        self.last = min(LAST.get(self.experiment, 3), len(lines) - 1)
        self.end: Table = self.answers[-self.last :].mean(axis=0)

    def column(self, name: str) -> float:
        """Mean of a column over the last evaluations."""
        return float(self.validation[name].iloc[-self.last :].mean())

    def collapsed(self) -> bool:
        """Whether the run was stopped, or ends below half of its best evaluation or training step by more than chance."""
        means = self.answers.mean(axis=1)
        best = self.answers[means.argmax()]
        if self.stopped:
            return True
        if self.end.mean() < best.mean() / 2:
            rise, count = best - self.end, len(means)
            half = stats.t.ppf((1 + 0.95 ** (1 / count)) / 2, len(rise) - 1) * rise.std(ddof=1) / math.sqrt(len(rise))
            if rise.mean() > half:
                return True
        if "train/answer_reward" not in self.history or "rollout_batch_size" not in self.values:
            return False
        rewards = self.history.drop_duplicates("step")["train/answer_reward"].dropna()
        groups = self.values["rollout_batch_size"]["value"] // self.values["group_size"]["value"]
        return bool(self.end.mean() < wilson(rewards.max() * groups, groups, 1 - 0.05 / len(rewards))[1] / 2)


def wilson(successes: float, trials: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval."""
    z, p = stats.norm.ppf((1 + level) / 2), successes / trials
    centre, half = p + z * z / (2 * trials), z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    return p, (centre - half) / (1 + z * z / trials), (centre + half) / (1 + z * z / trials)


def interval(tables: list[Table], signs: list[int], level: float = 0.95) -> Estimate:
    """Estimate a signed sum of arms' means over runs and problems, with Welch's degrees of freedom and paired problems."""
    terms: list[tuple[float, float]] = []
    by_problem, noise = np.zeros(tables[0].shape[1]), 0.0
    for table, sign in zip(tables, signs, strict=True):
        runs, problems = table.shape
        by_problem += sign * table.mean(axis=0)
        if runs == 1:
            terms.append((0.045**2, 4))
            continue
        centred = table - table.mean(axis=0) - table.mean(axis=1)[:, None] + table.mean()
        within = (centred**2).sum() / ((runs - 1) * (problems - 1)) / problems
        between = table.mean(axis=1).var(ddof=1)
        terms.append((between / runs, runs - 1) if between > within else (within / runs, (runs - 1) * (problems - 1)))
        noise += within / runs
    count = len(by_problem)
    terms.append((max(0.0, by_problem.var(ddof=1) / count - noise), count - 1))
    variance = sum(part for part, _ in terms)
    if variance == 0:
        return by_problem.mean(), by_problem.mean(), by_problem.mean()
    df = max(1, math.floor(variance**2 / sum(part**2 / free for part, free in terms)))
    half = stats.t.ppf((1 + level) / 2, df) * math.sqrt(variance)
    return by_problem.mean(), by_problem.mean() - half, by_problem.mean() + half


class Arm:
    """An arm's runs, and its numbers over those that held."""

    def __init__(self, runs: list[Run]):
        self.name, self.runs = runs[0].arm, runs
        self.fallen = [run.name for run in runs if run.collapsed()]
        self.held = [run for run in runs if run.name not in self.fallen] or runs
        self.table: Table = np.array([run.end for run in self.held])
        self.reward = clipped(interval([self.table], [1]))
        if self.table.std(axis=0).sum() == 0 and self.table.mean() in (0, 1):
            self.reward = wilson(self.table.mean() * self.table.shape[1], self.table.shape[1])

    def mean(self, name: str) -> float:
        return float(np.mean([run.column(name) for run in self.held]))

    def first(self, name: str) -> float:
        return float(np.mean([run.validation[name].iloc[0] for run in self.held]))

    def over(self, other: Arm, level: float = 0.95) -> Estimate:
        return interval([self.table, other.table], [1, -1], level)


def clipped(found: Estimate) -> Estimate:
    return found[0], max(0.0, found[1]), min(1.0, found[2])


class Report:
    """Compares computed numbers with those in a text, and keeps count."""

    def __init__(self) -> None:
        self.checked, self.wrong = 0, 0

    def compare(self, where: str, text: str, *computed: float) -> None:
        """Check that the numbers with three digits in the text are these, in this order and complete."""
        found = [float(number) for number in NUMBER.findall(text)]
        same = len(found) == len(computed) and all(abs(a - b) < 0.00051 for a, b in zip(found, computed, strict=True))
        self.say(where, text, same, f"computed {', '.join(f'{value:.4f}' for value in computed)}")

    def say(self, where: str, text: str, same: bool, computed: str) -> None:
        self.checked, self.wrong = self.checked + 1, self.wrong + (not same)
        print(f"{'same ' if same else 'WRONG'} {where}: {text[:150]}" + ("" if same else f"\n      {computed}"))


def read_arms(folder: Path) -> dict[str, dict[str, Arm]]:
    """Read the arms of each experiment from all run folders."""
    runs = [Run(path.parent) for path in sorted(folder.glob("data/runs/*/*/*/metrics.json"))]
    by_arm: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        by_arm.setdefault(run.experiment, {}).setdefault(run.arm, []).append(run)
    return {experiment: {arm: Arm(found) for arm, found in arms.items()} for experiment, arms in by_arm.items()}


def leader_of(arms: dict[str, Arm]) -> Arm:
    """The highest arm among those without a collapsed run; if there are none, among those with a run that held."""
    whole = [arm for arm in arms.values() if not arm.fallen]
    some = [arm for arm in arms.values() if len(arm.fallen) < len(arm.runs)]
    return max(whole or some or list(arms.values()), key=lambda arm: arm.reward[0])


def tied_with(leader: Arm, arms: dict[str, Arm]) -> list[str]:
    """Arms whose difference to the leader contains zero, at the level for the number of differences."""
    level = level_of(arms)
    others = (arm for arm in arms.values() if arm is not leader and (bool(arm.fallen) == bool(leader.fallen) or not arm.fallen))
    return [arm.name for arm in others if (found := leader.over(arm, level))[1] <= 0 <= found[2]]


def level_of(arms: dict[str, Arm]) -> float:
    """The level at which each tail has 1 - 0.95^(1 / differences) (Hsu, Sidak), at most 0.025."""
    return max(0.95, 2 * float(0.95 ** (1 / max(1, len(arms) - 1))) - 1)


def check_section(report: Report, text: str, experiment: str, arms: dict[str, Arm]) -> None:
    """Check an experiment's lead sentence and first table."""
    leader = leader_of(arms)
    lead = next(line for line in text.splitlines() if line and not line.startswith("#"))
    if len(arms) > 1 and "ends highest" in lead:
        named = re.search(r"(\S+) ends highest", lead)
        told = re.search(r"cannot tell it from ([^:;]+): the difference", lead) or re.search(r"\) above (\S+), the next", lead)
        gaps = [leader.over(arms[arm], level_of(arms)) for arm in re.split(r", | and ", told[1])] if told else []
        report.compare(experiment, lead, *leader.reward, *(min(gaps) if gaps else ()))
        report.say(experiment, lead, bool(named) and named[1] == leader.name, leader.name)
    header: list[str] = []
    for line in text.splitlines():
        cells = [PLAIN.sub("", cell).strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| arm | at start"):
            header = [cell.split(",")[0].split(" (")[0] for cell in cells]
        elif header and not line.startswith("|"):
            break
        elif header and cells[0] in arms:
            check_row(report, experiment, dict(zip(header, cells, strict=True)), arms[cells[0]], leader, level_of(arms))


def check_row(report: Report, experiment: str, row: dict[str, str], arm: Arm, leader: Arm, level: float) -> None:
    where = f"{experiment}/{arm.name}"
    form, answer = arm.mean("val/format_reward"), arm.mean("val/answer_reward")
    report.compare(f"{where} at start", row["at start"], arm.first("val/answer_reward"))
    report.compare(f"{where} answer reward", row["answer reward"], *arm.reward)
    report.compare(f"{where} form right", row["form right"], form)
    if NUMBER.search(row["answer right"]):
        report.compare(f"{where} answer given form", row["answer right"], answer / form)
    length = float(row["response length"])
    report.say(f"{where} length", row["response length"], abs(length - arm.mean("val/response_length")) < 0.051, "")
    behind = row.get(f"below {leader.name}", "")
    if arm is not leader and NUMBER.search(behind):
        report.compare(f"{where} below {leader.name}", behind, *leader.over(arm, level))
    if fallen := row.get("runs that collapsed"):
        report.say(f"{where} collapsed", fallen, fallen.startswith(f"{len(arm.fallen)} of {len(arm.runs)}"), str(arm.fallen))


def check_first_screen(report: Report, folder: Path, experiments: dict[str, dict[str, Arm]]) -> None:
    """Check the numbered sentences of reports/writeup.md."""
    text = (folder / "reports/writeup.md").read_text()
    lines = {int(found[1]): found[2] for found in re.finditer(r"^(\d)\. (.*)$", text, re.M)}
    winners = {path.stem: json.loads(path.read_text())["winner"] for path in (folder / "reports/select").glob("*.json")}
    named = re.search(r"\*\*Best\*\*: (\S+) of ([\w]+)", text)
    assert named, "the write-up names no best arm"
    best = experiments[named[2]][named[1]]
    before = np.array([run.answers[0] for run in best.held])
    change = interval([best.table - before], [1])
    report.compare("first screen", lines[1], best.first("val/answer_reward"), *best.reward, *change)
    grpo = [name for name in winners if name.startswith(("grpo_", "leaderboard")) and "keyword" not in name]
    won = [experiments[name][winners[name]] for name in grpo]
    highest = max(arm.reward[0] for arm in won if arm.runs[0].values["start_from"]["value"] is None)  # of the base model
    report.say(
        "first screen",
        "it is the highest of the winners from the base model",
        abs(highest - best.reward[0]) < 1e-9,
        f"{highest:.4f}",
    )
    form, answer = (f"val/{kind}_reward" for kind in ("format", "answer"))
    bare = zero_shot(folder, "question_only")
    report.compare(
        "first screen",
        lines[2],
        *(best.first(form), best.mean(form)),
        *(best.first(answer) / best.first(form), best.mean(answer) / best.mean(form)),
        *bare,
    )
    others = [leader_of(experiments[name]) for name in ("sft_experiment", "expert_iteration_experiment")]
    report.compare("first screen", lines[3], *(number for arm in others for number in arm.reward))
    report.say("first screen", lines[3], all(f"({arm.name})" in lines[3] for arm in others), str([arm.name for arm in others]))
    every = [run for arms in experiments.values() for arm in arms.values() for run in arm.runs]
    own = {run.name for run in every if run.same_as is None}
    fallen = [name for arms in experiments.values() for arm in arms.values() for name in arm.fallen if name in own]
    line = next(line for line in lines.values() if "collapsed" in line)
    by_arm = Counter(name.rpartition("/")[0] for name in fallen)
    said = {arm: int(number) for arm, number in re.findall(r"([\w.-]+/[\w.-]+) \((\d+) of", line)}
    report.say("first screen", line, said == by_arm, str(by_arm))
    report.say("first screen", line, f"Of {len(own)} runs {len(fallen)} collapsed" in line, f"{len(fallen)} of {len(own)}")
    undecided = next(line for line in lines.values() if "cannot be told from another" in line)
    compared = {name: arms for name, arms in experiments.items() if len(arms) > 1 and name in winners}
    ties = [name for name, arms in compared.items() if tied_with(leader_of(arms), arms)]
    report.say("first screen", undecided, f"In {len(ties)} of {len(compared)} comparisons" in undecided, f"{len(ties)}: {ties}")


def zero_shot(folder: Path, prompt: str) -> Estimate:
    """Check the untrained model's accuracy under question_only."""
    lines = (folder / f"data/math_baseline/{prompt}.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["answer_reward"] for line in lines]
    return wilson(sum(rewards), len(rewards))


def check_claims(report: Report, folder: Path, experiments: dict[str, dict[str, Arm]]) -> None:
    """Check each `A above B by D (LOW to HIGH)` in the claims' table, and the counts of verdicts."""
    text = (folder / "reports/sections/claims.md").read_text()
    verdicts: dict[str, int] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 5 or (cells[1] not in experiments and cells[1] != "math_baseline"):
            continue
        word = re.sub(r"\*", "", cells[4]).split("<br>")[0]
        verdicts[word] = verdicts.get(word, 0) + 1
        arms = experiments.get(cells[1], {})
        for high, low, numbers in re.findall(r"([\w.-]+) above ([\w.-]+) by ([^;]+?\))", cells[3]):
            if high in arms and low in arms:
                report.compare(f"claim, {cells[1]}", f"{high} above {low} by {numbers}", *arms[high].over(arms[low]))
    counted = json.loads((folder / "reports/summary.json").read_text())["claims"]
    verdicts["not tested here"] = verdicts.get("not tested here", 0) + verdicts.pop("by construction", 0)
    report.say("claims", str(verdicts), {**verdicts} == {word: count for word, count in counted.items() if count}, str(counted))


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    experiments, report = read_arms(folder), Report()
    check_first_screen(report, folder, experiments)
    for experiment, arms in experiments.items():
        section = folder / f"reports/sections/{experiment}.md"
        if section.exists():
            check_section(report, section.read_text(), experiment, arms)
    check_claims(report, folder, experiments)
    print(f"{report.checked} statements checked, {report.wrong} wrong")
    return int(report.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
