"""The sections of the report in Markdown: what the page folds away, and what the write-up links to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.files import read_json, read_text
from grpo.reporting.answer import Found
from grpo.reporting.baseline import discuss_best_of_n
from grpo.reporting.discussion import course, outcome
from grpo.reporting.environment import environments, made_otherwise
from grpo.reporting.kissing_number import read_report, section
from grpo.reporting.pieces import pieces_of, sft_report
from grpo.reporting.provenance import provenance_of
from grpo.reporting.rollouts import read_samples
from grpo.reporting.tables import experiment_table
from grpo.reporting.timing import time_row, times_of_arms
from grpo.results.claims import about_this_study
from grpo.results.runs import Run, read_baseline, read_best_of_n
from grpo.results.statistics import format_interval, wilson_interval
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.sections import MAIN

SAMPLES_SHOWN = 2
Values = dict[str, Any]


def templates(autoescape: bool = False) -> Environment:
    """Those of the report; nothing may be missing in them."""
    return Environment(
        loader=PackageLoader("grpo.reporting"),
        undefined=StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def said_of(study: Study, experiment: str, runs: list[Run], selection: Values) -> list[str]:
    """What is said of an experiment, from its numbers: first which arm leads and by how much, then what the curves did."""
    pieces = [piece.discuss(study, runs, selection) for piece in pieces_of(study, experiment) if piece.discuss]
    return [text for text in (outcome(runs, selection), course(runs, selection), *pieces) if text]


def markdown_sections(study: Study, found: Found, lock: Values, by_dvc: bool, said: Mapping[str, list[str]]) -> dict[str, str]:
    """File name (without ending) -> Markdown: each experiment, the base model, the claims, how it was measured.

    Links lead out of a folder below reports/.

    Args:
        lock: what dvc.lock has of each stage.
        by_dvc: whether the results are those of DVC's stages, so that dvc.lock has their hashes.
        said: of each experiment, as :func:`said_of` says it.
    """
    environment = templates()
    tables = {path.stem: read_text(path, made_by="report") for path in paths.TABLES.glob("*.md")}

    def filled(template: str, **values: Any) -> str:
        return environment.get_template(f"{template}.md.j2").render(study=study, tables=tables, **values)

    texts = {"base_model": filled("base_model", **_base_model(study))}
    texts |= {name: filled("experiment", **_experiment(study, name, *of, " ".join(said[name]))) for name, of in found.items()}
    if study.kissing_number is not None:
        title = "# Scientific discovery: kissing numbers in dimension 11 (`kissing_number`)"
        texts["kissing_number"] = f"{title}\n\n{section(read_report())}\n"
    texts["claims"] = filled("claims", claims=read_claims(study))
    texts["method"] = filled("method", by_dvc=by_dvc, sections=list(found), **_method(study, found, lock))
    return texts


def _base_model(study: Study) -> Values:
    sampled = read_best_of_n(study)
    texts = {prompt: discuss_best_of_n(prompt, values) for prompt, values in sampled.items()}
    return {"baseline": read_baseline(study), "best_of_n": texts}


def _method(study: Study, found: Found, lock: Values) -> Values:
    provenance = [provenance_of(run, lock) for runs, _ in found.values() for run in runs]
    others = sorted({study.experiments[name].task for name in found} - {MAIN})
    return {
        "dataset": _dataset_report(MAIN),
        "other_tasks": {name: _dataset_report(name) for name in others},
        "sft_dataset": sft_report() if any(study.experiments[name].method == "sft" for name in found) else None,
        "left_out": {name: study.title(name) for name in study.left_out},
        "provenance": provenance,
        "environments": environments(provenance),
        "made_otherwise": made_otherwise(provenance),
    }


def _experiment(study: Study, experiment: str, runs: list[Run], selection: Values, said: str) -> Values:
    entry, pieces = study.experiments[experiment], pieces_of(study, experiment)
    # Where a step's time goes is told once, in the last of the experiments that it is about.
    in_turns_or_apart = [*study.with_report("colocated"), *study.with_report("staleness")]
    shown = {
        "name": experiment,
        "title": study.title(experiment),
        "table": experiment_table(runs, selection, times_of_arms(study, runs)),
        "report": entry.report,
        "figures": [piece.figure for piece in pieces if piece.figure],
        "entries": [_entry(study, run) for run in runs] if "leaderboard" in entry.report else [],
        "discussion": said,
        "selection": selection,
        "builds_on": _origins(study, runs),
    }
    return {
        "section": shown,
        "methods": _timing_page("methods.md") if "methods" in entry.report else "",
        "time_breakdown": _timing_page("time_breakdown.md") if experiment in in_turns_or_apart[-1:] else "",
        "samples": before_and_after(selection) if "samples" in entry.report else [],
    }


def _timing_page(name: str) -> str:
    return read_text(paths.TIMING_REPORT / name, made_by="report")


def _origins(study: Study, runs: list[Run]) -> list[str]:
    """Whose winners' values the runs hold, and which arms of a sweep they took theirs from, in the experiments' order."""
    sources = {v["from"] for run in runs for v in run.config["config"].values()}
    chosen = sorted(source for source in sources if source.startswith(("winner of ", "rank ")))
    return [source for name in study.experiments for source in chosen if f" of {name} (" in source]


def _entry(study: Study, run: Run) -> dict[str, Any]:
    """A leaderboard run: its score on the whole validation set, and the time it took."""
    n = run.metrics["full/problems"]
    low, high = wilson_interval(run.metrics["full/answer_reward"] * n, n)
    return {
        "run": run.name,
        "score": format_interval({"value": run.metrics["full/answer_reward"], "low": low, "high": high}),
        "problems": n,
        "steps": run.metrics["steps"],
        "seconds": time_row(study, run)["seconds"],
        "limit": run.config["config"]["wall_clock_limit_s"]["value"],
        "cut": run.metrics["time_limit_step"] is not None,
    }


def _dataset_report(task: str) -> dict[str, Any]:
    report: dict[str, Any] = read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
    return report


def read_claims(study: Study) -> dict[str, Any]:
    """reports/claims.json without the claims about experiments that are left out, and their sources."""
    claims: dict[str, Any] = read_json(paths.CLAIMS, made_by="report", keys=("claims", "notes", "sources"))
    shown = about_this_study(claims["claims"], study.left_out)
    cited = {source for claim in shown for source in claim["reported"]}
    sources = {source: text for source, text in claims["sources"].items() if source in cited}
    return {**claims, "claims": shown, "sources": sources}


def before_and_after(selection: Values) -> list[Values]:
    """The same problems before and after training, from the winner's stored samples."""
    winner = next(c for c in selection["candidates"] if c["arm"] == selection["winner"])
    records = read_samples(winner["runs"][0]["run"])
    steps = sorted({record["step"] for record in records})
    return [record for step in (steps[0], steps[-1]) for record in [r for r in records if r["step"] == step][:SAMPLES_SHOWN]]
