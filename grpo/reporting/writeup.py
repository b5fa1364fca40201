"""The write-up: every number from a result file, every run named."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo import paths
from grpo.files import read_json, write_text
from grpo.reporting.baseline import discuss_best_of_n
from grpo.reporting.discussion import discuss
from grpo.reporting.results import TITLES, Run, experiments, read_runs, read_selection
from grpo.study import Study, read_yaml

SAMPLES_SHOWN = 2


def write_writeup(study: Study) -> None:
    """Fill templates/writeup.md.j2 and write reports/writeup.md."""
    environment = Environment(
        loader=PackageLoader("grpo.reporting"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sampled = read_json(paths.BEST_OF_N_METRICS, made_by="best_of_n")
    sections = [_section(study, experiment) for experiment in experiments(study)]
    text = environment.get_template("writeup.md.j2").render(
        study=study,
        dataset=read_json(paths.DATASET_REPORT, made_by="dataset"),
        baseline=read_json(paths.BASELINE_METRICS, made_by="math_baseline"),
        tables={path.stem: path.read_text(encoding="utf-8") for path in paths.TABLES.glob("*.md")},
        best_of_n={prompt: discuss_best_of_n(prompt, values) for prompt, values in sampled.items()},
        sections=sections,
        samples=_samples(sections[0]),
        provenance=[row for section in sections for row in section["provenance"]],
    )
    write_text(paths.WRITEUP, text)


def _section(study: Study, experiment: str) -> dict[str, Any]:
    runs, selection = read_runs(study, experiment), read_selection(experiment)
    return {
        "name": experiment,
        "title": TITLES[experiment],
        "table": (paths.TABLES / f"{experiment}.md").read_text(encoding="utf-8"),
        "discussion": discuss(runs, selection),
        "selection": selection,
        "builds_on": [w for w in {v["from"]: None for v in runs[0].config["config"].values()} if w.startswith("winner of")],
        "provenance": [_provenance(run) for run in runs],
    }


def _provenance(run: Run) -> dict[str, Any]:
    """Where a run's numbers come from: MLflow run, commit, and the hash of its results in dvc.lock."""
    stage = f"{run.experiment}@{run.arm}-{run.seed}"
    timing = read_json(paths.TIMING / f"{run.name}.json", made_by=stage)
    lock = read_yaml(paths.LOCK)["stages"].get(stage, {})
    hashes = [out["md5"] for out in lock.get("outs", []) if out["path"] == str(paths.RUNS / run.name)]
    return {
        "run": run.name,
        "same_as": timing["same_as"],
        "mlflow_run_id": timing["mlflow_run_id"] or "not tracked",
        "commit": timing["git_commit"][:10] + (" + changes" if timing["git_changed"] == "true" else ""),
        "lock": hashes[0] if hashes else "not in dvc.lock yet",
        "seconds": timing["total_s"],
        "phases": timing["phases"],
    }


def _samples(section: dict[str, Any]) -> list[dict[str, Any]]:
    """The same problems before and after training, from the winner's stored samples."""
    selection = section["selection"]
    winner = next(c for c in selection["candidates"] if c["arm"] == selection["winner"])
    path = paths.RUNS / winner["runs"][0]["run"] / "rollouts.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = sorted({record["step"] for record in records})
    return [record for step in (steps[0], steps[-1]) for record in [r for r in records if r["step"] == step][:SAMPLES_SHOWN]]
