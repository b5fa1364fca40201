"""`grpo quickstart`: a small study in its own folder, from nothing to its report.

All stages run in this process, one after the other, without DVC and Snakemake, so that torch is imported only once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from grpo.commands.study import composed_text
from grpo.common.errors import UserError, from_here
from grpo.common.files import exclusive_lock, remove, write_text
from grpo.common.safe_text import without_password
from grpo.study import paths
from grpo.study.compose import study_path
from grpo.study.schema import Study, load_study
from grpo.study.settings import MAIN
from grpo.tracking.mlflow_uri import tracking_uri

STUDY = "quickstart"
FOLDER = Path("quickstart")
OURS = ".made_by_grpo_quickstart"  # marks a folder that may be emptied; also the lock of the process that works there


def quickstart() -> None:
    """Run studies/quickstart.yaml in the folder quickstart/ from the beginning; print progress and results.

    Raises:
        UserError: the folder was not made by a quickstart, or another process works in it.
    """
    began = time.perf_counter()
    path = study_path(STUDY)
    study = load_study(path)
    again = _is_there()
    with exclusive_lock(FOLDER / OURS, f"{FOLDER}: another `grpo quickstart`"):
        print(f"{study.description}\nEverything goes into {FOLDER}/; nothing else is changed. Ctrl-C stops it.", flush=True)
        if again:
            print(f"{FOLDER}/ of an earlier quickstart is emptied first. Equal settings give equal results.")
        for former in FOLDER.iterdir():
            if former.name != OURS:
                remove(former)
        write_text(FOLDER / paths.PARAMS, composed_text(path)[0])
        with chdir(FOLDER):
            _run_stages(study, lambda text: print(f"\n[{_clock(began)}] {text}", flush=True))
            rewards = "\n\n".join(_rewards(study, experiment) for experiment in study.active_experiments)
            tracked = without_password(tracking_uri())
    print(f"\n[{_clock(began)}] Done.\n\n{rewards}\n")
    for what, where in (
        ("the report", str(FOLDER / paths.PAGE)),
        ("its summary", str(FOLDER / paths.WRITEUP)),
        ("the runs", f"{FOLDER / paths.RUNS}/"),
        ("in MLflow", _open_ui(tracked)),
    ):
        print(f"{what:<12}{where}")
    print("\nNext, for the whole study with all its experiments (minutes), type:  make repro")


def _is_there() -> bool:
    """Whether an earlier quickstart left its folder; UserError if something else has its name."""
    there = FOLDER.is_symlink() or FOLDER.exists()
    if there and (FOLDER.is_symlink() or not FOLDER.is_dir() or (any(FOLDER.iterdir()) and not (FOLDER / OURS).is_file())):
        raise UserError(f"{FOLDER}: already exists and was not made by `grpo quickstart`. Move or rename it.")
    return there


def _run_stages(study: Study, announce: Callable[[str], None]) -> None:
    from grpo.commands import stages  # what `dvc repro` calls

    announce("The problems")
    stages.dataset(MAIN)
    announce("The base model, pretrained on generated text")
    stages.model(MAIN)
    announce("The base model before GRPO, under each prompt")
    stages.math_baseline()
    for experiment in study.active_experiments:
        for arm in study.experiments[experiment].arms:
            for seed in study.seeds_of(experiment):
                announce(f"GRPO: arm {arm}, seed {seed}")
                stages.train(experiment, arm, str(seed))
                print(course(experiment, arm, seed))
        stages.select(experiment)
    announce("The report")
    stages.report()


def course(experiment: str, arm: str, seed: int) -> str:
    """Describe the validation answer reward of a finished run over its steps."""
    from grpo.results.runs import read_run

    run = read_run(experiment, arm, seed)
    course = ", ".join(f"{reward:.2f} (step {step:.0f})" for step, reward in run.validation[["step", run.column]].to_numpy())
    ended = run.metrics["diverged_step"]
    return f"validation {run.metric.replace('_', ' ')}: {course}" + ("" if ended is None else f"; diverged at step {ended}")


def _rewards(study: Study, experiment: str) -> str:
    """A table of each arm's answer reward before and after GRPO, with 95% intervals."""
    from grpo.results.intervals import mean_of
    from grpo.results.runs import by_arm, final_scores, first_scores, read_runs

    rows = [("arm", "reward before GRPO", "after it")]
    for arm, runs in by_arm(read_runs(study, experiment)).items():
        rows.append((arm, str(mean_of(first_scores(runs), fixed=True)), str(mean_of(final_scores(runs)))))
    return "\n".join(f"{arm:<12}{first:<26}{last}" for arm, first, last in rows)


def _open_ui(tracked: str) -> str:
    """The command that shows a local MLflow database, or the address of a server."""
    local = tracked.removeprefix("sqlite:///")
    if local == tracked:
        return tracked
    ui = f"{from_here(Path(sys.executable).with_name('mlflow'))} ui --host 127.0.0.1"  # not MLFLOW_HOST, which is a server's
    return f"{ui} --backend-store-uri sqlite:///{from_here(Path(local))}"


def _clock(began: float) -> str:
    minutes, seconds = divmod(int(time.perf_counter() - began), 60)
    return f"{minutes}:{seconds:02}"
