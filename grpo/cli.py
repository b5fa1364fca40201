"""The command line: a command for each kind of stage, `study` for the study itself, and what else a user asks for.

Heavy modules are imported inside the commands, so that `--help` and a wrong params.yaml answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from grpo.commands.kissing_app import kissing_app
from grpo.commands.stages import STAGES
from grpo.common.cpu import fix_cpu_kernels, share_cpu_fairly
from grpo.common.errors import RESUME_ME, ToBeResumed, UserError, explain_os_error, explain_out_of_memory
from grpo.study.paths import workspace


class Kind(StrEnum):
    """The checkpoints that a run keeps."""

    best = "best"
    last = "last"


app = typer.Typer(
    help="GRPO with verified rewards as a reproducible study. The stages are run by `dvc repro` or Snakemake; see README.md.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
study_app = typer.Typer(help="Show, check and switch the active study (params.yaml).", no_args_is_help=True)
app.add_typer(study_app, name="study")
app.add_typer(kissing_app, name="kissing")

for stage in STAGES:
    app.command(stage.__name__)(stage)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"grpo-study {version('grpo-study')}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    pass


@app.command("quickstart")
def quickstart() -> None:
    """A first look, in about 2 minutes on two cores: pretrain a small model, train it by GRPO at two learning rates, report.

    It runs studies/quickstart.yaml and puts everything into the folder quickstart/, which it empties first if it made it;
    the project's own study, data and reports stay as they are. It needs neither a GPU nor a network.
    """
    from grpo.commands.quickstart import quickstart as run_it

    try:
        run_it()
    except (KeyboardInterrupt, ToBeResumed):
        print("\nended before it was done; `grpo quickstart` starts afresh", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command("run", epilog="Example: grpo run --model my-model --task mine.jsonl --set grpo.learning_rate=1e-5 --out runs/try")
def run(
    out: Annotated[Path, typer.Option(help="A new folder for the run: its results, values and saved state.")],
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER|OWNER/NAME@REVISION", help="Where the run starts: a folder, or on the Hub.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MODULE:CLASS|FILE",
            help="math, gsm8k, arithmetic, ...; a class of your own; or rows (JSONL, JSON, CSV, parquet) with the columns "
            "question and answer, of which the last tenth is for validation.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value by its key in params.yaml, such as engine.name=vllm."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the run.")] = 0,
    study: Annotated[
        str, typer.Option(help="Whose values count where no option says otherwise: a name in studies/, or a file.")
    ] = "base",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that OUT holds.")] = False,
) -> None:
    """One GRPO run, from a model and a task to its curves, without DVC and without a study file.

    Its loop and its numbers are those of a study's run with the same values. MLflow has it where MLFLOW_TRACKING_URI is set.
    """
    from grpo.commands.one_run import Asked, one_run

    one_run(Asked(model, task, settings or [], seed, study), out, resume)


@app.command("replicate")
def replicate(
    seeds: Annotated[list[int], typer.Argument(help="Fresh ones, as many as the study has.")],
    base_seed: Annotated[int | None, typer.Option(help="Pretrain the base model and draw the problems anew, too.")] = None,
) -> None:
    """Run the active study again with fresh seeds in replicates/, and write both results to reports/replication.md."""
    from grpo.commands.replicate import replicate as run_it

    print(run_it(seeds, base_seed))


@app.command("evaluate")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder, such as data/checkpoints/EXPERIMENT/ARM/SEED.")],
    out: Annotated[Path, typer.Option(help="Folder for PROMPT.jsonl and PROMPT_examples.md.")],
    task: Annotated[str, typer.Option(help="A name under `tasks:` in params.yaml.")] = "main",
    prompt: Annotated[
        str | None, typer.Option(help="One of the task's formats, such as r1_zero; its first, if not given.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="How many validation problems; all, if not given.")] = None,
) -> None:
    """Evaluate any checkpoint on a task's validation problems; killed and started again, it goes on where it was."""
    from grpo.study.schema import load_study

    study = load_study()
    from grpo.evaluation.evaluator import evaluate_any
    from grpo.results.statistics import format_interval

    prompt = prompt or next(iter(study.task(task).formats))
    metrics = evaluate_any(study, checkpoint, task, prompt, problems, out)
    print(f"{prompt}: answer reward {format_interval(metrics['accuracy'])}, {metrics['categories']}")
    print(f"{out / f'{prompt}.jsonl'}: every completion; {out / f'{prompt}_examples.md'}: examples to read")


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="A PROMPT.jsonl that `grpo evaluate` or `math_baseline` wrote.")],
    second: Annotated[Path, typer.Argument(help="Another one, on the same problems.")],
) -> None:
    """Difference in answer reward of two evaluations on the same problems, with a paired bootstrap interval."""
    from grpo.evaluation.comparison import compare_files

    print(compare_files(first, second))


@app.command("benchmark")
def benchmark(
    checkpoint: Annotated[Path, typer.Argument(help="A folder in Hugging Face format, as for `grpo evaluate`.")],
    task: Annotated[str, typer.Option(help="Of the harness, such as gsm8k, hendrycks_math500, aime24; or a YAML file.")],
    file: Annotated[Path | None, typer.Option(help="Its rows, where the Hub is not at hand: JSONL, parquet or CSV.")] = None,
    shots_file: Annotated[Path | None, typer.Option(help="Rows of the examples in the prompt.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="How many examples; the task's number, if not given.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many problems; all, if not given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a response; the task's number, if not given.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for TASK.md, TASK.json and TASK.jsonl.")] = Path("benchmark"),
) -> None:
    """A task of lm-evaluation-harness on a checkpoint: its number, our grader's on the same responses, where they differ."""
    from grpo.study.schema import load_study

    study = load_study()
    from grpo.commands.benchmark import Asked
    from grpo.commands.benchmark import benchmark as run_it
    from grpo.results.statistics import format_interval

    found = run_it(study, checkpoint, Asked(task, file, shots_file, shots, limit, max_tokens), out)
    for name, accuracy in found["accuracy"].items():
        print(f"{found['task']}: {name}: {format_interval(accuracy)}")
    print(f"{out / found['task']}.md: {len(found['disagreements'])} of {found['problems']} problems on which they differ")


@app.command("doctor")
def doctor() -> None:
    """Check GPUs and their memory, torch, vLLM, disk and Hub for the active study; exit code 2 where something is missing."""
    from grpo.study.schema import load_study

    study = load_study()
    from grpo.commands.doctor import examine, report

    findings = examine(study)
    print(f"study {study.study}\n{report(findings)}")
    if any(finding.good is False for finding in findings):
        raise typer.Exit(2)


@app.command("plan")
def plan(
    name: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="A name in studies/ or a path to a study file; else params.yaml.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, help="Of a GPU-hour.")] = 2.5,
    seconds_per_step: Annotated[
        float | None, typer.Option(min=0, help="Of a GRPO step at the study's defaults, in the place of what was measured.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """What a study would run: runs, steps, GPU-hours, disk and cost of each experiment, and what could be saved."""
    import json

    from grpo.commands.plan import plan as make_plan
    from grpo.commands.plan import table
    from grpo.study.compose import study_path
    from grpo.study.schema import load_study

    found = make_plan(load_study(study_path(name)) if name else load_study(), name is None, seconds_per_step, price)
    print(json.dumps(found, indent=2) if as_json else table(found))


@app.command("publish")
def publish(
    run: Annotated[str, typer.Argument(metavar="EXPERIMENT/ARM/SEED", help="A finished run of the active study.")],
    kind: Annotated[Kind, typer.Option(help="The checkpoint; best is chosen by validation answer reward.")] = Kind.best,
    out: Annotated[
        Path | None, typer.Option(help="An empty or new folder; published/EXPERIMENT--ARM--SEED-KIND by default.")
    ] = None,
    repo: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Also upload to this repository on the Hub.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the weights, such as apache-2.0; not stated, if not given.")] = None,
    artifact: Annotated[str | None, typer.Option(help="Also name the checkpoint so in artifacts/dvc.yaml, for DVC.")] = None,
) -> None:
    """Put a run's checkpoint into a folder with a model card written from its results, and on the Hugging Face Hub if asked."""
    from grpo.commands.publish import Destination
    from grpo.commands.publish import publish as publish_it
    from grpo.study.schema import load_study

    for line in publish_it(load_study(), run, kind.value, Destination(out, repo, license, artifact)):
        print(line)


@app.command("mlflow_import")
def mlflow_import(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders in data/state/mlflow; all, if not given.")] = None,
) -> None:
    """Deliver to MLflow what it lacks of runs, which could not reach it; folders that are delivered are removed."""
    from grpo.study import paths
    from grpo.tracking.mlflow_send import import_folders
    from grpo.tracking.mlflow_uri import tracking_uri

    found = folders or sorted(paths.UNSENT_METRICS.glob("*"))
    if not found:
        print(f"nothing to import: {paths.UNSENT_METRICS} is empty")
    for line in import_folders(found, tracking_uri()):
        print(line)


VERBOSE = Annotated[bool, typer.Option("--verbose", help="Name every value and result, not only how many.")]


@study_app.command("list")
def study_list() -> None:
    """The studies at hand and what each extends; the active one is marked."""
    from grpo.commands.study import list_studies

    for line in list_studies():
        print(line)


@study_app.command("check")
def study_check(
    name: Annotated[str | None, typer.Argument(help="A name in studies/ or a path to a study file; else params.yaml.")] = None,
    verbose: VERBOSE = False,
) -> None:
    """Validate a study, show each run's effective configuration as far as it is known, and say what was changed in it."""
    from grpo.commands.study import check

    print(check(name, verbose))


@study_app.command("use")
def study_use(
    name: Annotated[str, typer.Argument(help="A name in studies/, or a path to a study file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Drop what was changed in params.yaml by hand.")] = False,
    verbose: VERBOSE = False,
) -> None:
    """Make a study the active one: compose and validate it, say what changes, and write params.yaml."""
    from grpo.commands.study import use

    for line in use(name, dry_run, force, verbose):
        print(line)


@study_app.command("runs")
def study_runs() -> None:
    """Write the tables of params.yaml anew by which DVC makes its stages, after an edit of arms, seeds or tasks by hand."""
    from grpo.commands.study import renew_runs

    for line in renew_runs():
        print(line)


@study_app.command("save")
def study_save(name: Annotated[str, typer.Argument(help="Of the new study: studies/NAME.yaml.")]) -> None:
    """Make a study of what was changed in params.yaml by hand: an overlay on the active one."""
    from grpo.commands.study import save

    for line in save(name):
        print(line)


@study_app.command("rehearse")
def study_rehearse(
    name: Annotated[str, typer.Argument(help="A study for GPUs: a name in studies/, or a path to a study file.")],
) -> None:
    """Write NAME-rehearsal.yaml: the study cut down to be tried on a CPU, by small random weights and few steps."""
    from grpo.commands.study import rehearse

    for line in rehearse(name):
        print(line)


@study_app.command("schema")
def study_schema() -> None:
    """Print the JSON Schema of params.yaml and of study files, for editors; studies/study.schema.json holds it."""
    import json

    from grpo.study.json_schema import study_schema as schema

    print(json.dumps(schema(), indent=1))


@study_app.command("show")
def study_show(name: Annotated[str, typer.Argument(help="A name in studies/, or a path to a study file.")]) -> None:
    """Print a study as `grpo study use` would write it into params.yaml."""
    from grpo.commands.study import composed_text
    from grpo.study.compose import study_path

    print(composed_text(study_path(name))[0], end="")


def main() -> None:
    """Run the command line; a user's mistake, a full disk or memory becomes one message and exit code 2."""
    fix_cpu_kernels()
    share_cpu_fairly()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a scheduler may have had it ignored, so that DVC outlives it
    try:
        app()
    except ToBeResumed as stop:
        print(stop, file=sys.stderr)
        sys.exit(RESUME_ME)
    except Exception as error:
        message = explain_os_error(error) or (str(error) if isinstance(error, UserError) else explain_out_of_memory(error))
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
    """What the command `grpo` calls."""
    use_this_copys_code()
    main()
