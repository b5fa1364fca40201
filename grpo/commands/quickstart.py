"""`grpo quickstart`: a study of one experiment in a folder of its own, from nothing to its report, in this one process.

It calls the stages one after the other, as for so few neither DVC nor Snakemake is needed, and torch is imported only once.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from grpo.commands.study import composed_text
from grpo.common.errors import UserError, from_here
from grpo.common.files import write_text
from grpo.common.lock import only_one
from grpo.study import paths
from grpo.study.compose import study_path
from grpo.study.schema import PARAMS_FILE, Study, load_study
from grpo.study.settings import MAIN
from grpo.tracking.mlflow_uri import tracking_uri, without_password

STUDY = "quickstart"  # in studies/, or the one that comes with the package
FOLDER = Path("quickstart")
OURS = ".made_by_grpo_quickstart"  # only a folder that has it is ever emptied; locked by the process that works in the folder


def quickstart() -> None:
    """Run studies/quickstart.yaml in the folder quickstart/, made anew, and tell how it goes and what it came to.

    Raises:
        UserError: the study makes something else than the one experiment, the folder is not one that this made, or another
            process is at work in it.
    """
    began = time.perf_counter()
    path = study_path(STUDY)
    study = load_study(path)
    experiment = _only_experiment(study, path)
    again = _is_there()
    with only_one(FOLDER / OURS, f"{FOLDER}: another `grpo quickstart`"):
        print(f"{study.description}\nEverything goes into {FOLDER}/, and nothing else is touched. Ctrl-C ends it.", flush=True)
        if again:
            print(f"{FOLDER}/ is from an earlier time: it is emptied, and all is made anew. Equal settings give equal results.")
        _empty()
        write_text(FOLDER / PARAMS_FILE, composed_text(path)[0])
        with chdir(FOLDER):
            _run_stages(study, experiment, lambda text: print(f"\n[{_clock(began)}] {text}", flush=True))
            rewards, tracked = _rewards(study, experiment), without_password(tracking_uri())
    print(f"\n[{_clock(began)}] Done.\n\n{rewards}\n")
    for what, where in (
        ("the report", str(FOLDER / paths.PAGE)),
        ("its summary", str(FOLDER / paths.WRITEUP)),
        ("the runs", f"{FOLDER / paths.RUNS / experiment}/"),
        ("in MLflow", _open_ui(tracked)),
    ):
        print(f"{what:<12}{where}")
    print("\nNext, for the whole study with all its experiments (minutes), type:  make repro")


def _only_experiment(study: Study, path: Path) -> str:
    """The study's one experiment; UserError where it has more to make."""
    if len(study.made) != 1 or study.evaluation.best_of_n.prompts or study.kissing_number is not None:
        raise UserError(
            f"{path}: quickstart makes one experiment alone: give experiments `only: [EXPERIMENT]`, best_of_n `prompts: []`, "
            "and kissing_number null. To make more, copy the file, `grpo study use` the copy, and `make repro`."
        )
    return study.made[0]


def _is_there() -> bool:
    """Whether an earlier quickstart left its folder; UserError where something else has its name."""
    there = FOLDER.is_symlink() or FOLDER.exists()
    if there and (FOLDER.is_symlink() or not FOLDER.is_dir() or (any(FOLDER.iterdir()) and not (FOLDER / OURS).is_file())):
        raise UserError(f"{FOLDER}: is there, and was not made by `grpo quickstart`. Move it away, or give it another name.")
    return there


def _empty() -> None:
    for path in FOLDER.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OURS:
            path.unlink()


def _run_stages(study: Study, experiment: str, announce: Callable[[str], None]) -> None:
    """The study's stages in the working folder, the write-up last, so that there is a report only where all of it is done."""
    from grpo.commands import stages  # what `dvc repro` calls

    announce("The problems")
    stages.dataset(MAIN)
    announce("The base model, pretrained on generated text")
    stages.model(MAIN)
    announce("The base model before GRPO, under each prompt")
    stages.math_baseline()
    for arm in study.experiments[experiment].arms:
        for seed in study.seeds:
            announce(f"GRPO: arm {arm}, seed {seed}")
            stages.train(experiment, arm, str(seed))
            print(course(experiment, arm, seed))
    announce("The report")
    stages.select(experiment)
    stages.report(by_dvc=False)


def course(experiment: str, arm: str, seed: int) -> str:
    """How the answer reward of a finished run of the working folder went."""
    from grpo.results.runs import REWARD, read_run

    run = read_run(experiment, arm, seed)
    course = ", ".join(f"{reward:.2f} (step {step:.0f})" for step, reward in run.validation[["step", REWARD]].to_numpy())
    ended = run.metrics["diverged_step"]
    return f"validation answer reward: {course}" + ("" if ended is None else f"; diverged at step {ended}")


def _rewards(study: Study, experiment: str) -> str:
    """Each arm's answer reward before and after, with 95% intervals."""
    from grpo.results.intervals import mean_of
    from grpo.results.runs import by_arm, first_scores, read_runs, read_selection
    from grpo.results.statistics import format_interval

    after, last_k = read_selection(experiment)["candidates"], study.last_k(experiment)
    before = {arm: mean_of(first_scores(runs), fixed=True) for arm, runs in by_arm(read_runs(study, experiment)).items()}
    rows = [("arm", "reward before GRPO", f"after it (mean of the last {last_k} evaluations)")]
    rows += [(arm["arm"], format_interval(before[arm["arm"]]), format_interval(arm)) for arm in after]
    return "\n".join(f"{arm:<12}{first:<26}{last}" for arm, first, last in rows)


def _open_ui(tracked: str) -> str:
    """The command that shows a local database; the address of a server, where MLFLOW_TRACKING_URI names one."""
    local = tracked.removeprefix("sqlite:///")
    if local == tracked:
        return tracked
    return f"{from_here(Path(sys.executable).with_name('mlflow'))} ui --backend-store-uri sqlite:///{from_here(Path(local))}"


def _clock(began: float) -> str:
    minutes, seconds = divmod(int(time.perf_counter() - began), 60)
    return f"{minutes}:{seconds:02}"
