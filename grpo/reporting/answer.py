"""The report's summary: sentences on what the study found, its best configuration, and its cost."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from grpo.reporting.discussion import Numbers
from grpo.reporting.record import Record, Values
from grpo.reporting.sentences import paragraphs
from grpo.reporting.timing import read_timing_file, time_row
from grpo.study.compose import STUDIES_FOLDER
from grpo.study.schema import Study
from grpo.study.settings import MAIN

NAMED = ("python", "torch", "transformers", "vllm", "cuda")


def best(record: Record) -> Values:
    """Find the winner with the highest answer reward among the GRPO experiments on the main task.

    Winners that start from the base model come before those that start from a fine-tuned one, as the gain is to be GRPO's.

    Returns:
        ``numbers`` (the experiment's), ``arm`` (the winner's numbers), ``of`` (number of winners compared), ``only_from_base``
        (whether winners from a fine-tuned model were left out) and ``changes``: key, value and source of values that neither
        defaults nor the study set.
    """
    numbers, experiments = record.numbers, record.study.experiments
    main = [name for name in numbers if experiments[name].task == MAIN] or list(numbers)
    names = [name for name in main if experiments[name].method == "grpo"] or main
    held = [name for name in names if not numbers[name]["winner"]["collapses"]] or names
    from_base = [name for name in held if "start_from" not in _differs(numbers[name]["winner"])]
    held, only_from_base = from_base or held, 0 < len(from_base) < len(held)
    top = max((numbers[name] for name in held), key=lambda of: of["winner"]["final"].value)
    return {
        "numbers": top,
        "arm": top["winner"],
        "of": len(held),
        "only_from_base": only_from_base,
        "changes": [[key, of["value"], of["from"]] for key, of in _differs(top["winner"]).items()],
    }


def _differs(arm: Numbers) -> dict[str, dict[str, Any]]:
    """Value and source (``from``) of each key of an arm that neither a default nor the study set."""
    config = arm["held"][0].config["config"]
    return {key: of for key, of in config.items() if of["from"] not in ("study", "default")}


def sentences(record: Record) -> list[str]:
    """The summary's sentences: gain, other methods, the largest effect, undecided comparisons, claims and collapses."""
    top, numbers, verdicts = best(record), record.numbers, record.verdicts
    prompt = top["arm"]["held"][0].config["config"].get("prompt", {}).get("value")
    right = [n for n in numbers.values() if not n["nothing_right"]]
    several = [n for n in right if len(n["arms"]) > 1]
    trained = [run.name for run in record.all_runs if not run.config["same_as"]]
    collapses = [one for n in numbers.values() for arm in n["arms"] for one in arm["collapses"] if one.run in trained]
    fallen, of_arm = (Counter(run.rpartition("/")[0] for run in of) for of in ((one.run for one in collapses), trained))
    return paragraphs(
        "answer.md.j2",
        top=top,
        bare={other: values["accuracy"] for other, values in record.baseline.items() if other != prompt},
        others=[n for n in right if n["method"] != "GRPO" and record.study.experiments[n["experiment"]].task == MAIN],
        lowered=[(n, arm) for n in numbers.values() for arm in _lowered(n)],
        lever=max(_levers(several), key=lambda lever: lever[1]["below"].value, default=None),
        open=[n["title"] for n in several if n["tied"] and not n["tied"][0]["alike"]],
        compared=len(several),
        verdicts=record.counted,
        by_construction=sum(verdict.by_construction for verdict in verdicts),
        trained=len(trained),
        collapses=collapses,
        collapsed_by_arm=[f"{arm} ({number} of {of_arm[arm]})" for arm, number in fallen.items()],
    )


def _lowered(numbers: Numbers) -> list[Numbers]:
    """The arms that ended below their start without a collapse, without those taken over from an earlier experiment."""
    return [
        arm
        for arm in numbers["arms"]
        if arm["gain"].high < 0 and not arm["collapses"] and not all(run.config["same_as"] for run in arm["held"])
    ]


def _levers(several: list[Numbers]) -> list[tuple[Numbers, Numbers]]:
    """The arm furthest below the leader by a significant difference, both without collapsed runs, of each experiment."""
    found = []
    for n in several:
        apart = [arm for arm in n["arms"] if arm["apart"] and not arm["collapses"] and not n["leader"]["collapses"]]
        found += [(n, max(apart, key=lambda arm: arm["below"].value))] if apart else []
    return found


def cost(record: Record) -> Values:
    """Sum up what the trained runs took; a run taken over from an identical one costs nothing.

    Returns:
        ``wall_seconds`` (time during which at least one run went on), ``gpu_hours`` (None if no run reserves a GPU), ``runs``,
        ``trained``, ``steps``, ``hardware`` and ``software``.
    """
    trained = [run for run in record.all_runs if not run.config["same_as"]]
    timings = [read_timing_file(run.name) for run in trained]
    software, gpu_hours = trained[-1].config["software"], sum(time_row(record.study, run)["gpu_hours"] for run in trained)
    return {
        "runs": len(record.all_runs),
        "trained": len(trained),
        "wall_seconds": round(wall_seconds([(timing["started"], timing["finished"]) for timing in timings]), 1),
        "gpu_hours": round(gpu_hours, 3) if gpu_hours else None,
        "steps": int(sum(run.metrics["steps"] for run in trained)),
        "hardware": list(dict.fromkeys(_machine(timing["hardware"]) for timing in timings)),
        "software": {name: software[name] for name in NAMED if software.get(name, "none") != "none"},
    }


def wall_seconds(spans: list[tuple[str, str]]) -> float:
    """Seconds covered by the union of some spans.

    Args:
        spans: start and end of each, in ISO 8601.
    """
    starts, ends = np.array(sorted([datetime.fromisoformat(time).timestamp() for time in span] for span in spans)).T
    latest = np.maximum.accumulate(ends)
    gaps = np.maximum(starts[1:] - latest[:-1], 0.0)
    return float(latest[-1] - starts[0] - gaps.sum())


def _machine(hardware: Values) -> str:
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {gpus}"


def command(study: Study, by_dvc: bool) -> str:
    """The shell command that makes the results."""
    if not by_dvc:
        return "grpo quickstart"
    elsewhere = study.file is not None and Path(study.file).parent != STUDIES_FOLDER
    named = study.file if elsewhere else study.study
    return f"grpo study use {named} && make repro"
