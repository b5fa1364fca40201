"""The command line: one command for each kind of stage, and `study` for the study itself.

Heavy modules are imported inside the commands, so that `--help` and a wrong params.yaml answer at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo.cpu import fix_cpu_kernels, share_cpu_fairly
from grpo.discovery.commands import kissing_app
from grpo.errors import RESUME_ME, ToBeResumed, UserError, explain_os_error
from grpo.paths import workspace

app = typer.Typer(
    help="GRPO with verified rewards as a reproducible study. The stages are run by `dvc repro` or Snakemake; see README.md.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
study_app = typer.Typer(help="Show, check and switch the active study (params.yaml).", no_args_is_help=True)
app.add_typer(study_app, name="study")
app.add_typer(kissing_app, name="kissing")

Experiment = Annotated[str, typer.Argument(help="A name under `experiments:` in params.yaml, such as grpo_learning_rate.")]


@app.command("quickstart")
def quickstart() -> None:
    """A first look, in about 2 minutes on two cores: pretrain a small model, train it by GRPO at two learning rates, report.

    It runs studies/quickstart.yaml and puts everything into the folder quickstart/, which it empties first if it made it;
    the project's own study, data and reports stay as they are. It needs neither a GPU nor a network.
    """
    from grpo.quickstart import quickstart as run_it

    try:
        run_it()
    except (KeyboardInterrupt, ToBeResumed):
        print("\nended before it was done; `grpo quickstart` starts afresh", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command("model")
def model() -> None:
    """Stage: pretrain, download or copy the base model into data/model."""
    from grpo.study import load_study

    study = load_study()
    from grpo.training.base_model import make_base_model

    make_base_model(study)


@app.command("dataset")
def dataset() -> None:
    """Stage: generate or download the problems, check and split them into data/dataset."""
    from grpo.study import load_study
    from grpo.tasks.build import build_dataset

    report = build_dataset(load_study())
    print(f"data/dataset: {report['train']['problems']} training and {report['validation']['problems']} validation problems")


@app.command("sft_dataset")
def sft_dataset() -> None:
    """Stage: generate or read reasoning traces for supervised fine-tuning, and reward each of them."""
    from grpo.study import load_study
    from grpo.tasks.sft_dataset import build_sft_dataset

    report = build_sft_dataset(load_study())
    print(f"data/sft_dataset: {report['examples']} examples, of which {report['correct']} earn the reward")


@app.command("keyword_model")
def keyword_model() -> None:
    """Stage: pretrain the project's own Transformer for the keyword task, into data/keyword/model."""
    from grpo.study import load_study

    study = load_study()
    from grpo.training.base_model import make_keyword_model

    make_keyword_model(study)


@app.command("keyword_dataset")
def keyword_dataset() -> None:
    """Stage: prompts of the keyword task with answers that hold all keywords, in two splits."""
    from grpo.study import load_study
    from grpo.tasks.keyword_dataset import build_keyword_dataset

    report = build_keyword_dataset(load_study())
    print(f"data/keyword/dataset: {report['train']['examples']} and {report['validation']['examples']} examples")


@app.command("math_baseline")
def math_baseline() -> None:
    """Stage: zero-shot evaluation of the base model, by outcome category."""
    from grpo.study import load_study

    study = load_study()
    from grpo.evaluation.statistics import format_interval
    from grpo.evaluation.zero_shot import run_math_baseline

    for prompt, metrics in run_math_baseline(study).items():
        print(f"{prompt}: answer reward {format_interval(metrics['accuracy'])}, {metrics['categories']}")


@app.command("best_of_n")
def best_of_n() -> None:
    """Stage: pass@N, Best@N and majority vote of the base model, from one set of samples."""
    from grpo.study import load_study

    study = load_study()
    from grpo.evaluation.sampled import run_best_of_n
    from grpo.evaluation.statistics import format_interval

    for prompt, metrics in run_best_of_n(study).items():
        for n, kinds in metrics["n"].items():
            print(f"{prompt}, N = {n}: " + ", ".join(f"{kind} {format_interval(value)}" for kind, value in kinds.items()))


@app.command("evaluate")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder, such as data/checkpoints/EXPERIMENT/ARM-SEED.")],
    out: Annotated[Path, typer.Option(help="Folder for PROMPT.jsonl and PROMPT_examples.md.")],
    prompt: Annotated[str, typer.Option(help="r1_zero or question_only; keyword for the keyword task.")] = "r1_zero",
    problems: Annotated[int | None, typer.Option(min=1, help="How many validation problems; all, if not given.")] = None,
) -> None:
    """Evaluate any checkpoint on the study's validation problems; killed and started again, it goes on where it was."""
    from grpo.study import load_study

    study = load_study()
    from grpo.evaluation.checkpoint import evaluate_any
    from grpo.evaluation.statistics import format_interval

    metrics = evaluate_any(study, checkpoint, prompt, problems, out)
    print(f"{prompt}: answer reward {format_interval(metrics['accuracy'])}, {metrics['categories']}")
    print(f"{out / f'{prompt}.jsonl'}: every completion; {out / f'{prompt}_examples.md'}: examples to read")


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="A PROMPT.jsonl that `grpo evaluate` or `math_baseline` wrote.")],
    second: Annotated[Path, typer.Argument(help="Another one, on the same problems.")],
) -> None:
    """Difference in answer reward of two evaluations on the same problems, with a paired bootstrap interval."""
    from grpo.evaluation.compare import compare_files

    print(compare_files(first, second))


@app.command("doctor")
def doctor() -> None:
    """Check GPUs and their memory, torch, vLLM, disk and Hub for the active study; exit code 2 where something is missing."""
    from grpo.study import load_study

    study = load_study()
    from grpo.doctor import examine, report

    findings = examine(study)
    print(f"study {study.study}\n{report(findings)}")
    if any(finding.good is False for finding in findings):
        raise typer.Exit(2)


@app.command("training_inputs")
def training_inputs() -> None:
    """Stage: note the settings and the code that all runs share, so that they run again when these change."""
    from grpo.inputs import write_training_inputs
    from grpo.study import load_study

    write_training_inputs(load_study())


@app.command("train")
def train(
    experiment: Experiment,
    arm: Annotated[str, typer.Argument(help="One of the experiment's arms.")],
    seed: Annotated[int, typer.Option(help="One of `seeds:` in params.yaml.")] = 0,
    check_weights: Annotated[
        bool, typer.Option("--check-weights", help="With vLLM: stop if engine and policy ever hold different weights.")
    ] = False,
) -> None:
    """Stage: one run, that is one arm of an experiment with one seed."""
    from grpo.effective import effective_run, require_experiment
    from grpo.experiments import KEYWORD
    from grpo.selection import read_selections
    from grpo.study import load_study

    study = load_study()
    require_experiment(study, experiment)
    study = study.on_cpu() if experiment == KEYWORD else study
    run = effective_run(study, experiment, arm, seed, read_selections(experiment))
    from grpo.training.run import train_run

    train_run(study, run, check_weights)


@app.command("kissing_number")
def kissing_number() -> None:
    """Stage: search for many integer vectors in dimension 11 whose distances are no smaller than their lengths."""
    from grpo.study import load_study

    study = load_study()
    from grpo.discovery.stage import run_kissing_number

    result = run_kissing_number(study)
    if not result:
        print("kissing_number: null in params.yaml, so there is no search")
        return
    found, best = (f"{result[name]} points" for name in ("best_of_search", "best"))
    print(f"the search: {found} ({result['ended_by']}); data/kissing_number/program.py: {best}, from the {result['best_from']}")


@app.command("select")
def select(experiment: Experiment) -> None:
    """Stage: pick an experiment's winner, on which the next experiment builds."""
    from grpo import paths
    from grpo.effective import require_experiment
    from grpo.evaluation.statistics import format_interval
    from grpo.files import write_json
    from grpo.selection import select as pick
    from grpo.selection import winner_file
    from grpo.study import load_study

    study = load_study()
    require_experiment(study, experiment)
    result = pick(study, experiment)
    write_json(paths.CANDIDATES / f"{experiment}.json", result)
    write_json(paths.SELECT / f"{experiment}.json", winner_file(result))
    print(f"{experiment}: {result['winner']}, {format_interval(result)}: {result['reason']}")


@app.command("claims")
def claims() -> None:
    """Stage: judge what published studies reported by what this study measured, into reports/claims.json."""
    from grpo.reporting.claims import write_claims
    from grpo.study import load_study

    write_claims(load_study())


@app.command("timing")
def timing() -> None:
    """Stage: seconds, GPU-hours and curves over wall-clock time, into reports/timing."""
    from grpo.reporting.timing import write_timing
    from grpo.study import load_study

    write_timing(load_study())


@app.command("figures")
def figures() -> None:
    """Stage: draw the figures of every experiment into reports/figures."""
    from grpo.reporting.figures import draw_figures, write_empty_curves
    from grpo.study import load_study

    study = load_study()
    draw_figures(study)
    write_empty_curves(study)


@app.command("tables")
def tables() -> None:
    """Stage: write the tables, and reports/summary.json for `dvc metrics`."""
    from grpo.reporting.tables import write_tables
    from grpo.study import load_study

    write_tables(load_study())


@app.command("writeup")
def writeup() -> None:
    """Stage: write reports/writeup.md from the results, and take former stages out of dvc.lock."""
    from grpo.dvc_lock import drop_former_stages
    from grpo.reporting.writeup import write_writeup
    from grpo.study import load_study

    write_writeup(load_study())
    # The last stage does this, as it runs whichever way the study was started, and again after any change of the arms.
    for name in drop_former_stages():
        print(f"dvc.lock: {name} is no stage any more; its entry is removed")


@app.command("mlflow_import")
def mlflow_import(
    files: Annotated[list[Path] | None, typer.Argument(help="Files in data/state/mlflow; all, if not given.")] = None,
) -> None:
    """Deliver to MLflow what runs kept on disk because they could not reach it; files that are delivered are removed."""
    from grpo import paths
    from grpo.mlflow_unsent import import_files
    from grpo.tracking import tracking_uri

    found = files or sorted(paths.UNSENT_METRICS.glob("*.jsonl"))
    if not found:
        print(f"nothing to import: {paths.UNSENT_METRICS} holds no files")
    for line in import_files(found, tracking_uri()):
        print(line)


@study_app.command("list")
def study_list() -> None:
    """The studies at hand; the active one is marked."""
    from grpo.switch import list_studies

    for line in list_studies():
        print(line)


@study_app.command("check")
def study_check() -> None:
    """Validate params.yaml and show each run's effective configuration as far as it is known."""
    from grpo.study import load_study
    from grpo.switch import describe

    print(describe(load_study()))


@study_app.command("use")
def study_use(
    name: Annotated[str, typer.Argument(help="A name in studies/, or a path to a study file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
) -> None:
    """Make a study the active one: validate it, say what changes, and write params.yaml."""
    from grpo.switch import use

    for line in use(name, dry_run):
        print(line)


def main() -> None:
    """Run the command line; a user's mistake, or what the disk refuses, becomes one message and exit code 2."""
    fix_cpu_kernels()
    share_cpu_fairly()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a scheduler may have had it ignored, so that DVC outlives it
    # Imports make objects that stay; looking through them for garbage again and again is a fifth of a stage's start.
    gc.set_threshold(100_000, 20, 20)
    try:
        app()
    except ToBeResumed as stop:
        print(stop, file=sys.stderr)
        sys.exit(RESUME_ME)
    except Exception as error:
        message = explain_os_error(error) or (str(error) if isinstance(error, UserError) else None)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def use_this_copys_code() -> None:
    """In an experiment of DVC that runs in a copy of the project, start again with the copy's code.

    The installed command finds the workspace's, which may have changed since the experiment was queued.
    """
    here, path = Path.cwd(), os.environ.get("PYTHONPATH", "")
    if workspace() != here and str(here) not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), path)))
        os.execv(sys.executable, [sys.executable, "-m", "grpo", *sys.argv[1:]])


def entry() -> None:
    """What the command `grpo` calls: :func:`main`, and then an end without taking torch apart, which would take a second."""
    use_this_copys_code()
    try:
        main()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
