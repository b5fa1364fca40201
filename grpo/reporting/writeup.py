"""reports/writeup.md and the page reports/index.html: the same content, put together from the record and figures."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo.common.files import damaged, read_text, write_text
from grpo.reporting.comments import QUESTIONS, read_comments
from grpo.reporting.curves import CURVES, REACH
from grpo.reporting.figures import chosen
from grpo.reporting.kissing_number import read_report, write_delivery
from grpo.reporting.labels import bounded, counted, decimals, interval, render, said, table
from grpo.reporting.page import drawn_figures, page_of
from grpo.reporting.record import Values, of_the_handouts, own_experiments, read_record, winner_of
from grpo.reporting.tables import changed, short_label, tables_of
from grpo.reporting.timing import timing_table
from grpo.results.verdicts import NOT_TESTED, VERDICTS, comparison
from grpo.study import paths
from grpo.study.config import MAIN
from grpo.study.schema import Study
from grpo.study.software import pins, unlike_the_pins


def write_up(study: Study) -> None:
    """Write reports/writeup.md, reports/index.html and reports/kissing_number/.

    Raises UserError: a result file is missing or damaged, or a comment is wrong.
    """
    write_delivery(study)
    text, page = text_and_page(study, read_record())
    write_text(paths.WRITEUP, text)
    write_text(paths.PAGE, page)


def text_and_page(study: Study, record: Values, samples: Values | None = None) -> tuple[str, str]:
    """The contents of reports/writeup.md and of reports/index.html; ``samples`` as for :func:`page_of`."""
    timing, comments = read_timing_table(), read_comments(study, record)
    text = re.sub(r"\n\s*\n", "\n\n", writeup_of(study, record, timing, comments)).strip() + "\n"
    return text, page_of(record, text, timing, samples)


def writeup_of(study: Study, record: Values, timing: pd.DataFrame, comments: Mapping[str, str]) -> str:
    """The write-up in Markdown; blank lines may be doubled."""
    experiments, claims = record["experiments"], shown_claims(record["claims"])
    return render(
        "writeup.md.j2",
        r={
            "left_out": left_out(study),
            "pinned": {name: study.selection.pinned_arms(name) for name in study.selection.pinned},
            "heading": study.heading,
        }
        | dict(record),
        claims=claims,
        untested=[claim for claim in record["claims"] if claim not in claims],
        tables=tables_of(record, reach_columns()),
        figures=drawn_figures(),
        comments={name: comments.get(name) for name in (*experiments, *QUESTIONS)},
        title=lambda name: experiments[name]["title"] if name in experiments else study.title(name),
        winner_of=winner_of,
        outcome=outcome,
        won=won,
        card=report_card(study, record, timing),
        trained=int(timing["same_as"].isna().sum()),
        base_of_each_seed=getattr(study.models[MAIN], "one_per_seed", False),
        measured=measured,
        studies=max((claim["together"]["studies"] for claim in record["claims"] if claim.get("together")), default=1),
        cost=cost(timing),
        shared=sum(bool(arm.get("chosen") and arm.get("same_as")) for entry in experiments.values() for arm in entry["arms"]),
        speeds=timing_table(timing),
        origin=environments(timing),
        kissing=read_report() if study.kissing_number is not None else None,
    )


def left_out(study: Study) -> list[str]:
    """Titles of experiments without arms. Handouts' experiments count only in a study that has no others."""
    all_count = {*study.active_experiments} <= of_the_handouts().keys()
    return [study.title(name) for name in study.left_out if all_count or name not in of_the_handouts()]


def won(experiment: Values) -> str:
    """What the winner of an experiment changed, and its learning rate."""
    arm = winner_of(experiment)
    rate = {} if "learning_rate" in arm["overrides"] else {"learning_rate": arm["learning_rate"]}
    return changed(arm | {"overrides": arm["overrides"] | rate})


def outcome(experiment: Values) -> str:
    """An experiment's result in a line: the winner, what it ends at, and which arms may be as good or better."""
    arms = {arm["arm"]: arm for arm in experiment["arms"]}
    winner, leader = arms[experiment["winner"]], arms[experiment["leader"]]
    text = f"{winner['label']} ends at {interval(winner)}"
    if winner is not leader:
        higher = {"higher": "is higher", "same": "is the same"}.get(comparison(winner["below"]), "may be higher")
        return f"{text}; {leader['label']}, at {decimals(leader['value'])}, {higher}"
    others = [arm for arm in arms.values() if arm["chosen"] and arm is not leader]
    near = [
        f"{words} {' and '.join(labels)}"
        for word, words in (("same", "the same as"), ("open", "open against"), ("lower", "below"))
        if (labels := [arm["label"] for arm in others if comparison(arm["below"]) == word])
    ]
    return "; ".join([text, *near]) if near or not others else f"{text}, all others lower"


def shown_claims(claims: Sequence[Values]) -> list[Values]:
    """The study's own claims, then published ones that it tests, each by verdict."""
    shown = [claim for claim in claims if claim["own"] or claim["verdict"] != NOT_TESTED]
    return sorted(shown, key=lambda claim: (not claim["own"], VERDICTS.index(claim["verdict"])))


def measured(claim: Values, longest: int = 50) -> str:
    """What a claim's verdict rests on: the interval that decides, or else the measurement in words, bounded."""
    if claim["verdict"] == NOT_TESTED:
        return ""
    if not claim["interval"]:
        return bounded(claim["measured"], longest)
    return f"{claim['quantity']} {interval(claim['interval'])}".strip()


def report_card(study: Study, record: Values, timing: pd.DataFrame) -> str:
    """The model before training, winners of each method's first experiment, of off-policy ones and of the headline.

    The seconds are those of a run. Of a study of one's own it has all arms of the headline's experiment and what the other
    methods' first experiments won.
    """
    top, of_main = record["headline"], {n: entry for n, entry in record["experiments"].items() if entry["task"] == MAIN}
    firsts = {entry["method"]: name for name, entry in reversed(of_main.items())}
    shown_too = {*firsts.values(), top["experiment"]}
    names = [name for name in of_main if name in shown_too or study.experiments[name].off_policy_only]
    seconds = timing.set_index("run")["total_s"]
    shown = [(of_main[name], winner_of(of_main[name])) for name in names]
    if top["experiment"] in own_experiments(record["experiments"], record["claims"]):
        entry = record["experiments"][top["experiment"]]
        others = [of_main[name] for name in of_main if name in firsts.values() and of_main[name]["method"] != entry["method"]]
        shown = [(entry, arm) for arm in chosen(entry)] + [(other, winner_of(other)) for other in others]
    rows: list[dict[str, str]] = []
    starts: list[float] = []
    for entry, arm in shown:
        if arm["start"] not in starts:  # under another prompt
            label = f"no training, {said(short_label(arm))}" if starts else "no training"
            rows.append(_card_row(label, decimals(arm["start"]), arm["at_start"], ""))
            starts.append(arm["start"])
        trained = [other or run for other, run in zip(arm["same_as"] or arm["runs"], arm["runs"], strict=True)]
        took = "" if math.isnan(mean := seconds.reindex(trained).mean()) else decimals(mean, 1)
        rows.append(_card_row(f"{said(entry['title'])}: {short_label(arm)}", interval(arm), arm, took))
    return table(rows)


def _card_row(after: str, reward: str, end: Values, seconds: str) -> dict[str, str]:
    shown = {"right form": decimals(end["format"]), "right, given the form": decimals(end["given_form"])}
    return {"after": after, "reward (95%)": reward} | shown | {"tokens": decimals(end["length"], 1), "seconds a run": seconds}


# ------------------------------------------------------------------------------------------------------------ from timing.csv


def read_timing_table() -> pd.DataFrame:
    """Read reports/timing.csv, a row for each run; a missing or damaged file is a UserError."""
    return _read_table(paths.TIMING_TABLE, "tables")


def _read_table(path: Path, made_by: str) -> pd.DataFrame:
    try:
        return pd.read_csv(io.StringIO(read_text(path, made_by)))
    except ValueError as error:
        raise damaged(path, error, made_by) from error


def reach_columns() -> dict[str, list[dict[str, str]]]:
    """By experiment, for each chosen arm: the steps and core-seconds in which it gets half-way to the best end."""
    if not (path := CURVES / REACH).exists():
        return {}
    found = {}
    for name, rows in _read_table(path, "figures").groupby("experiment"):
        level = decimals(rows["level"].iloc[0])
        heads = f"steps to {level}, half of the rise", f"core-seconds to {level}"
        shown = rows[["steps", "core_seconds"]].map(lambda one: "not reached" if math.isnan(one) else decimals(one, 1))
        found[str(name)] = [dict(zip(heads, row, strict=True)) for row in shown.to_numpy().tolist()]
    return found


def cost(timing: pd.DataFrame) -> str:
    """What the study took: wall time of its runs, seconds of runs, GPU-hours, machines; a copied run costs nothing."""
    trained = timing[timing["same_as"].isna()]
    try:
        started, finished = (
            [datetime.fromisoformat(str(time)).timestamp() for time in trained[column]] for column in ("started", "finished")
        )
    except ValueError as error:
        raise damaged(paths.TIMING_TABLE, error, made_by="tables") from error
    minutes, hours = wall_seconds(list(zip(started, finished, strict=True))) / 60, trained["gpu_hours"].sum()
    machines = "; ".join(dict.fromkeys(_machine(json.loads(hardware)) for hardware in trained["hardware"]))
    steps, seconds = trained["steps"].sum(), trained["total_s"].sum()
    return (
        f"{counted(len(trained), 'run')} trained, {steps:,.0f} steps: {seconds:,.0f} seconds of runs in {minutes:.1f} minutes "
        f"of wall time{f', {hours:.2f} GPU-hours' if hours else ''}, on {machines}. "
        "[timing.csv](timing.csv) has a row for each run."
    )


def wall_seconds(spans: Sequence[tuple[float, ...]]) -> float:
    """Seconds covered by the union of some spans, each from a start to an end."""
    starts, ends = np.array(sorted(spans)).T
    latest = np.maximum.accumulate(ends)
    gaps = np.maximum(starts[1:] - latest[:-1], 0.0)
    return float(latest[-1] - starts[0] - gaps.sum())


def environments(timing: pd.DataFrame) -> str:
    """Table (Markdown) of software and hardware, with a column for all runs that have the same, and what is not as pinned.

    ``timing``: reports/timing.csv.
    """
    columns: list[tuple[dict[str, Any], list[str]]] = []
    others: dict[str, list[str]] = {}  # runs by the packages that are not as pinned
    for run, software, hardware in timing[["run", "software", "hardware"]].map(str).to_numpy().tolist():
        versions = json.loads(software)
        made_with = {**versions, **json.loads(hardware)}
        pinned = pins([name for name in versions if name not in ("python", "cuda")])
        others.setdefault(", ".join(unlike_the_pins(versions, pinned)), []).append(run)
        for known, runs in columns:
            if all(known[key] == made_with[key] for key in known.keys() & made_with.keys()):  # only some need Ray
                known.update(made_with)
                runs.append(run)
                break
        else:
            columns.append((made_with, [run]))
    heads = [
        f"{place}: " * (len(columns) > 1) + f"{len(runs)} of {len(timing)} runs" for place, (_, runs) in enumerate(columns, 1)
    ]
    shown = table(
        {"": key} | {head: _text(known.get(key, "")) for head, (known, _) in zip(heads, columns, strict=True)}
        for key in dict.fromkeys(key for known, _ in columns for key in known)
    )
    lines = [f"In column {place}: {', '.join(runs)}." for place, (_, runs) in enumerate(columns[1:], start=2)]
    lines += [f"Other versions: {', '.join(runs)}: {what}." for what, runs in others.items() if what]
    return shown + "".join(f"\n{line}\n" for line in lines)


def _text(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, list) else str(value)


def _machine(hardware: Values) -> str:
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {gpus}"
