"""What a study found, in a few computed sentences; its best configuration, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo.reporting.discussion import Numbers, numbers_of
from grpo.reporting.sentences import said
from grpo.reporting.timing import read_timing_file, time_row
from grpo.results.findings import AGREES, CANNOT_TELL, DECIDED, DISAGREES, NO_DIFFERENCE, NOT_TESTED, ExperimentResult, Verdict
from grpo.results.runs import Run, read_baseline
from grpo.study import paths
from grpo.study.compose import STUDIES_FOLDER
from grpo.study.schema import Study
from grpo.study.settings import MAIN

Found = dict[str, tuple[list[Run], ExperimentResult]]  # experiment -> its runs and its result, in the study's order


def all_numbers(study: Study, found: Found) -> dict[str, Numbers]:
    """Of each experiment what :func:`numbers_of` says."""
    return {name: numbers_of(study, *of) for name, of in found.items()}


def best(study: Study, numbers: Mapping[str, Numbers]) -> dict[str, Any]:
    """The winner with the highest answer reward among the GRPO experiments on the main task, and what sets it apart.

    Winners that start from the base model come before those that start from a fine-tuned one, as the gain is to be GRPO's.

    Returns:
        ``experiment``, ``title``, ``numbers`` (of the experiment), ``arm`` (the winner's numbers), ``of`` (among how many
        winners) and ``changes``: key, value and source of what no default and no study set.
    """
    main = [name for name in numbers if study.experiments[name].task == MAIN] or list(numbers)
    names = [name for name in main if study.experiments[name].method == "grpo"] or main
    held = [name for name in names if not numbers[name]["winner"]["collapses"]] or names
    held = [name for name in held if "start_from" not in _differs(numbers[name]["winner"])] or held
    name = max(held, key=lambda experiment: numbers[experiment]["winner"]["final"].value)
    return {
        "experiment": name,
        "title": study.title(name),
        "numbers": numbers[name],
        "arm": numbers[name]["winner"],
        "of": len(held),
        "changes": [[key, of["value"], of["from"]] for key, of in _differs(numbers[name]["winner"]).items()],
    }


def _differs(arm: Numbers) -> dict[str, dict[str, Any]]:
    """Value and source (``from``) of each key of an arm that neither a default nor the study set."""
    config = arm["held"][0].config["config"]
    return {key: of for key, of in config.items() if of["from"] not in ("study", "default")}


def sentences(study: Study, found: Found, numbers: Mapping[str, Numbers], verdicts: list[Verdict]) -> list[str]:
    """How far training went, what it did not do, which choice mattered, what stays open, others' claims, collapses.

    Args:
        verdicts: those about experiments that the study makes.
    """
    top = best(study, numbers)
    prompt = top["arm"]["held"][0].config["config"].get("prompt", {}).get("value")
    several = {name: n for name, n in numbers.items() if len(n["arms"]) > 1 and not n["nothing_right"]}
    main = [name for name in numbers if study.experiments[name].task == MAIN]
    trained = [run.name for own, _ in found.values() for run in own if not run.config["same_as"]]
    collapses = [one for n in numbers.values() for arm in n["arms"] for one in arm["collapses"] if one.run in trained]
    return said(
        "answer.md.j2",
        top=top,
        bare={other: values["accuracy"] for other, values in read_baseline(study).items() if other != prompt},
        others=[
            (n["title"], n["leader"])
            for name, n in numbers.items()
            if name in main and n["method"] != "GRPO" and not n["nothing_right"]
        ],
        lowered=[(n["title"], n["method"], arm) for name, n in numbers.items() for arm in _lowered(n)],
        levers=sorted(_levers(several), key=lambda each: -each["by"].value),
        open=[n["title"] for n in several.values() if n["tied"] and not n["tied"][0]["alike"]],
        compared=len(several),
        verdicts=Counter(verdict.verdict for verdict in verdicts),
        by_construction=sum(verdict.by_construction for verdict in verdicts),
        decided=DECIDED,
        trained=len(trained),
        collapses=collapses,
        collapsed_by_arm=_by_arm([one.run for one in collapses], trained),
    )


def _by_arm(collapsed: Sequence[str], trained: Collection[str]) -> list[str]:
    """How many of each arm's runs collapsed, such as ``grpo_learning_rate/3e-3 (3 of 3)``."""
    fallen, all_of = (Counter(run.rpartition("/")[0] for run in runs) for runs in (collapsed, trained))
    return [f"{arm} ({number} of {all_of[arm]})" for arm, number in fallen.items()]


def _lowered(numbers: Numbers) -> list[Numbers]:
    """The arms that ended below their start without a collapse; not those that equal an earlier experiment's."""
    return [arm for arm in numbers["arms"] if arm["gain"].high < 0 and not arm["collapses"] and not _taken_over(arm)]


def _taken_over(arm: Numbers) -> bool:
    return all(run.config["same_as"] for run in arm["held"])


def _levers(several: dict[str, Numbers]) -> list[dict[str, Any]]:
    """Of each experiment the largest difference between two arms whose runs all held, where it can be told from zero."""
    found = []
    for numbers in several.values():
        apart = [arm for arm in numbers["arms"] if arm["apart"] and not arm["collapses"] and not numbers["leader"]["collapses"]]
        if apart:
            least = max(apart, key=lambda arm: arm["below"].value)
            found.append(
                {"title": numbers["title"], "leader": numbers["leader"]["arm"], "arm": least["arm"], "by": least["below"]}
            )
    return found


def certainty(numbers: Mapping[str, Numbers], verdicts: list[Verdict]) -> dict[str, int]:
    """How many comparisons and published claims the runs decide.

    Returns:
        ``compared`` experiments with several arms, those ``told``, whose leader can be told from every other arm; and claims
        by verdict: ``agrees``, ``disagrees``, ``no_difference``, ``cannot_tell``, ``not_tested``.
    """
    compared = [n for n in numbers.values() if len(n["arms"]) > 1]
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {
        "compared": len(compared),
        "told": sum(not n["tied"] and not n["leader"]["collapses"] for n in compared),
        "agrees": counts[AGREES],
        "disagrees": counts[DISAGREES],
        "no_difference": counts[NO_DIFFERENCE],
        "cannot_tell": counts[CANNOT_TELL],
        "not_tested": counts[NOT_TESTED],
    }


def cost(study: Study, found: Found) -> dict[str, Any]:
    """Seconds of all runs that were trained (one that equals another costs nothing), and their machines.

    Returns:
        ``run_seconds`` (their sum) and ``wall_seconds`` (in which at least one of them went on), ``gpu_hours`` (None where no
        run reserves a GPU), ``runs``, ``trained``, ``steps``, ``hardware`` and ``software``.
    """
    runs = [run for own, _ in found.values() for run in own]
    trained = [run for run in runs if not run.config["same_as"]]
    rows, timings = [time_row(study, run) for run in trained], [read_timing_file(run.name) for run in trained]
    software, gpu_hours = trained[-1].config["software"], sum(row["gpu_hours"] for row in rows)
    machines = {str(timing["hardware"]): timing["hardware"] for timing in timings}
    return {
        "runs": len(runs),
        "trained": len(trained),
        "run_seconds": round(sum(row["seconds"] for row in rows), 1),
        "wall_seconds": round(wall_seconds([(timing["started"], timing["finished"]) for timing in timings]), 1),
        "gpu_hours": round(gpu_hours, 3) if gpu_hours else None,
        "steps": int(sum(run.metrics["steps"] for run in trained)),
        "hardware": [_machine(machine) for machine in machines.values()],
        "software": {name: software[name] for name in NAMED if software.get(name, "none") != "none"},
    }


def wall_seconds(spans: list[tuple[str, str]]) -> float:
    """How long at least one of some spans went on.

    Args:
        spans: start and end of each, as ISO 8601 writes a time.
    """
    total, until = 0.0, None
    for first, last in sorted(tuple(map(datetime.fromisoformat, span)) for span in spans):
        since = first if until is None else max(first, until)
        total += max(0.0, (last - since).total_seconds())
        until = last if until is None else max(last, until)
    return total


NAMED = ("python", "torch", "transformers", "vllm", "cuda")


def _machine(hardware: dict[str, Any]) -> str:
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {gpus}"


def command(study: Study, by_dvc: bool) -> str:
    """What was typed to make the results."""
    if not by_dvc:
        return "grpo quickstart"
    elsewhere = study.file is not None and Path(study.file).parent != STUDIES_FOLDER
    named = study.file if elsewhere else study.study
    return f"grpo study use {named} && make repro"


def files_of_runs() -> list[str]:
    """The files of the run ``RUN``, relative to the project's folder."""
    names = ("config.yaml", "metrics.json", "history.csv", "validation.csv", "outcomes.jsonl", "rollouts.jsonl")
    return [(paths.RUNS / "RUN" / name).as_posix() for name in names]
