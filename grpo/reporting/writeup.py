"""The write-up: every number from a result file, every run named."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.errors import UserError
from grpo.common.files import read_json, read_jsonl, read_text, write_text
from grpo.reporting.asynchronous import discuss_asynchronous, discuss_colocate
from grpo.reporting.baseline import discuss_best_of_n
from grpo.reporting.discussion import discuss
from grpo.reporting.environment import environments, made_otherwise
from grpo.reporting.fine_tuning import discuss_expert_iteration, discuss_sft
from grpo.reporting.keyword import discuss_keyword
from grpo.reporting.kissing_number import read_report, section
from grpo.reporting.tables import experiment_table
from grpo.reporting.timing import OVER_WALL_CLOCK, read_timing, read_timing_file, time_row, times_of_arms
from grpo.results.claims import about_this_study
from grpo.results.runs import Run, by_arm, experiments, read_baseline, read_best_of_n, read_runs, read_selection
from grpo.results.statistics import format_interval, wilson_interval
from grpo.study import paths
from grpo.study.experiments import ASYNCHRONOUS, COLOCATE, EXPERIMENTS, EXPERT_ITERATION, KEYWORD, SFT, SFT_INITIALIZATION
from grpo.study.schema import MAIN, Study, read_yaml

SAMPLES_SHOWN = 2
BEFORE_AND_AFTER = (SFT, EXPERT_ITERATION, "grpo_learning_rate", KEYWORD)  # experiments of which samples are shown


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
    # Where a step's time goes is told once, in the last of the two experiments that it is about.
    in_turns_or_apart = [name for name in (COLOCATE, ASYNCHRONOUS) if name in made]
    text = environment.get_template("writeup.md.j2").render(
        study=study,
        dataset=_dataset_report(MAIN),
        baseline=read_baseline(study),
        tables={path.stem: read_text(path, made_by="tables") for path in paths.TABLES.glob("*.md")},
        best_of_n={prompt: discuss_best_of_n(prompt, values) for prompt, values in sampled.items()},
        sft_dataset=_sft_report() if SFT in made else None,
        keyword_dataset=_dataset_report("keyword") if KEYWORD in made else None,
        left_out={name: EXPERIMENTS[name] for name in study.left_out},
        methods=_timing_page("methods.md") if SFT_INITIALIZATION in made else "",
        time_breakdown=_timing_page("time_breakdown.md") if in_turns_or_apart else "",
        time_breakdown_in=in_turns_or_apart[-1:],
        sections=sections,
        kissing_number=section(read_report()) if study.kissing_number is not None else "",
        claims=_claims(study),
        leaderboard=[_entry(study, run) for run in read_runs(study, "leaderboard")],
        samples={section["name"]: _samples(section) for section in sections if section["name"] in BEFORE_AND_AFTER},
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
    runs, selection = read_runs(study, experiment), read_selection(experiment)
    return {
        "name": experiment,
        "title": EXPERIMENTS[experiment],
        "table": experiment_table(runs, selection, times_of_arms(study, runs)),
        "over_wall_clock": experiment in OVER_WALL_CLOCK,
        "discussion": " ".join(filter(None, [discuss(runs, selection), *_more(study, experiment, runs, selection)])),
        "selection": selection,
        "builds_on": _origins(runs),
        "provenance": [_provenance(run, lock) for run in runs],
    }


def _more(study: Study, experiment: str, runs: list[Run], selection: dict[str, Any]) -> list[str]:
    """What the handouts ask to be discussed of this experiment in particular."""
    if experiment == SFT:
        return [discuss_sft(runs, study.last_k(experiment), _sft_report())]
    if experiment == EXPERT_ITERATION:
        return [discuss_expert_iteration(runs, selection)]
    if experiment == COLOCATE:
        return [discuss_colocate(runs, study.last_k(experiment))]
    if experiment == ASYNCHRONOUS:
        in_turns = next(iter(by_arm(read_runs(study, COLOCATE)).values()), [])
        return [discuss_asynchronous(runs, study.last_k(experiment), in_turns)]
    return [discuss_keyword(runs, study.last_k(experiment))] if experiment == KEYWORD else []


def _origins(runs: list[Run]) -> list[str]:
    """Whose winners' values the runs hold, and which arms of a sweep they took theirs from, in the experiments' order."""
    sources = {v["from"] for run in runs for v in run.config["config"].values()}
    chosen = sorted(source for source in sources if source.startswith(("winner of ", "rank ")))
    return [source for name in EXPERIMENTS for source in chosen if f" of {name} (" in source]


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


def _sft_report() -> dict[str, Any]:
    report: dict[str, Any] = read_json(
        paths.sft_report(MAIN), made_by=f"sft_dataset@{MAIN}", keys=("examples", "correct", "digest")
    )
    return report


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
