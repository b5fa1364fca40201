"""Commands for the stages of dvc.yaml. Each imports heavy modules inside, so that `--help` and usage errors are fast."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, files_digest, note_that_off, write_json
from grpo.common.records import read_problems
from grpo.study import paths
from grpo.study.config import SampledTraces, require_known
from grpo.study.effective import effective_run, read_selections, require_experiment
from grpo.study.kept import drop_former_stages, keep_until_all_stored, remove_stored
from grpo.study.schema import ALL_SEEDS, Study, load_study
from grpo.study.training_inputs import require_recorded_inputs, write_training_inputs
from grpo.tracking.mlflow_uri import tracking_uri
from grpo.training.own_code import require_own_code_of_all

TaskName = Annotated[str, typer.Argument(help="Name under `tasks:` in params.yaml, such as main.")]
Experiment = Annotated[str, typer.Argument(help="Name under `experiments:` in params.yaml, such as grpo_learning_rate.")]

File = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Take the problems from a file (JSONL, JSON, CSV, Parquet) with MATH's rows, GSM8K's, or the columns question and "
        "answer; results go to data/evaluations/, not to the report.",
    ),
]


def named_file(key: Annotated[str, typer.Argument(help="Key under `named_files:` in stages.yaml, such as main-0.")]) -> None:
    """Record the digest of a file or folder that the study names, on which its task's stages depend."""
    named = load_study().named_files
    require_known("named_files", "no entry for", key, named)
    write_json(paths.NAMED_FILES / f"{key}.json", {named[key]: files_digest(Path(named[key]))})


def model(task: TaskName) -> None:
    """Pretrain, download or copy the model that a task's runs start from (data/model/TASK)."""
    study = load_study()
    study.task(task)  # a wrong name fails before torch is imported
    tracking_uri()
    require_own_code_of_all(study)
    from grpo.pretraining.base_model import make_base_model

    make_base_model(study, task)


def dataset(task: TaskName) -> None:
    """Generate or download a task's problems, check them and split them (data/dataset/TASK)."""
    from grpo.tasks.build import build_dataset, longest_prompt
    from grpo.tasks.task import SPLITS

    study = load_study()
    folder, source = paths.DATASETS / task, study.task(task)
    tokenizer = None
    if source.max_prompt_tokens is not None:
        from grpo.models import require_checkpoint
        from grpo.models.checkpoint import load_tokenizer

        require_checkpoint(paths.model(task))
        tokenizer = load_tokenizer(paths.model(task))
    prompt_tokens = partial(longest_prompt, source, study.prompt_formats(task), tokenizer)
    report = build_dataset(source, folder, study.needed_problems(task), prompt_tokens)
    write_json(paths.dataset_report(task), {"task": study.tasks[task]["use"], **report})
    for split in SPLITS:
        if skipped := report.get(f"skipped_in_{split}"):
            print(f"{split}: rows that cannot be used and are skipped: {skipped['rows']}; the first: {skipped['first']}")
        if too_long := report.get(f"dropped_from_{split}_as_too_long"):
            print(f"{split}: {len(too_long)} prompts have more than {source.max_prompt_tokens} tokens and are left out")
    if dropped := report["dropped_from_train_as_overlap"]:
        print(f"train: {len(dropped)} questions are also validation questions and are left out")
    print(f"{folder}: {report['train']['problems']} training and {report['validation']['problems']} validation problems")


def sft_dataset(task: TaskName) -> None:
    """Generate, read or sample responses for supervised fine-tuning on a task, and compute their rewards."""
    from grpo.tasks.sft_dataset import build_sft_dataset, find_traces

    study = load_study()
    require_known("sft_datasets", "no entry for", task, study.sft_datasets)
    target, validation, settings = paths.sft_examples(task), read_problems(paths.validation(task)), study.sft_datasets[task]
    if isinstance(settings, SampledTraces):
        from grpo.evaluation.teacher import sample_sft_dataset

        report = sample_sft_dataset(study, task, settings, validation, target)
    else:
        traces = find_traces(study.task(task), settings, f"sft_datasets.{task}")
        report = build_sft_dataset(study.task(task), settings.source, settings.prompt, traces, validation, target)
    write_json(paths.sft_report(task), report)
    print(f"{target.parent}: {report['examples']} examples, of which {report['correct']} earn the reward")


def math_baseline(file: File = None) -> None:
    """Evaluate the base model zero-shot and count its responses by category (format and answer right or wrong)."""
    study = load_study()
    from grpo.evaluation.evaluator import evaluate_checkpoint, run_math_baseline
    from grpo.results.intervals import format_interval

    prompts = study.evaluation.zero_shot_prompts
    metrics_of = _of_file(study, file, "", prompts, evaluate_checkpoint) if file else run_math_baseline(study)
    for prompt, metrics in metrics_of.items():
        print(f"{prompt}: answer reward {format_interval(metrics['accuracy'])}, {metrics['categories']}")


def best_of_n(file: File = None) -> None:
    """Compute pass@N, Best@N and majority vote of the base model from one set of samples."""
    study = load_study()
    if file is None and "best_of_n" in study.stages_off:  # without torch and the model, which take seconds
        with atomic_folder(paths.BEST_OF_N) as folder:
            note_that_off(folder, "evaluation.best_of_n.prompts")
        write_json(paths.BEST_OF_N_METRICS, {})
        print("evaluation.best_of_n.prompts is [] in params.yaml: no samples")
        return
    from grpo.evaluation.best_of_n import run_best_of_n, sample_checkpoint
    from grpo.results.intervals import format_interval

    prompts = study.evaluation.best_of_n.prompts or study.evaluation.zero_shot_prompts
    metrics_of = _of_file(study, file, "-best_of_n", prompts, sample_checkpoint) if file else run_best_of_n(study)
    for prompt, metrics in metrics_of.items():
        for n, kinds in metrics["n"].items():
            print(f"{prompt}, N = {n}: " + ", ".join(f"{kind} {format_interval(value)}" for kind, value in kinds.items()))


def _of_file(study: Study, file: Path, kind: str, prompts: list[str], measure: Any) -> dict[str, Any]:
    from grpo.evaluation.evaluator import evaluate_file

    folder = paths.EVALUATIONS / f"{file.absolute().parent.name}-{file.stem}{kind}"
    metrics_of = evaluate_file(study, file, folder, prompts, measure)
    print(f"{folder}: every completion")
    return metrics_of


def training_inputs() -> None:
    """Record the settings and code that all runs share, so that DVC repeats the runs when these change."""
    write_training_inputs(load_study())


def train(
    experiment: Experiment,
    arms: Annotated[list[str], typer.Argument(metavar="ARM", help="Arms of the experiment, such as 3e-4.")],
    seed: Annotated[str, typer.Option(help="One of `seeds:` in params.yaml, or all, in turn.")] = ALL_SEEDS,
) -> None:
    """Train arms of an experiment, one run per arm and seed."""
    study = load_study()
    require_experiment(study, experiment)
    selections = read_selections(study, experiment)
    tracking_uri()
    if seed != ALL_SEEDS and not seed.isdecimal():
        raise typer.BadParameter(f"{seed!r} is neither a whole number nor {ALL_SEEDS!r}", param_hint="--seed")
    seeds = study.seeds_of(experiment) if seed == ALL_SEEDS else [int(seed)]
    runs = [effective_run(study, experiment, arm, number, selections) for arm in arms for number in seeds]
    from grpo.training.run import train_run

    require_recorded_inputs(study, experiment)
    for run in runs:
        train_run(study.for_task(run.task), run)
    require_recorded_inputs(study, experiment)
    if seed == ALL_SEEDS:
        for part in [experiment] if study.experiments[experiment].one_stage else [f"{experiment}/{arm}" for arm in arms]:
            keep_until_all_stored(paths.RUN_STATE / part, paths.TIMING / part)


def validation_rewards(experiment: str, arm: str, seed: int) -> str:
    """Describe the validation reward of a finished run over its steps."""
    from grpo.results.runs import read_run

    run = read_run(experiment, arm, seed)
    rewards = ", ".join(f"{reward:.2f} (step {step:.0f})" for step, reward in run.validation[["step", run.column]].to_numpy())
    ended = run.metrics["diverged_step"]
    return f"validation {run.metric.replace('_', ' ')}: {rewards}" + ("" if ended is None else f"; diverged at step {ended}")


def kissing_number() -> None:
    """Check the committed kissing configuration in dimension 11, and search for a larger one if the study says so."""
    study = load_study()
    from grpo.commands.kissing_search import run_kissing_number

    result = run_kissing_number(study)
    if not result:
        print("kissing_number is null in params.yaml: no search")
        return
    searched = f"{result['best_of_search']} points ({result['ended_by']})" if result["strategy"] else "none, without a strategy"
    print(f"search: {searched}; data/kissing_search/program.py: {result['best']} points, from the {result['best_from']}")


def select(experiment: Experiment) -> None:
    """Choose the winner of an experiment; later experiments start from it."""
    from grpo.results.intervals import format_interval
    from grpo.results.selection import select as pick
    from grpo.results.selection import winner_file

    study = load_study()
    require_experiment(study, experiment)
    result = pick(study, experiment)
    winner, leader = result["winner"], result["leader"]
    write_json(paths.CANDIDATES / f"{experiment}.json", result)
    write_json(paths.SELECT / f"{experiment}.json", winner_file(result))
    rival = leader if winner != leader else result["runner_up"]  # the nearest to the winner
    ends = {candidate["arm"]: round(candidate["value"], 4) for candidate in result["candidates"]}
    metrics = {"end": ends[winner], "next": ends.get(rival), "winner": winner, "runner_up": rival}
    write_json(paths.METRICS / f"{experiment}.json", metrics)
    shown = f"{winner}, {format_interval(result)} on the problems that judge"
    print(f"{experiment}: {shown}; on those that select: {result['reason']}")


def kl(experiment: Experiment) -> None:
    """Measure the KL of an experiment's kept checkpoints (`keep_steps`) to the models that their runs started from."""
    study = load_study()
    require_experiment(study, experiment)
    from grpo.evaluation.kl import measure_kl

    for arm, steps in measure_kl(study, experiment)["arms"].items():
        for measured in steps:
            per_token, reward = measured["per_token"], measured["answer_reward"]
            shown = f"{per_token['value']:.4f} ({per_token['low']:.4f} to {per_token['high']:.4f}) nats a token"
            print(f"{arm}, step {measured['step']}: KL to the start {shown}, answer reward {reward['value']:.3f}")


def pass_at_k(experiment: Experiment) -> None:
    """Sample base, middle and end of an experiment's runs (`evaluation.best_of_n.checkpoints`), and compute pass@k."""
    study = load_study()
    require_experiment(study, experiment)
    if experiment not in study.pass_at_k_in:
        raise UserError(f"evaluation.best_of_n.checkpoints: names no arm of {experiment}. Add {experiment}/ARM.")
    from grpo.evaluation.best_of_n import measure_pass_at_k
    from grpo.results.intervals import format_interval

    for arm, measured in measure_pass_at_k(study, experiment).items():
        for place, checkpoint in measured["places"].items():
            shown = ", ".join(f"k = {k} {format_interval(value)}" for k, value in checkpoint["k"].items())
            print(f"{arm}, {place} (step {checkpoint['step']}): {shown}")


def tables() -> None:
    """Write what the study measured: reports/record.json, tables, results.csv, timing.csv and summary.json; arms to MLflow."""
    from grpo.reporting.mlflow_arms import record_arms
    from grpo.reporting.record import write_record
    from grpo.reporting.tables import write_tables
    from grpo.reporting.timing import write_timing

    study = load_study()
    write_tables(study, write_record(study))
    write_timing(study)
    record_arms(study)
    print(f"{paths.RECORD}: what was measured; {paths.TIMING_TABLE}: seconds, ids and machines of the runs")


def figures() -> None:
    """Draw reports/figures/*.svg from the record and the runs; from their times reports/timing.svg and reports/curves."""
    from grpo.reporting.charts import save_figure
    from grpo.reporting.curves import write_curves
    from grpo.reporting.figures import draw_figures
    from grpo.reporting.record import read_record
    from grpo.reporting.timing import draw_timing

    study = load_study()
    draw_figures(study, record := read_record())
    write_curves(study, record)
    save_figure(draw_timing(study), paths.TIMING_FIGURE)
    print(f"{paths.FIGURES}: a figure for each experiment, and those of the study as a whole")


def writeup() -> None:
    """Write the page reports/index.html and reports/writeup.md; remove the entries of former stages from dvc.lock."""
    from grpo.reporting.writeup import write_up

    write_up(load_study())
    print("reports/index.html: open it in a browser; it needs no network")
    remove_stored()
    # This is always the last stage, and runs again after any change of the arms.
    for name in drop_former_stages() if paths.LOCK.exists() else []:
        print(f"dvc.lock: removed the entry of {name}, which is no longer a stage")


def report() -> None:
    """Do the three stages tables, figures and writeup in turn, without DVC."""
    tables()
    figures()
    writeup()


STAGES = (  # in the order in which a study runs them
    *(named_file, model, dataset, sft_dataset, math_baseline, best_of_n, training_inputs, train),
    *(kissing_number, select, kl, pass_at_k, tables, figures, writeup),
)
