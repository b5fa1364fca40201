"""`grpo verify`: compute a report again from what git stores, train one of its runs again, and say how large the noise is."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from grpo.commands.recompute import (
    Difference,
    Experiment,
    Run,
    Values,
    compare,
    compare_experiment,
    compare_reach,
    compare_samples,
    lines,
    mean,
    row_of_folder,
    rows_of_file,
    verdict_on,
)
from grpo.common.errors import UserError
from grpo.common.files import read_text
from grpo.reporting.curves import CURVES
from grpo.reporting.labels import render
from grpo.reporting.page import embedded_samples
from grpo.reporting.record import digests_of, leaves
from grpo.reporting.tables import tables_of
from grpo.reporting.writeup import read_timing_table, text_and_page
from grpo.results.claims import claims_of
from grpo.results.outcomes_file import samples_digest
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.software import hardware
from grpo.tracking.mlflow_uri import NOWHERE

SHOWN = 10  # differences in the report
TOLERANCE = 3 * 0.045  # three standard deviations of five equal runs on MATH (garg-2026)
SHORT = 0.5  # the drawn run is among the shortest runs, this share of those that learnt
FILES = ("history.csv", "validation.csv", "outcomes.jsonl", "rollouts.jsonl", "metrics.json")
MADE_BY = "tables"


def verify(study: Study, run: str | None, rerun: bool) -> dict[str, Any]:
    """Verify the active study's report.

    ``run``: the run to repeat, EXPERIMENT/ARM/SEED; by default one of the shortest that learnt is drawn. ``rerun``: whether to
    repeat one. Returns ``differences`` (each with file, place, written, recomputed), ``runs`` (number), ``from_data`` (of how
    many the run folder was there too), ``noise`` and ``rerun``. Raises UserError: a file that the report stages write is
    missing.
    """
    if not paths.OUTCOMES.exists():
        raise UserError(f"{paths.OUTCOMES}: no such file. Run `dvc repro {MADE_BY}` to make it.")
    rows = rows_of_file(paths.OUTCOMES)
    found, experiments = differences(study, rows)
    data = sum((paths.RUNS / name / "outcomes.jsonl").exists() for name in rows)
    return {
        "differences": [one._asdict() for one in found],
        "runs": len(rows),
        "from_data": data,
        "noise": noise(experiments),
        "rerun": repeat(rows, run) if rerun else None,
    }


def differences(study: Study, rows: dict[str, Values]) -> tuple[list[Difference], dict[str, Experiment]]:
    """Find what differs in reports/ from what follows from the runs' rows; and the experiments."""
    experiments = {
        name: Experiment(
            {arm: [_run(rows, paths.run_name(name, arm, seed)) for seed in study.seeds_of(name)] for arm in entry.arms},
            next(iter(study.selection.pinned_arms(name)), None),
        )
        for name, entry in ((name, study.experiments[name]) for name in study.active_experiments)
    }
    found = [one for name, row in rows.items() for one in _unlike_data(name, row)]
    text = read_text(paths.RECORD, MADE_BY)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        return [*found, Difference(str(paths.RECORD), f"line {error.lineno}", "not JSON", error.msg)], experiments
    found += [*_unlike_record(study, record, experiments)]
    found += _unlike_digests(record, {one.place for one in found})
    timing = read_timing_table()
    found += compare_reach(CURVES, experiments, {*timing["run"][timing["alone"]]})
    found += _unlike_text(paths.RECORD, text, json.dumps(record, indent=2, ensure_ascii=False) + "\n") if not found else ()
    return found or [*_unlike_rendered(study, record, rows)], experiments


def _run(rows: dict[str, Values], name: str) -> Run:
    if name not in rows:
        raise UserError(f"{paths.OUTCOMES}: no row of {name}. Run `dvc repro {MADE_BY}` to make the file again.")
    return Run(rows[name])


def _unlike_data(name: str, row: Values) -> Iterator[Difference]:
    """Compare a run's row with its folder, if that is there."""
    if (paths.RUNS / name / "outcomes.jsonl").exists():
        for key, value in row_of_folder(paths.RUNS / name, name, row["levels"]).items():
            yield from compare(str(paths.OUTCOMES), f"{name}: {key}", value, row[key])


def _unlike_record(study: Study, record: Values, experiments: dict[str, Experiment]) -> Iterator[Difference]:
    file = str(paths.RECORD)
    try:
        for name, experiment in experiments.items():
            yield from compare_experiment(file, name, experiment, record["experiments"][name])
        yield from compare_samples(file, paths.RUNS.parent, record)
        top = record["headline"]
        if (best := experiments.get(top["experiment"])) is None:
            yield Difference(file, "headline/experiment", top["experiment"], "no experiment")
        else:
            yield from compare(file, "headline/arm", best.winner, top["arm"])
            yield from compare(file, "headline", mean(best.table(best.winner)), top)
        for number, ((claim, own), entry) in enumerate(zip(claims_of(study), record["claims"], strict=False)):
            stands_for = study.task(study.experiments[claim.experiment].task).stands_for
            verdict, interval, seen = verdict_on(claim.model_dump(), own or stands_for == "math", experiments)
            for key, value in {"id": claim.id, "verdict": verdict, "interval": interval, "could_see": seen}.items():
                yield from compare(file, f"claims/{number}/{key}", value, entry[key])
    except (LookupError, TypeError) as error:
        yield Difference(file, "a key", repr(error), "as the report stage writes it")


def _unlike_digests(record: Values, known: set[str]) -> Iterator[Difference]:
    """Values that no run's scores decide, such as levels of training metrics and texts, compared by their digests."""
    written, now = read_text(paths.DIGESTS, MADE_BY).split(), digests_of(record).split()
    if len(written) != len(now):
        yield Difference(str(paths.RECORD), "as a whole", f"{len(now)} values", f"{len(written)} values in {paths.DIGESTS}")
    for (place, value), one, other in zip(leaves(record), written, now, strict=False):
        if one != other and place not in known:
            yield Difference(str(paths.RECORD), place, str(value)[:80], f"another value, of digest {one}")


def _unlike_rendered(study: Study, record: Values, rows: dict[str, Values]) -> Iterator[Difference]:
    """Compare tables, write-up and page with what the record gives."""
    tables, written = tables_of(record), {path.stem for path in paths.TABLES.glob("*.md")}
    for name in sorted(tables.keys() | written):
        path = paths.TABLES / f"{name}.md"
        yield from _unlike_text(path, read_text(path, MADE_BY) if name in written else "", tables.get(name, ""))
    page = read_text(paths.PAGE, "writeup")
    try:
        samples, by_run = embedded_samples(page)
        for run, shown in by_run.items():
            yield from compare(str(paths.PAGE), f"samples of {run}", rows.get(run, {}).get("samples"), samples_digest(shown))
        yield from compare(str(paths.PAGE), "runs with samples", {*rows}, {*by_run, *samples["left_out"]})
    except (ValueError, LookupError, TypeError) as error:
        yield Difference(str(paths.PAGE), "samples", repr(error), "as the report stage writes them")
        return
    text, rendered = text_and_page(study, record, samples)
    yield from _unlike_text(paths.WRITEUP, read_text(paths.WRITEUP, "writeup"), text)
    yield from _unlike_text(paths.PAGE, page, rendered)


def _unlike_text(path: Path, written: str, rendered: str) -> Iterator[Difference]:
    for number, (one, other) in enumerate(zip_longest(written.split("\n"), rendered.split("\n"), fillvalue=""), 1):
        if one != other:
            same = (place for place, (a, b) in enumerate(zip_longest(one, other)) if a != b)
            start = max(0, next(same) - 20)
            yield Difference(str(path), f"line {number}", one[start : start + 60], other[start : start + 60])


# ------------------------------------------------------------------------------------------------------------- noise


def noise(experiments: dict[str, Experiment]) -> dict[str, float | None]:
    """How far a mean moves by chance, as standard deviations; root mean squares over the arms with the rates that were chosen.

    Returns:
        ``seeds`` (of a run, between the seeds of an arm), ``draws`` (the part of it by the draws of responses), ``problems``
        (of a mean, with other problems), ``largest`` (of an arm's ``seeds``); None if no arm shows it, as with one seed.
    """
    arms = [experiment.noise(arm) for experiment in experiments.values() for arm in experiment.chosen.values()]
    known = pd.DataFrame(arms, columns=["seeds", "draws", "problems"], dtype=float)
    found = {str(key): math.sqrt((known[key] ** 2).mean()) for key in known} | {"largest": float(known["seeds"].max())}
    return {key: None if math.isnan(value) else value for key, value in found.items()}


# ------------------------------------------------------------------------------------------------------------- a run


def repeat(rows: dict[str, Values], name: str | None) -> dict[str, Any]:
    """Train a run again in a folder of its own and compare it with what was recorded.

    Returns ``run``, ``unlike`` (the files or columns that differ), ``start``, ``end`` and ``recorded_end`` (mean rewards),
    ``processor`` and ``recorded_processor``, ``agrees``, ``seconds``. Raises UserError: there is no such run, or its training
    failed.
    """
    timing = read_timing_table().set_index("run")
    name, start = name or _drawn(rows, timing), time.perf_counter()
    if name not in rows:
        raise UserError(f"--run {name}: no run of this study. {paths.OUTCOMES} names them.")
    with TemporaryDirectory() as copy:
        there = Path(copy)
        _prepare(there, name)
        experiment, arm, seed = name.split("/")
        entry = json.loads(read_text(paths.RECORD, MADE_BY))["experiments"][experiment]
        task, inputs = entry["task"], {"model": paths.model, "dataset": paths.train}
        for stage, made in (inputs | ({"sft_dataset": paths.sft_examples} if entry["method"] == "sft" else {})).items():
            if not (there / made(task)).exists():
                _grpo(there, stage, task)
        _grpo(there, "train", experiment, arm, "--seed", seed)
        now, here = there / paths.RUNS / name, paths.RUNS / name
        again = row_of_folder(now, name, rows[name]["levels"]) | {"samples": samples_digest(lines(now / "rollouts.jsonl"))}
        unlike = [one.place for key in again for one in compare("", key, again[key], rows[name][key])]
        if (here / FILES[0]).exists():
            unlike += [file for file in FILES if (here / file).read_bytes() != (now / file).read_bytes()]
    processor, recorded = hardware()["processor"], json.loads(str(timing.loc[name, "hardware"]))["processor"]
    ends = [float(Run(row).final.mean()) for row in (again, rows[name])]
    near = processor != recorded and math.isclose(*ends, abs_tol=TOLERANCE)
    about = {"run": name, "unlike": unlike, "start": float(rows[name]["start"].mean())}
    about |= {"end": ends[0], "recorded_end": ends[1], "processor": processor}
    about |= {"recorded_processor": recorded, "agrees": not unlike or near}
    return about | {"seconds": round(time.perf_counter() - start, 1)}


def _drawn(rows: dict[str, Values], timing: Any) -> str:
    """One of the shortest runs that start from the base model, were not taken over from another, and learnt.

    A run learnt if it rose by more than twice the tolerance, so that one that did not learn would differ. If none did: any.
    """
    seconds = timing["total_s"][timing["same_as"].isna()].sort_values()
    whole = [
        str(run) for run in seconds.index if run in rows and rows[run]["start_from"] is None and rows[run]["stopped"] is None
    ]
    if not whole:
        raise UserError("no run of this study starts from the base model. Name one with --run, or use --no-run.")
    learnt = [run for run in whole if Run(rows[run]).final.mean() - rows[run]["start"].mean() > 2 * TOLERANCE] or whole
    return random.choice(learnt[: math.ceil(SHORT * len(learnt))])


def _prepare(there: Path, run: str) -> None:
    """Link to the project's files from another folder, in which a run finds its inputs, and no results of runs."""
    outputs = {path.name for path in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING, paths.STATE)}
    own = {paths.RUNS.parent.name, paths.REPORTS.name, ".git", ".dvc"}
    links = [path for path in Path().iterdir() if path.name not in own]
    data = [path for path in paths.RUNS.parent.glob("*") if path.name not in outputs]
    links += [entry for path in data for entry in (path.iterdir() if path.is_dir() else [path])]
    links += [path for path in paths.CHECKPOINTS.glob("*") if path.name != run.split("/")[0]]
    shutil.copytree(paths.REPORTS, there / paths.REPORTS)  # the stages that make inputs write there too
    for path in links:
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).symlink_to(path.absolute())


def _grpo(there: Path, *arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DVC_")}
    environment |= {"PYTHONPATH": str(paths.ROOT), "MLFLOW_TRACKING_URI": NOWHERE}
    command = [sys.executable, "-m", "grpo", *arguments]
    done = subprocess.run(command, cwd=there, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"grpo {' '.join(arguments)}: it failed: {done.stderr.strip()[-500:]}")


# ------------------------------------------------------------------------------------------------------------- text


def report(found: dict[str, Any]) -> str:
    """Write what :func:`verify` found in words."""
    return render("verify.txt.j2", found=found, shown=SHOWN, tolerance=TOLERANCE).removesuffix("\n")


def failed(found: dict[str, Any]) -> bool:
    """Whether something differs that should not."""
    return bool(found["differences"] or (found["rerun"] and not found["rerun"]["agrees"]))
