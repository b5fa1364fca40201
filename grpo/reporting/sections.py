"""The sections of the report in Markdown, for the page's folded parts and for reports/sections/."""

from __future__ import annotations

from grpo.common.files import read_json, read_text
from grpo.common.yaml_file import parse_yaml
from grpo.reporting.answers.ablations import asked_of_courses
from grpo.reporting.discussion import Split, result_paragraphs
from grpo.reporting.kissing_number import read_report, section
from grpo.reporting.pieces import discussions, extra_figures, sft_report
from grpo.reporting.provenance import environments, made_otherwise, provenance_of
from grpo.reporting.record import Record, Values
from grpo.reporting.rollouts import before_and_after
from grpo.reporting.sentences import interval, render
from grpo.reporting.tables import details_table, experiment_table, further_sets_table, general_tables, mixture_table
from grpo.reporting.timing import time_row, times_of_arms
from grpo.results.claims import PUBLISHED
from grpo.results.runs import Run
from grpo.results.statistics import wilson_interval
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN


def paragraphs_of(record: Record, experiment: str) -> list[str]:
    """The paragraphs on an experiment; the first is one sentence on its result."""
    with_courses = experiment not in asked_of_courses(record.study)
    texts = result_paragraphs(record.numbers[experiment], with_courses)
    return [text for text in (*texts, *discussions(record, experiment)) if text]


def markdown_sections(record: Record, folded: bool = False) -> dict[str, str]:
    """Make the sections: file name (without ending) -> Markdown. Links are relative to a folder below reports/.

    Args:
        folded: leave out the first part of each experiment, for a page that shows it itself.
    """
    common = {"study": record.study, "tables": general_tables(record)}
    base = {"baseline": record.baseline, "split": Split, "sampled": record.sampled}
    texts = {"base_model": render("base_model.md.j2", **common, **base)}
    for name in record.runs:
        texts[name] = render("experiment.md.j2", **common, folded=folded, **_experiment(record, name))
    if record.study.kissing_number is not None:
        title = "# Scientific discovery: kissing numbers in dimension 11 (`kissing_number`)"
        texts["kissing_number"] = f"{title}\n\n{section(read_report())}\n"
    cited = {source for verdict in record.verdicts for source in verdict.reported}
    texts["claims"] = render("claims.md.j2", **common, cited=cited, published=parse_yaml(PUBLISHED))
    texts["method"] = render("method.md.j2", **common, **_method(record))
    return texts


def _method(record: Record) -> Values:
    study = record.study
    made = [study.experiments[name] for name in record.runs]
    provenance = [provenance_of(run, record.lock) for run in record.all_runs]
    return {
        "by_dvc": bool(record.lock),
        "sections": list(record.runs),
        "dataset": _dataset_report(MAIN),
        "other_tasks": {name: _dataset_report(name) for name in sorted({entry.task for entry in made} - {MAIN})},
        "sft_dataset": sft_report() if any(entry.method == "sft" for entry in made) else None,
        "provenance": provenance,
        "environments": environments(provenance),
        "made_otherwise": made_otherwise(provenance),
    }


def _experiment(record: Record, experiment: str) -> Values:
    study, runs, numbers = record.study, record.runs[experiment], record.numbers[experiment]
    entry = study.experiments[experiment]
    with_steps = [*study.with_report("colocated"), *study.with_report("staleness")]  # the last one shows the seconds of a step
    lead, *more = paragraphs_of(record, experiment)
    return {
        "n": numbers,
        "lead": lead,
        "more": more,
        "asked": asked_of_courses(study).get(experiment, ""),
        "table": experiment_table(numbers),
        "also": further_sets_table(study, runs),
        "mixture": mixture_table(study, runs),
        "details": details_table(numbers, times_of_arms(study, runs)),
        "note": entry.note,
        "report": entry.report,
        "figures": extra_figures(study, experiment),
        "entries": [leaderboard_entry(study, run) for run in runs] if "leaderboard" in entry.report else [],
        "builds_on": _origins(study, runs),
        "methods": _timing_page("methods.md") if shows_methods(study, experiment) else "",
        "time_breakdown": _timing_page("time_breakdown.md") if [experiment] == with_steps[-1:] else "",
        "samples": before_and_after(numbers["winner"]["runs"][0]) if "samples" in entry.report else [],
    }


def shows_methods(study: Study, experiment: str) -> bool:
    """Whether the methods are compared in the experiment's section: expert iteration's, as CS336 asks, if there is one."""
    compared = study.with_report("methods")
    return bool(compared) and experiment == [*study.with_report("expert_iteration"), *compared][0]


def _timing_page(name: str) -> str:
    return read_text(paths.TIMING_REPORT / name, made_by="report")


def _origins(study: Study, runs: list[Run]) -> list[str]:
    """The winners and ranks from which the runs took values, in the order of the experiments."""
    sources = {v["from"] for run in runs for v in run.config["config"].values()}
    chosen = sorted(source for source in sources if source.startswith(("winner of ", "rank ")))
    return [source for name in study.experiments for source in chosen if f" of {name} (" in source]


def leaderboard_entry(study: Study, run: Run) -> Values:
    """The row of a leaderboard run: its score on the whole validation set, and its time."""
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


def _dataset_report(task: str) -> Values:
    return read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
