"""What a study found, in five computed sentences; its best configuration, and what it cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from grpo.reporting.timing import read_timing_file, time_row
from grpo.results.collapses import collapse_of
from grpo.results.findings import AGREES, CANNOT_TELL, DISAGREES
from grpo.results.intervals import two_level_mean
from grpo.results.runs import Run, first_scores
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.sections import MAIN

Found = dict[str, tuple[list[Run], dict[str, Any]]]  # experiment -> its runs and its selection, in the study's order


def best(study: Study, found: Found) -> dict[str, Any]:
    """The winner with the highest answer reward among the GRPO experiments on the main task, and what sets it apart.

    Returns:
        ``experiment``, ``arm``, ``value``, ``low``, ``high``, ``runs``, ``of`` (among how many winners), ``before`` (the
        untrained model's reward, with its interval) and ``changes``: key, value and source of what no default and no study set.
    """
    winners = {
        name: next(c for c in selection["candidates"] if c["arm"] == selection["winner"])
        for name, (_, selection) in found.items()
    }
    main = {name: winner for name, winner in winners.items() if study.experiments[name].task == MAIN} or winners
    winners = {name: winner for name, winner in main.items() if study.experiments[name].method == "grpo"} or main
    name = max(winners, key=lambda experiment: winners[experiment]["value"])
    candidate = winners[name]
    of_arm = [run for run in found[name][0] if run.arm == candidate["arm"]]
    config = of_arm[0].config["config"]
    return {
        "experiment": name,
        "method": study.experiments[name].method,
        **{key: candidate[key] for key in ("arm", "value", "low", "high")},
        "runs": [run.name for run in of_arm],
        "of": len(winners),
        "before": two_level_mean(first_scores(of_arm)),
        "changes": [[key, v["value"], v["from"]] for key, v in config.items() if v["from"] not in ("study", "default")],
    }


def sentences(study: Study, found: Found, claims: list[dict[str, Any]]) -> list[str]:
    """Five: how far training went, which choice mattered most, which made no difference, others' claims, failures."""
    first = _gain(study, best(study, found)) + _other_methods(study, found)
    return [first, _lever(study, found), _undecided(study, found), _claims(claims, study), _failures(found)]


def _gain(study: Study, top: dict[str, Any]) -> str:
    n, problems = len(top["runs"]), top["before"]["problems"]
    seeds = f"{n} seeds" if n > 1 else "one seed, so that the spread between runs is not in the interval"
    chosen = f", the highest of {top['of']} winners, which flatters it a little" if top["of"] > 1 else ""
    return (
        f"{METHODS[top['method']]} lifted the share of {problems} validation problems answered right from "
        f"{top['before']['value']:.3f} to {format_interval(top)} "
        f"({top['arm']} of {study.title(top['experiment'])}; 95% interval, {seeds}){chosen}."
    )


def _other_methods(study: Study, found: Found) -> str:
    """How far the winners of the other methods come; nothing where there are none."""
    others = [
        f"{study.title(name)} reaches {selection['value']:.3f} ({selection['winner']})"
        for name, (_, selection) in found.items()
        if study.experiments[name].method != "grpo"
    ]
    return f" For comparison, {' and '.join(others)}." if others and len(others) < len(found) else ""


def _lever(study: Study, found: Found) -> str:
    """The largest difference of two arms that can be told from zero."""
    told = [
        (candidate["behind"]["value"], name, selection["leader"], candidate)
        for name, (_, selection) in found.items()
        for candidate in selection["candidates"]
        if candidate["behind"] is not None and candidate["behind"]["low"] > 0
    ]
    if not told:
        return "No choice that was compared made a difference that can be told from zero."
    _, name, leader, candidate = max(told, key=lambda each: each[0])
    return (
        f"The choice that mattered most was made in {study.title(name)}: {leader} ends {format_interval(candidate['behind'])} "
        f"above {candidate['arm']}."
    )


def certainty(study: Study, found: Found, claims: list[dict[str, Any]]) -> dict[str, int]:
    """How many comparisons and published claims the runs decide.

    Returns:
        ``compared`` experiments with several arms, those ``told``, whose leader can be told from every other arm; and claims
        by verdict: ``agrees``, ``disagrees``, ``cannot_tell``.
    """
    compared = [selection for _, selection in found.values() if len(selection["candidates"]) > 1]
    counts = Counter(claim["verdict"] for claim in claims)
    return {
        "compared": len(compared),
        "told": sum(not selection["tied"] for selection in compared),
        "agrees": counts[AGREES],
        "disagrees": counts[DISAGREES],
        "cannot_tell": counts[CANNOT_TELL],
    }


def _undecided(study: Study, found: Found) -> str:
    """In how many experiments the arms could all be told apart from the leader, and in which none could."""
    compared = {name: selection for name, (_, selection) in found.items() if len(selection["candidates"]) > 1}
    open_ = [study.title(name) for name, selection in compared.items() if selection["tied"]]
    if not compared:
        return "No two configurations were compared."
    if not open_:
        where = "the one comparison" if len(compared) == 1 else f"all {len(compared)} comparisons"
        return f"In {where} the leading arm can be told from every other arm."
    most = max(c["behind"]["detectable"] for s in compared.values() for c in s["candidates"] if c["arm"] in s["tied"])
    return (
        f"In {len(open_)} of {len(compared)} experiments the leading arm cannot be told from another "
        f"({'; '.join(open_)}); differences up to {most:.3f} could have gone unseen there."
    )


def _claims(claims: list[dict[str, Any]], study: Study) -> str:
    counts = Counter(claim["verdict"] for claim in claims)
    judged = counts[AGREES] + counts[DISAGREES] + counts[CANNOT_TELL]
    if not judged:
        return "No published claim is about what this study made."
    n, open_ = len(study.seeds), counts[CANNOT_TELL]
    undecided = f"; of {open_} others {n} run{'s' if n > 1 else ''} an arm cannot tell" if open_ else ""
    return f"Of {judged} published claims put to the test here {counts[AGREES]} hold and {counts[DISAGREES]} do not{undecided}."


def _failures(found: Found) -> str:
    runs = [(run, selection["last_k"]) for own, selection in found.values() for run in own if not run.config["same_as"]]
    fallen = [run.name for run, last_k in runs if collapse_of(run, last_k)]
    if not fallen:
        return f"None of {len(runs)} runs diverged, and none fell below half of its best."
    diverged = sum(run.metrics["diverged_step"] is not None for run, _ in runs)
    return (
        f"Of {len(runs)} runs {len(fallen)} collapsed, that is diverged ({diverged}) or fell below half of their best: "
        f"{', '.join(fallen)}."
    )


def cost(study: Study, found: Found) -> dict[str, Any]:
    """Seconds and GPU-hours of all runs that were trained (one that equals another costs nothing), and their machines."""
    runs = [run for own, _ in found.values() for run in own]
    trained = [run for run in runs if not run.config["same_as"]]
    rows = [time_row(study, run) for run in trained]
    software = trained[-1].config["software"]
    machines = [read_timing_file(run.name)["hardware"] for run in trained]
    return {
        "runs": len(runs),
        "trained": len(trained),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "gpu_hours": round(sum(row["gpu_hours"] for row in rows), 3),
        "steps": int(sum(run.metrics["steps"] for run in trained)),
        "hardware": [_machine(machine) for machine in {str(machine): machine for machine in machines}.values()],
        "software": {name: software[name] for name in NAMED if software.get(name, "none") != "none"},
    }


METHODS = {"grpo": "GRPO", "sft": "Supervised fine-tuning", "expert_iteration": "Expert iteration"}
NAMED = ("python", "torch", "transformers", "vllm", "cuda")


def _machine(hardware: dict[str, Any]) -> str:
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {gpus}"


def command(study: Study, by_dvc: bool) -> str:
    """What was typed to make the results."""
    return f"grpo study use {study.study} && make repro" if by_dvc else "grpo quickstart"


def files_of_runs() -> list[str]:
    """The files of the run ``RUN``, relative to the project's folder."""
    names = ("config.yaml", "metrics.json", "history.csv", "validation.csv", "outcomes.jsonl", "rollouts.jsonl")
    return [(paths.RUNS / "RUN" / name).as_posix() for name in names]
