"""The page's data as one plain record; every number comes from a result file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo.reporting import answer
from grpo.reporting.answer import Found
from grpo.reporting.curves import number
from grpo.reporting.discussion import Numbers
from grpo.reporting.provenance import provenance_of
from grpo.reporting.rollouts import browsable, gained_and_lost
from grpo.reporting.sections import paragraphs_of, verdicts_of
from grpo.results.experiments import read_result
from grpo.results.findings import ExperimentResult
from grpo.results.runs import Run, read_runs
from grpo.study import paths
from grpo.study.schema import Study

Record = dict[str, Any]
FILES = ("config.yaml", "metrics.json", "history.csv", "validation.csv", "outcomes.jsonl", "rollouts.jsonl")  # of each run


def read_all(study: Study) -> Found:
    """Read each experiment's runs and result."""
    return {name: (read_runs(study, name), read_result(study, name)) for name in study.made}


def collect(study: Study, found: Found, numbers: Mapping[str, Numbers], lock: Record) -> Record:
    """Collect the page's data.

    Args:
        numbers: experiment -> :func:`grpo.reporting.discussion.numbers_of`.
        lock: the stages of dvc.lock; empty if DVC did not make the results.
    """
    verdicts = verdicts_of(study)
    runs = {run.name: _run(run, lock) for own, _ in found.values() for run in own}
    alike = _deduplicate(runs)
    winners_first = sorted(runs, key=lambda name: runs[name]["arm"] != found[runs[name]["experiment"]][1].winner)
    return {
        "study": study.study,
        "description": study.description,
        "answer": answer.sentences(study, found, numbers, verdicts),
        "best": _best(answer.best(study, numbers)),
        "certainty": answer.certainty(numbers, verdicts),
        "cost": answer.cost(study, found),
        "experiments": [_experiment(study, numbers[name], *of) for name, of in found.items()],
        "runs": runs,
        "alike": alike,
        "files": [(paths.RUNS / "RUN" / name).as_posix() for name in FILES],
        "samples": browsable(winners_first),
    }


def _best(top: Record) -> Record:
    """The best configuration."""
    arm = top["arm"]
    return {key: top[key] for key in ("experiment", "changes")} | {
        "arm": arm["arm"],
        "runs": list(arm["runs"]),
        **{key: getattr(arm["final"], key) for key in ("value", "low", "high")},
    }


def _deduplicate(runs: dict[str, Record]) -> list[Any]:
    """Replace values that runs have in common by their index in the list that is returned."""
    places: dict[str, int] = {}

    def place(value: Any) -> int:
        return places.setdefault(json.dumps(value), len(places))

    for run in runs.values():
        run["config"] = [place(row) for row in run["config"]]
        run |= {key: place(run[key]) for key in ("software", "hardware")}
    return [json.loads(value) for value in places]


def _run(run: Run, lock: Record) -> Record:
    """The data of a run's page: its provenance, its configuration with sources, and its final numbers."""
    origin = {key: value for key, value in provenance_of(run, lock).items() if key != "run"}
    origin |= {"seconds": number(origin["seconds"]), "phases": {name: number(s) for name, s in origin["phases"].items()}}
    return {
        "experiment": run.experiment,
        "arm": run.arm,
        "seed": run.seed,
        "same_as": run.config["same_as"] or "",
        **origin,
        "config": [[key, each["value"], each["from"]] for key, each in run.config["config"].items()],
        "metrics": {key: number(v) if isinstance(v, int | float) else v for key, v in run.metrics.items()},
    }


def _experiment(study: Study, numbers: Numbers, runs: list[Run], result: ExperimentResult) -> Record:
    name = result.experiment
    entry = study.experiments[name]
    return {
        "name": name,
        "title": study.title(name),
        "note": entry.note,
        "builds_on": [] if entry.builds_on is None else [entry.builds_on, study.title(entry.builds_on)],
        **{key: getattr(result, key) for key in ("winner", "leader", "last_k")},
        "tied": list(result.tied),
        "base": _base(study, name, runs),
        "arms": [_arm(arm) for arm in numbers["arms"]],
        "lead": paragraphs_of(study, numbers, runs)[0],
        "problems": gained_and_lost(runs),
    }


def _arm(arm: Numbers) -> Record:
    same_as = [run.config["same_as"] for run in arm["all"] if run.config["same_as"]]
    return {key: arm[key] for key in ("arm", "overrides", "runs")} | {"same_as": same_as}


def _base(study: Study, name: str, runs: list[Run]) -> Record:
    """The values from which an experiment starts.

    Returns:
        ``won``: key, value and source of values taken from winners; ``changed``: the previous value of each key that an arm
        sets.
    """
    configs = [run.config["config"] for run in runs]
    won = {
        (key, str(each["value"]), each["from"]): each["value"]
        for config in configs
        for key, each in config.items()
        if each["from"].startswith("winner of ")
    }
    defaults = study.defaults(study.experiments[name].method).model_dump(mode="json")
    overridden = {key for run in runs for key in run.config["overrides"]}
    changed = {key: defaults.get(key) for key in defaults if key in overridden}
    changed |= {key: value for (key, _, _), value in won.items() if key in overridden}
    return {"won": [[key, value, source] for (key, _, source), value in won.items()], "changed": changed}
