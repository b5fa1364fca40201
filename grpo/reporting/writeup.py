"""The write-up: every number from a result file, every run named."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.errors import UserError
from grpo.common.files import read_json, read_jsonl, read_text, write_text
from grpo.reporting.baseline import discuss_best_of_n
from grpo.reporting.discussion import discuss
from grpo.reporting.environment import environments, made_otherwise
from grpo.reporting.kissing_number import read_report, section
from grpo.reporting.pieces import pieces_of, sft_report
from grpo.reporting.tables import experiment_table
from grpo.reporting.timing import read_timing, read_timing_file, time_row, times_of_arms
from grpo.results.claims import about_this_study
from grpo.results.runs import Run, experiments, read_baseline, read_best_of_n, read_runs, read_selection
from grpo.results.statistics import format_interval, wilson_interval
from grpo.study import paths
from grpo.study.schema import Study, read_yaml
from grpo.study.sections import MAIN

SAMPLES_SHOWN = 2


def write_writeup(study: Study, by_dvc: bool = True) -> None:
    """Fill templates/writeup.md.j2 and write reports/writeup.md.

    Args:
        by_dvc: whether the results are those of DVC's stages, so that dvc.lock has their hashes.
    """
    environment = Environment(
        loader=PackageLoader("grpo.reporting"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sampled = read_best_of_n(study)
    lock = _stages_in_lock() if by_dvc else {}
    made = experiments(study)
    sections = [_section(study, experiment, lock) for experiment in made]
    provenance = [row for section in sections for row in section["provenance"]]
    # Where a step's time goes is told once, in the last of the experiments that it is about.
    in_turns_or_apart = [*study.with_report("colocated"), *study.with_report("staleness")]
    text = environment.get_template("writeup.md.j2").render(
        study=study,
        dataset=_dataset_report(MAIN),
        baseline=read_baseline(study),
        tables={path.stem: read_text(path, made_by="tables") for path in paths.TABLES.glob("*.md")},
        best_of_n={prompt: discuss_best_of_n(prompt, values) for prompt, values in sampled.items()},
        sft_dataset=sft_report() if any(study.experiments[name].method == "sft" for name in made) else None,
        other_tasks={name: _dataset_report(name) for name in sorted({study.experiments[e].task for e in made} - {MAIN})},
        left_out={name: study.title(name) for name in study.left_out},
        methods=_timing_page("methods.md") if study.with_report("methods") else "",
        time_breakdown=_timing_page("time_breakdown.md") if in_turns_or_apart else "",
        time_breakdown_in=in_turns_or_apart[-1:],
        sections=sections,
        kissing_number=section(read_report()) if study.kissing_number is not None else "",
        claims=_claims(study),
        samples={name: _samples(section) for section in sections if (name := section["name"]) in study.with_report("samples")},
        by_dvc=by_dvc,
        provenance=provenance,
        environments=environments(provenance),
        made_otherwise=made_otherwise(provenance),
    )
    write_text(paths.WRITEUP, text)


def _timing_page(name: str) -> str:
    return read_text(paths.TIMING_REPORT / name, made_by="timing")


def _stages_in_lock() -> dict[str, Any]:
    """What dvc.lock has of each stage."""
    lock = read_yaml(paths.LOCK)
    if not isinstance(lock, dict) or not isinstance(lock.get("stages"), dict):
        raise UserError(f"{paths.LOCK}: holds no stages. Run `git checkout {paths.LOCK}`, or `dvc repro`, which makes it anew.")
    stages: dict[str, Any] = lock["stages"]
    return stages


def _stage(run: str) -> str:
    """The stage that makes the run ``EXPERIMENT/ARM-SEED``."""
    return run.replace("/", "@")


def _section(study: Study, experiment: str, lock: dict[str, Any]) -> dict[str, Any]:
    runs, selection, entry = read_runs(study, experiment), read_selection(experiment), study.experiments[experiment]
    pieces = pieces_of(study, experiment)
    said = [discuss(runs, selection), *(piece.discuss(study, runs, selection) for piece in pieces if piece.discuss)]
    return {
        "name": experiment,
        "title": study.title(experiment),
        "table": experiment_table(runs, selection, times_of_arms(study, runs)),
        "report": entry.report,
        "figures": [piece.figure for piece in pieces if piece.figure],
        "entries": [_entry(study, run) for run in runs] if "leaderboard" in entry.report else [],
        "discussion": " ".join(filter(None, said)),
        "selection": selection,
        "builds_on": _origins(study, runs),
        "provenance": [_provenance(run, lock) for run in runs],
    }


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


def _provenance(run: Run, lock: dict[str, Any]) -> dict[str, Any]:
    """Where a run's numbers come from: MLflow run, commit, and the hash of its results in dvc.lock."""
    own, timing = read_timing_file(run.name), read_timing(run)
    hashes = [out["md5"] for out in lock.get(_stage(run.name), {}).get("outs", []) if out["path"] == str(paths.RUNS / run.name)]
    return {
        "run": run.name,
        "same_as": own["same_as"],
        "mlflow_run_id": own["mlflow_run_id"] or "not tracked",
        "commit": own["git_commit"][:10] + (" + changes" if own["git_changed"] == "true" else ""),
        "lock": hashes[0] if hashes else "not in dvc.lock yet",
        "seconds": timing["total_s"],
        "phases": timing["phases"],
        "software": run.config["software"],
        "hardware": timing["hardware"],
    }


def _dataset_report(task: str) -> dict[str, Any]:
    report: dict[str, Any] = read_json(paths.dataset_report(task), f"dataset@{task}", keys=("task", "train", "validation"))
    return report


def _claims(study: Study) -> dict[str, Any]:
    """reports/claims.json with the sources of those claims only that the report's table holds."""
    claims: dict[str, Any] = read_json(paths.CLAIMS, made_by="claims", keys=("claims", "notes", "sources"))
    cited = {source for claim in about_this_study(claims["claims"], study.left_out) for source in claim["reported"]}
    return claims | {"sources": {source: text for source, text in claims["sources"].items() if source in cited}}


def _sample(record: dict[str, Any]) -> dict[str, Any]:
    columns = ("step", "problem", "prompt", "response", "ground_truth", "reward", "token_entropy")
    return {column: record[column] for column in columns}


def _samples(section: dict[str, Any]) -> list[dict[str, Any]]:
    """The same problems before and after training, from the winner's stored samples."""
    selection = section["selection"]
    winner = next(c for c in selection["candidates"] if c["arm"] == selection["winner"])
    run = winner["runs"][0]["run"]
    records = read_jsonl(paths.RUNS / run / "rollouts.jsonl", _stage(run), _sample)
    steps = sorted({record["step"] for record in records})
    return [record for step in (steps[0], steps[-1]) for record in [r for r in records if r["step"] == step][:SAMPLES_SHOWN]]
