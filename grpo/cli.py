"""The command line."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# What imports torch is imported inside the commands, so that `--help` and an error in params.yaml answer at once.
from grpo.commands.init import init
from grpo.commands.stages import STAGES, report
from grpo.commands.study import study_app
from grpo.common.errors import RESUME_ME, ToBeResumed, UserError, explain_out_of_memory, own_errors, reason
from grpo.common.process import fix_cpu_kernels, share_cpu_fairly
from grpo.common.safe_text import hide_secrets, on_terminal
from grpo.study import paths
from grpo.study.compose import study_path
from grpo.study.schema import load_study
from grpo.study.training_inputs import unchanged_inputs
from grpo.training.own_code import require_own_code_of_all

START, STUDY, TOOLS = "Start here", "Study", "Tools"
# Of `grpo run` and `grpo evaluate`.
OF_MODEL = "Model to start from: a Hugging Face folder, a GGUF file, or a model on the Hub at a commit (40 hex digits)."
OF_TASK = (
    "A task of the package (math, gsm8k, arithmetic, ...), your own class, or a file (JSONL, JSON, CSV, Parquet) with the "
    "columns question and answer. The last tenth of a file is used for validation."
)
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a value by its key in params.yaml, e.g. engine.name=vllm."),
]
Values = Annotated[
    str,
    typer.Option("--study", help="Study with all values that no option sets: a name in studies/ or a file, such as math-24gb."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the same as JSON.")]


def _print(text: str | None, **_: object) -> None:
    """Print what a command returns."""
    if text is not None:
        print(on_terminal(text))


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; its own way to end is typer.Exit, so SystemExit comes from the study's code."""
        with own_errors("the study's own code", only_exits=True), unchanged_inputs():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    result_callback=_print,
    help="GRPO with verified rewards as a reproducible study. `make repro` runs the whole study; see README.md.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"grpo-study {version('grpo-study')}")
        raise typer.Exit


@app.callback()
def _options(
    show: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


@app.command("quickstart", rich_help_panel=START)
def quickstart(
    real: Annotated[bool, typer.Option("--real", help="Train SmolLM2-135M-Instruct in the folder real/: 7 minutes.")] = False,
) -> None:
    """Pretrain a small model, train it with GRPO at two learning rates and write a report: 2 minutes on 2 cores.

    Runs studies/quickstart.yaml in the folder quickstart/, which it empties
    first if an earlier quickstart made it. Your own study, data and reports
    stay as they are. Needs neither a GPU nor a network; with --real, the
    package index and 6 GB of memory.
    """
    from grpo.commands.quickstart import REAL, STUDY
    from grpo.commands.quickstart import quickstart as run_it

    try:
        run_it(REAL if real else STUDY)
    except (KeyboardInterrupt, ToBeResumed):
        print("\nquickstart: stopped before it was done. `grpo quickstart` starts from the beginning.", file=sys.stderr)
        raise typer.Exit(130) from None


app.command("init", rich_help_panel=START, epilog="Example: grpo init my-project && make -C my-project repro")(init)


@app.command(
    "run",
    rich_help_panel=START,
    epilog="Example: grpo run --model my-model --task mine.jsonl --set grpo.learning_rate=1e-5 --out runs/try",
)
def run(
    out: Annotated[Path, typer.Option(help="New folder for the run: results, settings, checkpoints and saved state.")],
    model: Annotated[str | None, typer.Option(metavar="FOLDER|FILE.gguf|OWNER/NAME@REVISION", help=OF_MODEL)] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME|MODULE:CLASS|FILE", help=OF_TASK)] = None,
    settings: Set = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    study: Values = "base",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
) -> None:
    """Train one model on one task with GRPO and plot its curves; needs neither DVC nor a study file.

    The loop and the numbers are those of a study's run with the same values.
    The run is sent to MLflow if MLFLOW_TRACKING_URI is set.
    """
    from grpo.commands.one_run import RunOptions, one_run

    one_run(RunOptions(model, task, tuple(settings or ()), seed, study), out, resume)


@app.command("doctor", rich_help_panel=START)
def doctor() -> None:
    """Check this machine against the active study: GPUs, their memory, vLLM, disk, model, data. Exit code 2: it lacks some."""
    study = load_study()
    require_own_code_of_all(study)
    from grpo.commands import doctor

    findings = doctor.examine(study)
    print(on_terminal(f"study {study.study}\n{doctor.report(findings)}"))
    if any(finding.good is False for finding in findings):
        raise typer.Exit(2)


@app.command("plan", rich_help_panel=STUDY, epilog="Example: grpo plan math-h100")
def plan(
    name: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="Name in studies/ or path of a study file; default: params.yaml.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU-hour; default: a guess by card.")] = None,
    seconds_per_step: Annotated[
        float | None, typer.Option(min=0, help="Seconds of a GRPO step with the study's default values; replaces the cards.")
    ] = None,
    as_json: Json = False,
) -> str:
    """Estimate what a study takes and what it can see before you run it: runs, steps, GPU-hours, cost, and power by claim."""
    from grpo.commands.estimate import plan as make_plan
    from grpo.commands.estimate import table

    study = load_study(study_path(name)) if name else load_study()
    require_own_code_of_all(study)
    estimate = make_plan(study, seconds_per_step, price)
    return json.dumps(estimate, indent=2) if as_json else table(estimate)


@app.command("replicate", rich_help_panel=STUDY, epilog="Example: grpo replicate 10 11 12 13 14")
def replicate(
    seeds: Annotated[list[int], typer.Argument(help="Seeds that the study has not used. Few decide few claims.")],
    base_seed: Annotated[int | None, typer.Option(help="Also make base models and problems anew, with this seed.")] = None,
) -> str:
    """Run the active study again with other seeds in replicates/ and compare the results (reports/replication.md)."""
    from grpo.commands.replicate import replicate as run_it

    return run_it(seeds, base_seed)


@app.command("verify", rich_help_panel=STUDY, epilog="Example: grpo verify --no-run")
def verify_study(
    run: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT/ARM/SEED", help="Train this run again; default: a short one is drawn.")
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Train no run again.")] = False,
    as_json: Json = False,
) -> None:
    """Check the active study's report: compute it again from its runs' scores, and train one run again.

    Every number of record.json, tables, write-up and page in reports/ must
    follow from reports/outcomes.csv, which git stores, and from data/ if it is
    there. The run must come out bit for bit, or on another kind of processor
    within a tolerance. Exit code 1 if something differs.
    """
    from grpo.commands import verify

    study = load_study()
    require_own_code_of_all(study)
    result = verify.verify(study, run, not no_run)
    print(json.dumps(result, indent=2) if as_json else on_terminal(verify.report(result)))
    if verify.failed(result):
        raise typer.Exit(1)


for stage in STAGES:
    app.command(stage.__name__, rich_help_panel="Stages (run by `dvc repro` and Snakemake)")(stage)
app.command("report", rich_help_panel=TOOLS)(report)


@app.command("evaluate", rich_help_panel=TOOLS, epilog="Example: grpo evaluate my-model --out evaluations/my-model")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder, such as data/checkpoints/EXPERIMENT/ARM/SEED/best.")],
    out: Annotated[Path, typer.Option(help="Folder for PROMPT.jsonl and PROMPT_examples.md.")],
    task: Annotated[
        str,
        typer.Option(metavar="NAME|MODULE:CLASS|FILE", help="Name under `tasks:` in params.yaml; or your own class or file."),
    ] = "main",
    prompt: Annotated[
        str | None, typer.Option(help="Prompt format of the task, such as r1_zero; default: grpo.prompt, or the task's first.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Number of validation problems; default: all.")] = None,
    settings: Set = None,
    study_name: Values = "base",
) -> str:
    """Evaluate a checkpoint on a task's validation problems, or on all of a file (--set, --study: as for `grpo run`)."""
    from grpo.commands.one_run import study_and_problems

    study, task, asked = study_and_problems(checkpoint, task, settings or [], problems, study_name)
    from grpo.evaluation.evaluator import evaluate_any
    from grpo.results.intervals import format_interval

    formats = study.task(task).formats
    prompt = prompt or (study.grpo.prompt if study.grpo.prompt in formats else next(iter(formats)))
    metrics = evaluate_any(study, checkpoint, task, prompt, asked, out)
    own = f"reward {metrics['reward']:.3f}, " if study.metric == "reward" else ""
    return (
        f"{prompt}: {own}answer reward {format_interval(metrics['accuracy'])}, {metrics['categories']}\n"
        f"{out / f'{prompt}.jsonl'}: every completion; {out / f'{prompt}_examples.md'}: examples to read"
    )


@app.command("publish", rich_help_panel=TOOLS, epilog="Example: grpo publish grpo_learning_rate/3e-4/0 --license apache-2.0")
def publish(
    run: Annotated[str, typer.Argument(metavar="EXPERIMENT/ARM/SEED", help="A finished run of the active study.")],
    kind: Annotated[str, typer.Option(help="Checkpoint to publish: last, or best (by validation answer reward).")] = "best",
    out: Annotated[
        Path | None, typer.Option(help="New or empty folder; default: published/EXPERIMENT--ARM--SEED-KIND.")
    ] = None,
    repo: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Also upload to the Hub (private if new).")] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the weights, such as apache-2.0; default: not stated.")
    ] = None,
) -> str:
    """Copy a run's checkpoint to a folder with a model card made from its results; optionally upload it to the Hub."""
    from grpo.commands.publish import publish as publish_it

    return "\n".join(publish_it(load_study(), run, kind, out, repo, license))


app.add_typer(study_app, name="study", rich_help_panel=STUDY)
kissing_app = typer.Typer(
    help="Verify kissing configurations in dimension 11: many integer vectors, none closer together than long.",
    no_args_is_help=True,
)
app.add_typer(kissing_app, name="kissing", rich_help_panel=TOOLS)


@kissing_app.command("verify")
def verify(
    program: Annotated[Path, typer.Argument(help="Python file with run_code(), get_centers() or a global `points`.")],
    seconds: Annotated[float, typer.Option(min=1, help="Limit of wall-clock and of CPU time, in seconds.")] = 30.0,
    memory_mb: Annotated[int, typer.Option(min=100, help="Limit of memory, in MB.")] = 2000,
) -> None:
    """Run a program in a sandbox and check its points in exact integer arithmetic; exit code 1 if they are not valid."""
    from dataclasses import asdict

    from grpo.discovery.sandbox import Limits
    from grpo.discovery.sandboxed import landlock_version
    from grpo.discovery.verifier import verify_program

    if not landlock_version():
        print("warning: on this system a program can read whatever you may read (no Landlock)", file=sys.stderr)
    verdict = verify_program(program, Limits(seconds=seconds, cpu_seconds=seconds, memory_mb=memory_mb))
    print(json.dumps(asdict(verdict), indent=2))
    if not verdict.validity:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; a user's mistake, a full disk or exhausted memory gives one message and exit code 2."""
    os.environ.pop("MPLBACKEND", None)  # of a notebook, whose backend may be missing here; figures need no screen
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal in Latin-1
    fix_cpu_kernels()
    share_cpu_fairly()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # workflow/with_gpus.py starts DVC with SIGTERM ignored
    try:
        app()
    except ToBeResumed as stop:
        print(on_terminal(stop), file=sys.stderr)
        sys.exit(RESUME_ME)
    except Exception as error:
        message = None if isinstance(error, UserError) else explain_out_of_memory(error)
        of_the_system = isinstance(error, UserError | OSError) or "(os error " in str(error)  # as safetensors writes it
        if message is None and not of_the_system:
            raise
        print(on_terminal(f"error: {hide_secrets(message or reason(error))}"), file=sys.stderr)
        sys.exit(2)


def entry() -> None:
    """Entry point of the command `grpo`: :func:`main` of the working folder's code, if it is a project with this package.

    The installed command has the code of the project that it was installed from. In another clone and in the copy that DVC
    makes for an experiment, dvc.lock would record that code's results as those of the folder's own code.
    """
    own = Path("grpo/cli.py")
    asks_version = sys.argv[1:2] == ["--version"]  # of this one, which runs nothing of a stranger's folder
    if not asks_version and paths.PIPELINE.is_file() and own.is_file() and not own.samefile(__file__):
        only = paths.STATE.absolute() / "code"  # so that nothing else at the project's top, such as torch.py, is found
        only.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (only / "grpo").symlink_to("../../../grpo")
        search_path = os.pathsep.join(filter(None, (str(only), os.environ.get("PYTHONPATH"))))  # for child processes too
        os.execve(sys.executable, [sys.executable, "-P", "-m", "grpo", *sys.argv[1:]], os.environ | {"PYTHONPATH": search_path})
    main()
