"""`grpo quickstart`, as a newcomer types it: the real command in a fresh folder, with a study small enough for a test."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline_parts import environment, sh
from study_parts import shorten_quickstart
from waiting import wait_for

from grpo.commands.quickstart import FOLDER, OURS
from grpo.study.schema import load_study

EXPERIMENT = "grpo_learning_rate"
STUDY = Path("studies/quickstart.yaml")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with studies/quickstart.yaml, cut down to seconds."""
    (tmp_path / "project/studies").mkdir(parents=True)
    shorten_quickstart(tmp_path / "project" / STUDY)
    return tmp_path / "project"


@pytest.mark.slow
def test_a_newcomer_gets_a_report_of_what_was_measured_and_none_after_ctrl_c(project: Path) -> None:
    done, made = sh(project, "grpo", "quickstart").stdout, project / FOLDER
    assert sorted(path.name for path in project.iterdir()) == ["quickstart", "studies"]
    assert done.splitlines()[-1].endswith("type:  make repro") and "of an earlier quickstart" not in done
    shown = {line.split()[0]: line.split() for line in done.partition("reward before GRPO")[2].splitlines() if line}
    record = json.loads((made / "reports/record.json").read_text())
    reported = {arm["arm"]: arm for arm in record["experiments"][EXPERIMENT]["arms"]}
    assert list(reported) == list(load_study(project / STUDY).experiments[EXPERIMENT].arms)
    for arm, values in reported.items():
        metrics = json.loads((made / f"data/runs/{EXPERIMENT}/{arm}/0/metrics.json").read_text())
        outcomes = (made / f"data/runs/{EXPERIMENT}/{arm}/0/outcomes.jsonl").read_text().splitlines()
        judged = json.loads(outcomes[-1])["answer_reward"][4:]  # the first four of 16 problems select
        last, first = f"{sum(judged) / 12:.3f}", f"{metrics['first/answer_reward']:.3f}"
        assert (f"{values['value']:.3f}", f"{values['start']:.3f}") == (last, first)
        assert (shown[arm][1], shown[arm][5]) == (first, last)
    for path in re.findall(r"^(?:the report|its summary|the runs)\s+(\S+)$", done, flags=re.MULTILINE):
        assert (project / path).exists()
    assert "mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:///quickstart/mlflow.db" in done

    shorten_quickstart(project / STUDY, steps=2000)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "grpo", "quickstart"], cwd=project, env=environment(), **pipes) as process:
        rows = made / f"data/runs/{EXPERIMENT}/{min(reported)}/.0.draft/history.csv"
        wait_for(lambda: rows.exists() or process.poll() is not None, 600)
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "of an earlier quickstart is emptied first" in said
    assert "stopped before it was done. `grpo quickstart` starts from the beginning" in error and "Traceback" not in error
    assert not list(project.rglob("writeup.md*")) and not list(project.rglob("index.html*"))


@pytest.mark.parametrize("existing", ["a folder with files", "a file", "a link"])
def test_what_quickstart_did_not_make_it_does_not_touch(
    existing: str, project: Path, grpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = project.parent / "precious"
    precious.mkdir()
    (precious / "data.txt").write_text("mine")
    if existing == "a folder with files":
        precious = precious.rename(project / FOLDER)
    elif existing == "a file":
        (project / FOLDER).write_text("mine")
    else:
        (precious / OURS).touch()
        (project / FOLDER).symlink_to(precious)
    monkeypatch.chdir(project)
    code, said, error = grpo("quickstart")
    assert code == 2 and said == "" and "already exists and was not made by `grpo quickstart`" in error
    assert ((project / FOLDER) if existing == "a file" else precious / "data.txt").read_text() == "mine"
