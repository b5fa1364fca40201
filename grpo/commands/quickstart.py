"""`grpo quickstart`: a small study, or a run of a real language model, in its own folder, from nothing to its report.

All stages run in this process, one after the other, without DVC and Snakemake, so that torch is imported only once.
"""

from __future__ import annotations

import sys
import time
from contextlib import chdir
from pathlib import Path

from grpo.commands import stages  # what `dvc repro` calls
from grpo.commands.study import composed_text
from grpo.common.errors import UserError, from_here
from grpo.common.files import exclusive_lock, remove, write_text
from grpo.common.safe_text import on_terminal, without_password
from grpo.reporting.labels import render
from grpo.study import paths
from grpo.study.compose import study_path
from grpo.study.config import MAIN
from grpo.study.schema import load_study
from grpo.tracking.mlflow_uri import tracking_uri

STUDY, REAL = "quickstart", "real"  # the studies, each with a folder of its name
OURS = ".made_by_grpo_quickstart"  # marks a folder that may be emptied; also the lock of the process that works there


def quickstart(name: str = STUDY) -> None:
    """Run :data:`STUDY` or :data:`REAL` in the folder of its name, from the beginning; UserError if that holds other files."""
    began = time.perf_counter()

    def announce(text: str) -> None:
        minutes, seconds = divmod(int(time.perf_counter() - began), 60)
        print(f"\n[{minutes}:{seconds:02}] {text}", flush=True)

    path, folder = study_path(name), Path(name)
    study = load_study(path)
    again = folder.is_symlink() or folder.exists()
    if again and (folder.is_symlink() or not folder.is_dir() or (any(folder.iterdir()) and not (folder / OURS).is_file())):
        raise UserError(f"{folder}: already exists and was not made by `grpo quickstart`. Move or rename it.")
    with exclusive_lock(folder / OURS, f"{folder}: another `grpo quickstart`"):
        print(f"{study.description}\nEverything goes into {folder}/; nothing else is changed. Ctrl-C stops it.", flush=True)
        if again:
            print(f"{folder}/ of an earlier quickstart is emptied first. Equal settings give equal results.")
        for former in folder.iterdir():
            if former.name != OURS:
                remove(former)
        write_text(folder / paths.PARAMS, composed_text(path)[0])
        with chdir(folder):
            announce("The problems")
            stages.dataset(MAIN)
            origin = getattr(study.models[MAIN], "origin", "pretrained on generated text")
            announce(f"The base model, {origin}")
            stages.model(MAIN)
            announce("The base model before GRPO, under each prompt")
            stages.math_baseline()
            for experiment in study.active_experiments:
                for arm in study.experiments[experiment].arms:
                    for seed in study.seeds_of(experiment):
                        announce(f"GRPO: arm {arm}, seed {seed}")
                        stages.train(experiment, [arm], str(seed))
                        print(stages.validation_rewards(experiment, arm, seed))
                stages.select(experiment)
            announce("The report")
            stages.report()
            from grpo.reporting.record import read_record

            results = render("quickstart.txt.j2", experiments=read_record()["experiments"])
            announce(on_terminal(f"Done.\n\n{results}"))
            tracked = without_password(tracking_uri())
    whole = "make repro" if name == STUDY else "grpo study use smollm2 && make repro"
    print(
        f"the report  {folder / paths.PAGE}\nits summary {folder / paths.WRITEUP}\nthe runs    {folder / paths.RUNS}/\n"
        f"in MLflow   {_open_ui(tracked)}\n\nNext, for the whole study with all its experiments, type:  {whole}"
    )


def _open_ui(tracked: str) -> str:
    """The command that shows a local MLflow database, or the address of a server."""
    local = tracked.removeprefix("sqlite:///")
    if local == tracked:
        return tracked
    ui = f"{from_here(Path(sys.executable).with_name('mlflow'))} ui --host 127.0.0.1"  # not MLFLOW_HOST, which is a server's
    return f"{ui} --backend-store-uri sqlite:///{from_here(Path(local))}"
