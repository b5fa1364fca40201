"""The report's summary: sentences on what the study found, its best configuration, and its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo.reporting.discussion import Numbers, numbers_of
from grpo.reporting.sentences import paragraphs
from grpo.reporting.timing import read_timing_file, time_row
from grpo.results.findings import AGREES, CANNOT_TELL, DECIDED, DISAGREES, NO_DIFFERENCE, NOT_TESTED, ExperimentResult, Verdict
from grpo.results.runs import Run, read_baseline
from grpo.study.compose import STUDIES_FOLDER
from grpo.study.schema import Study
from grpo.study.settings import MAIN

Found = dict[str, tuple[list[Run], ExperimentResult]]  # experiment -> its runs and its result, in the study's order


def all_numbers(study: Study, found: Found) -> dict[str, Numbers]:
    """Compute :func:`numbers_of` for each experiment."""
    return {name: numbers_of(study, *of) for name, of in found.items()}


def best(study: Study, numbers: Mapping[str, Numbers]) -> dict[str, Any]:
    """Find the winner with the highest answer reward among the GRPO experiments on the main task.

    Winners that start from the base model come before those that start from a fine-tuned one, as the gain is to be GRPO's.

    Returns:
        ``experiment``, ``title``, ``numbers`` (the experiment's), ``arm`` (the winner's numbers), ``of`` (number of winners
        compared), ``only_from_base`` (whether winners from a fine-tuned model were left out) and ``changes``: key, value and
        source of values that neither defaults nor the study set.
    """
    main = [name for name in numbers if study.experiments[name].task == MAIN] or list(numbers)
    names = [name for name in main if study.experiments[name].method == "grpo"] or main
    held = [name for name in names if not numbers[name]["winner"]["collapses"]] or names
    from_base = [name for name in held if "start_from" not in _differs(numbers[name]["winner"])]
    held, only_from_base = from_base or held, 0 < len(from_base) < len(held)
    name = max(held, key=lambda experiment: numbers[experiment]["winner"]["final"].value)
    return {
        "experiment": name,
        "title": study.title(name),
        "numbers": numbers[name],
        "arm": numbers[name]["winner"],
        "of": len(held),
        "only_from_base": only_from_base,
        "changes": [[key, of["value"], of["from"]] for key, of in _differs(numbers[name]["winner"]).items()],
    }


def _differs(arm: Numbers) -> dict[str, dict[str, Any]]:
    """Value and source (``from``) of each key of an arm that neither a default nor the study set."""
    config = arm["held"][0].config["config"]
    return {key: of for key, of in config.items() if of["from"] not in ("study", "default")}


def sentences(study: Study, found: Found, numbers: Mapping[str, Numbers], verdicts: list[Verdict]) -> list[str]:
    """The summary's sentences: gain, other methods, the largest effect, undecided comparisons, claims and collapses.

    Args:
        verdicts: on the claims about experiments of this study.
    """
    top = best(study, numbers)
    prompt = top["arm"]["held"][0].config["config"].get("prompt", {}).get("value")
    several = {name: n for name, n in numbers.items() if len(n["arms"]) > 1 and not n["nothing_right"]}
    main = [name for name in numbers if study.experiments[name].task == MAIN]
    trained = [run.name for own, _ in found.values() for run in own if not run.config["same_as"]]
    collapses = [one for n in numbers.values() for arm in n["arms"] for one in arm["collapses"] if one.run in trained]
    return paragraphs(
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
    """Number of collapsed runs by arm, such as ``grpo_learning_rate/3e-3 (3 of 3)``."""
    fallen, all_of = (Counter(run.rpartition("/")[0] for run in runs) for runs in (collapsed, trained))
    return [f"{arm} ({number} of {all_of[arm]})" for arm, number in fallen.items()]


def _lowered(numbers: Numbers) -> list[Numbers]:
    """The arms that ended below their start without a collapse, without those taken over from an earlier experiment."""
    return [
        arm
        for arm in numbers["arms"]
        if arm["gain"].high < 0 and not arm["collapses"] and not all(run.config["same_as"] for run in arm["held"])
    ]


def _levers(several: dict[str, Numbers]) -> list[dict[str, Any]]:
    """The largest significant difference between two arms without collapsed runs, of each experiment that has one."""
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
    """Count the comparisons and published claims that the runs decide.

    Returns:
        ``compared`` (experiments with several arms), ``decided`` (those whose leader differs significantly from every other
        arm), and claims by verdict: ``agrees``, ``disagrees``, ``no_difference``, ``cannot_tell``, ``not_tested``.
    """
    compared = [n for n in numbers.values() if len(n["arms"]) > 1]
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {
        "compared": len(compared),
        "decided": sum(not n["tied"] and not n["leader"]["collapses"] for n in compared),
        "agrees": counts[AGREES],
        "disagrees": counts[DISAGREES],
        "no_difference": counts[NO_DIFFERENCE],
        "cannot_tell": counts[CANNOT_TELL],
        "not_tested": counts[NOT_TESTED],
    }


def cost(study: Study, found: Found) -> dict[str, Any]:
    """Sum up what the trained runs took; a run taken over from an identical one costs nothing.

    Returns:
        ``wall_seconds`` (time during which at least one run went on), ``gpu_hours`` (None if no run reserves a GPU), ``runs``,
        ``trained``, ``steps``, ``hardware`` and ``software``.
    """
    runs = [run for own, _ in found.values() for run in own]
    trained = [run for run in runs if not run.config["same_as"]]
    rows, timings = [time_row(study, run) for run in trained], [read_timing_file(run.name) for run in trained]
    software, gpu_hours = trained[-1].config["software"], sum(row["gpu_hours"] for row in rows)
    machines = {str(timing["hardware"]): timing["hardware"] for timing in timings}
    return {
        "runs": len(runs),
        "trained": len(trained),
        "wall_seconds": round(wall_seconds([(timing["started"], timing["finished"]) for timing in timings]), 1),
        "gpu_hours": round(gpu_hours, 3) if gpu_hours else None,
        "steps": int(sum(run.metrics["steps"] for run in trained)),
        "hardware": [_machine(machine) for machine in machines.values()],
        "software": {name: software[name] for name in NAMED if software.get(name, "none") != "none"},
    }


def wall_seconds(spans: list[tuple[str, str]]) -> float:
    """Seconds covered by the union of some spans.

    Args:
        spans: start and end of each, in ISO 8601.
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
    """The shell command that makes the results."""
    if not by_dvc:
        return "grpo quickstart"
    elsewhere = study.file is not None and Path(study.file).parent != STUDIES_FOLDER
    named = study.file if elsewhere else study.study
    return f"grpo study use {named} && make repro"
