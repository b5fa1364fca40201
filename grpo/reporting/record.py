"""All that the page shows, as one plain record that JSON can hold: every number from a result file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo.reporting import answer
from grpo.reporting.answer import Found
from grpo.reporting.curves import number
from grpo.reporting.discussion import Numbers, as_plain
from grpo.reporting.provenance import provenance_of
from grpo.reporting.rollouts import browsable, gained_and_lost
from grpo.reporting.sections import said_of, verdicts_of
from grpo.results.experiments import read_result
from grpo.results.findings import ExperimentResult, Verdict
from grpo.results.runs import Run, experiments, read_runs
from grpo.study.schema import Study

Record = dict[str, Any]


def read_all(study: Study) -> Found:
    """Each experiment's runs and result."""
    return {name: (read_runs(study, name), read_result(study, name)) for name in experiments(study)}


def collect(study: Study, found: Found, numbers: Mapping[str, Numbers], lock: Record) -> Record:
    """The page's data.

    Args:
        numbers: of each experiment.
        lock: what dvc.lock has of each stage; empty where DVC did not make the results.
    """
    verdicts = verdicts_of(study)
    shown = [_claim(verdict) for verdict in verdicts]
    runs = {run.name: _run(run, lock) for own, _ in found.values() for run in own}
    alike = _once(runs)
    winners_first = sorted(runs, key=lambda name: runs[name]["arm"] != found[runs[name]["experiment"]][1].winner)
    return {
        "study": study.study,
        "description": study.description,
        "seeds": study.seeds,
        "answer": answer.sentences(study, found, numbers, verdicts),
        "best": _best(answer.best(study, numbers)),
        "certainty": answer.certainty(numbers, verdicts),
        "cost": answer.cost(study, found),
        "claims": shown,
        "experiments": [_experiment(study, numbers[name], *of) for name, of in found.items()],
        "runs": runs,
        "alike": alike,
        "files": answer.files_of_runs(),
        "samples": browsable(winners_first),
    }


def _claim(verdict: Verdict) -> Record:
    """A claim as the page and its forest show it."""
    plain: Record = as_plain(verdict)
    return plain | {"published": verdict.published or {}, "reported": verdict.reported or {}}


def _best(top: Record) -> Record:
    """The best configuration, and what it came from."""
    arm = top["arm"]
    final, problems = as_plain(arm["final"]), top["numbers"]["problems"]
    return {key: top[key] for key in ("experiment", "changes")} | {
        "arm": arm["arm"],
        "runs": list(arm["runs"]),
        **{key: final[key] for key in ("value", "low", "high")},
        "before": as_plain(arm["start"]) | {"problems": problems},
    }


def _once(runs: dict[str, Record]) -> list[Any]:
    """What runs have alike, each once; in the runs stand its places in this list."""
    places: dict[str, int] = {}

    def place(value: Any) -> int:
        return places.setdefault(json.dumps(value), len(places))

    for run in runs.values():
        run["config"] = [place(row) for row in run["config"]]
        run |= {key: place(run[key]) for key in ("software", "hardware")}
    return [json.loads(value) for value in places]


def _run(run: Run, lock: Record) -> Record:
    """A run's page: where it comes from, its configuration with sources, and its final numbers."""
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
    entry, said = study.experiments[name], said_of(study, numbers, runs)
    return {
        "name": name,
        "title": study.title(name),
        "note": entry.note,
        "method": entry.method,
        "builds_on": _builds_on(entry.builds_on, study),
        **{key: getattr(result, key) for key in ("winner", "leader", "pinned", "reason", "last_k")},
        "tied": list(result.tied),
        "base": _base(study, name, runs),
        "arms": [_arm(place, arm) for place, arm in enumerate(numbers["arms"])],
        "lead": said[0],
        "more": said[1:],
        "problems": gained_and_lost(runs),
    }


def _builds_on(experiment: str | None, study: Study) -> list[str]:
    """The experiment before, if there is one: its name and title."""
    return [] if experiment is None else [experiment, study.title(experiment)]


def _arm(place: int, arm: Numbers) -> Record:
    plain = as_plain(arm)
    return {
        "place": place,
        **{key: plain[key] for key in ("arm", "before", "after", "length", "overrides", "runs")},
        **{key: plain["final"][key] for key in ("value", "low", "high")},
        "behind": plain["below"],
        "collapsed": len(arm["collapses"]),
        "same_as": [run.config["same_as"] for run in arm["all"] if run.config["same_as"]],
    }


def _base(study: Study, name: str, runs: list[Run]) -> Record:
    """What an experiment builds on: the winners' values that its runs hold, and the values that its arms change.

    Returns:
        ``won``: key, value and source; ``changed``: the value before of each key that an arm overrides.
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
