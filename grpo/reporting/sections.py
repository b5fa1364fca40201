"""The sections of the report in Markdown, for the page's folded parts and for reports/sections/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.common.files import read_json, read_text
from grpo.reporting.answer import Found
from grpo.reporting.answers.courses import asked_of_courses
from grpo.reporting.discussion import Numbers, result_paragraphs
from grpo.reporting.environment import environments, made_otherwise
from grpo.reporting.form_and_answer import Split
from grpo.reporting.kissing_number import read_report, section
from grpo.reporting.pieces import discussions, extra_figures, sft_report
from grpo.reporting.provenance import provenance_of
from grpo.reporting.rollouts import read_samples, sums_hold
from grpo.reporting.sentences import interval, templates
from grpo.reporting.tables import details_table, experiment_table, further_sets_table, mixture_table
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


def paragraphs_of(study: Study, numbers: Numbers, runs: list[Run]) -> list[str]:
    """The paragraphs on an experiment; the first is one sentence on its result."""
    experiment = numbers["experiment"]
    texts = result_paragraphs(numbers, runs, with_courses=experiment not in asked_of_courses(study))
    return [text for text in (*texts, *discussions(study, experiment, runs, numbers)) if text]


def markdown_sections(
    study: Study, found: Found, numbers: Mapping[str, Numbers], lock: Values, folded: bool = False
) -> dict[str, str]:
    """Make the sections: file name (without ending) -> Markdown. Links are relative to a folder below reports/.

    Args:
        numbers: experiment -> :func:`grpo.reporting.discussion.numbers_of`.
        lock: the stages of dvc.lock; empty if DVC did not make the results.
        folded: leave out the first part of each experiment, for a page that shows it itself.
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
    cited = {source for verdict in verdicts_of(study) for source in verdict.reported}
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
    entry = study.experiments[experiment]
    lead, *more = paragraphs_of(study, numbers, runs)
    with_breakdown = [*study.with_report("colocated"), *study.with_report("staleness")][-1:]  # the last of both shows it
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
        "entries": [_entry(study, run) for run in runs] if "leaderboard" in entry.report else [],
        "builds_on": _origins(study, runs),
        "methods": _timing_page("methods.md") if "methods" in entry.report else "",
        "time_breakdown": _timing_page("time_breakdown.md") if experiment in with_breakdown else "",
        "samples": before_and_after(numbers) if "samples" in entry.report else [],
    }


def _timing_page(name: str) -> str:
    return read_text(paths.TIMING_REPORT / name, made_by="report")


def _origins(study: Study, runs: list[Run]) -> list[str]:
    """The winners and ranks from which the runs took values, in the order of the experiments."""
    sources = {v["from"] for run in runs for v in run.config["config"].values()}
    chosen = sorted(source for source in sources if source.startswith(("winner of ", "rank ")))
    return [source for name in study.experiments for source in chosen if f" of {name} (" in source]


def _entry(study: Study, run: Run) -> dict[str, Any]:
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


def _dataset_report(task: str) -> dict[str, Any]:
    report: dict[str, Any] = read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
    return report


def verdicts_of(study: Study) -> list[Verdict]:
    """Read the verdicts on claims about experiments of this study."""
    return shown(read_verdicts(), study)


def before_and_after(numbers: Numbers) -> list[Values]:
    """Samples of the same problems before and after training, from the winner's first run.

    Problems whose last answer is right and whose written sums are correct come first: a right answer may follow a wrong sum.
    """
    records = read_samples(numbers["winner"]["runs"][0])
    steps = sorted({record["step"] for record in records})
    last = [record for record in records if record["step"] == steps[-1]]
    best_first = sorted(last, key=lambda record: not (record["answer_reward"] == 1 and sums_hold(record["response"])))
    chosen = [record["problem"] for record in best_first[:SAMPLES_SHOWN]]
    return [
        record for step in (steps[0], steps[-1]) for record in records if record["step"] == step and record["problem"] in chosen
    ]
