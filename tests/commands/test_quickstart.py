"""`grpo quickstart`, as a newcomer types it: the real command in a fresh folder, with a study small enough for a test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pipeline_parts import digests, sh
from study_parts import shorten_quickstart

from grpo.commands.quickstart import FOLDER, OURS
from grpo.study.schema import load_study

EXPERIMENT = "grpo_learning_rate"
STUDY = Path("studies/quickstart.yaml")


def project(folder: Path, pretraining: int = 20, steps: int = 4) -> Path:
    """A folder with studies/quickstart.yaml, cut down to seconds."""
    (folder / STUDY).parent.mkdir(parents=True)
    shorten_quickstart(folder / STUDY, pretraining, steps)
    return folder


@pytest.mark.slow  # twice some 15 s, most of which are imports
def test_a_newcomer_gets_a_report_of_what_was_measured(tmp_path: Path) -> None:
    folder = project(tmp_path)
    done = sh(folder, "grpo", "quickstart")
    made = folder / FOLDER
    assert f"figures/{EXPERIMENT}.svg" in (made / "reports/writeup.md").read_text()
    arms = load_study(folder / STUDY).experiments[EXPERIMENT].arms
    metrics = {arm: json.loads((made / f"data/runs/{EXPERIMENT}/{arm}/0/metrics.json").read_text()) for arm in arms}

    assert sorted(path.name for path in folder.iterdir()) == ["quickstart", "studies"]
    assert done.stdout.splitlines()[-1].endswith("type:  make repro")
    shown = {line.split()[0]: line.split() for line in done.stdout.partition("reward before GRPO")[2].splitlines() if line}
    record = json.loads((made / "reports/record.json").read_text())
    reported = {arm["arm"]: arm for arm in record["experiments"][EXPERIMENT]["arms"]}
    assert list(reported) == list(metrics)
    for arm, values in metrics.items():
        outcomes = (made / f"data/runs/{EXPERIMENT}/{arm}/0/outcomes.jsonl").read_text().splitlines()
        judged = json.loads(outcomes[-1])["answer_reward"][4:]  # the first four of 16 problems select
        last, first = f"{sum(judged) / 12:.3f}", f"{values['first/answer_reward']:.3f}"
        assert (f"{reported[arm]['value']:.3f}", f"{reported[arm]['start']:.3f}") == (last, first)
        assert (shown[arm][1], shown[arm][5]) == (first, last)
    for path in re.findall(r"^(?:the report|its summary|the runs)\s+(\S+)$", done.stdout, flags=re.MULTILINE):
        assert (folder / path).exists()
    assert "mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:///quickstart/mlflow.db" in done.stdout
    page = (made / "reports/index.html").read_text()
    assert f'id="{EXPERIMENT}"' in page and all(f"{EXPERIMENT}/{arm}/0" in page for arm in metrics)

    (made / "notes.txt").write_text("removed")
    before = digests(made)
    again = sh(folder, "grpo", "quickstart")
    assert "of an earlier quickstart is emptied first" in again.stdout and "of an earlier quickstart" not in done.stdout
    assert not (made / "notes.txt").exists() and digests(made) == before
    runs = sh(made, sys.executable, "-c", RUNS_IN_MLFLOW).stdout.split()
    page = (made / "reports/index.html").read_text()
    assert len(runs) == 2 and all(run in page for run in runs), "those of the second time, and only they"


RUNS_IN_MLFLOW = f"""
import mlflow
finished = "status = 'FINISHED' and tags.experiment = '{EXPERIMENT}'"
mlflow.set_tracking_uri("sqlite:///mlflow.db")
print(*mlflow.search_runs(search_all_experiments=True, filter_string=finished).run_id)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["pretraining", "training"])
def test_ctrl_c_leaves_no_report(moment: str, tmp_path: Path) -> None:
    folder = project(tmp_path, *((20, 2000) if moment == "training" else (20000, 4)))
    command = [sys.executable, "-m", "grpo", "quickstart"]
    env = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    begun = {"pretraining": "model/.main.draft", "training": "history.csv"}[moment]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=env, **pipes) as process:
        started = time.monotonic()
        while not list((folder / FOLDER).rglob(begun)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < started + 120, f"{begun} does not come"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped before it was done. `grpo quickstart` starts from the beginning" in error and "Traceback" not in error
    assert not list(folder.rglob("writeup.md*")) and not list(folder.rglob("index.html*"))


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("there", ["a folder with files", "a file", "a link"])
def test_what_quickstart_did_not_make_it_does_not_touch(
    there: str, tmp_path: Path, grpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path / "project")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data.txt").write_text("mine")
    if there == "a folder with files":
        precious = precious.rename(folder / FOLDER)
    elif there == "a file":
        (folder / FOLDER).write_text("mine")
    else:
        (precious / OURS).touch()
        (folder / FOLDER).symlink_to(precious)
    monkeypatch.chdir(folder)
    code, said, told = grpo("quickstart")
    assert code == 2 and said == ""
    assert told.startswith("error: quickstart: already exists and was not made by `grpo quickstart`.")
    assert ((folder / FOLDER) if there == "a file" else precious / "data.txt").read_text() == "mine"
