"""The sections of the report in Markdown: what the page folds away, and what the write-up links to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.common.files import read_json, read_text
from grpo.reporting.answer import Found
from grpo.reporting.answers.courses import asked_of_courses
from grpo.reporting.discussion import Numbers, said_of_numbers
from grpo.reporting.environment import environments, made_otherwise
from grpo.reporting.form_and_answer import Split
from grpo.reporting.kissing_number import read_report, section
from grpo.reporting.pieces import pieces_of, sft_report
from grpo.reporting.provenance import provenance_of
from grpo.reporting.rollouts import read_samples, sums_hold
from grpo.reporting.sentences import interval, templates
from grpo.reporting.tables import details_table, experiment_table, further_sets_table
from grpo.reporting.timing import time_row, times_of_arms
from grpo.results.claims import PUBLISHED, read_verdicts, shown
from grpo.results.findings import Verdict
from grpo.results.runs import Run, read_baseline, read_best_of_n
from grpo.results.statistics import wilson_interval
from grpo.study import paths
from grpo.study.schema import Study, read_yaml
from grpo.study.settings import MAIN

SAMPLES_SHOWN = 2
Values = dict[str, Any]


def said_of(study: Study, numbers: Numbers, runs: list[Run]) -> list[str]:
    """What is said of an experiment, from its numbers: one sentence on its result, then what else is known of it."""
    pieces = [piece.discuss(study, runs, numbers) for piece in pieces_of(study, numbers["experiment"]) if piece.discuss]
    texts = said_of_numbers(numbers, runs, with_courses=numbers["experiment"] not in asked_of_courses(study))
    return [text for text in (*texts, *pieces) if text]


def markdown_sections(
    study: Study, found: Found, numbers: Mapping[str, Numbers], lock: Values, folded: bool = False
) -> dict[str, str]:
    """File name (without ending) -> Markdown: each experiment, the base model, the claims, how it was measured.

    Links lead out of a folder below reports/.

    Args:
        numbers: of each experiment, as :func:`grpo.reporting.answer.all_numbers` gives them.
        lock: what dvc.lock has of each stage; empty where DVC did not make the results.
        folded: of each experiment only what is folded away, for a page that shows the rest itself.
    """
    environment = templates()
    tables = {path.stem: read_text(path, made_by="report") for path in paths.TABLES.glob("*.md")}

    def filled(template: str, **values: Any) -> str:
        return environment.get_template(f"{template}.md.j2").render(study=study, tables=tables, **values)

    texts = {
        "base_model": filled("base_model", baseline=read_baseline(study), split=Split, sampled=bool(read_best_of_n(study)))
    }
    for name, (runs, _) in found.items():
        texts[name] = filled("experiment", folded=folded, **_experiment(study, numbers[name], runs))
    if study.kissing_number is not None:
        title = "# Scientific discovery: kissing numbers in dimension 11 (`kissing_number`)"
        texts["kissing_number"] = f"{title}\n\n{section(read_report())}\n"
    cited = {source for verdict in verdicts_of(study) for source in verdict.reported or {}}
    texts["claims"] = filled("claims", cited=cited, published=read_yaml(PUBLISHED))
    texts["method"] = filled("method", by_dvc=bool(lock), sections=list(found), **_method(study, found, lock))
    return texts


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


def _experiment(study: Study, numbers: Numbers, runs: list[Run]) -> Values:
    experiment = numbers["experiment"]
    entry, pieces = study.experiments[experiment], pieces_of(study, experiment)
    lead, *more = said_of(study, numbers, runs)
    # Where a step's time goes is told once, in the last of the experiments that it is about.
    in_turns_or_apart = [*study.with_report("colocated"), *study.with_report("staleness")]
    return {
        "n": numbers,
        "lead": lead,
        "more": more,
        "asked": asked_of_courses(study).get(experiment, ""),
        "table": experiment_table(numbers),
        "also": further_sets_table(study, runs),
        "details": details_table(numbers, times_of_arms(study, runs)),
        "note": entry.note,
        "report": entry.report,
        "figures": [piece.figure for piece in pieces if piece.figure],
        "entries": [_entry(study, run) for run in runs] if "leaderboard" in entry.report else [],
        "builds_on": _origins(study, runs),
        "methods": _timing_page("methods.md") if "methods" in entry.report else "",
        "time_breakdown": _timing_page("time_breakdown.md") if experiment in in_turns_or_apart[-1:] else "",
        "samples": before_and_after(numbers) if "samples" in entry.report else [],
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
        "score": interval({"value": run.metrics["full/answer_reward"], "low": low, "high": high}),
        "problems": n,
        "steps": run.metrics["steps"],
        "seconds": time_row(study, run)["seconds"],
        "limit": run.config["config"]["wall_clock_limit_s"]["value"],
        "cut": run.metrics["time_limit_step"] is not None,
    }


def _dataset_report(task: str) -> dict[str, Any]:
    report: dict[str, Any] = read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
    return report


def verdicts_of(study: Study) -> list[Verdict]:
    """The verdicts in reports/claims.json, without those about experiments that the study leaves out."""
    return shown(read_verdicts(), study)


def before_and_after(numbers: Numbers) -> list[Values]:
    """The same problems before and after training, from the stored samples of the winner's first run.

    Those come first whose last answer is right by steps that hold: a right answer may end a wrong sum.
    """
    records = read_samples(numbers["winner"]["runs"][0])
    steps = sorted({record["step"] for record in records})
    last = [record for record in records if record["step"] == steps[-1]]
    best_first = sorted(last, key=lambda record: not (record["answer_reward"] == 1 and sums_hold(record["response"])))
    chosen = [record["problem"] for record in best_first[:SAMPLES_SHOWN]]
    return [
        record for step in (steps[0], steps[-1]) for record in records if record["step"] == step and record["problem"] in chosen
    ]
