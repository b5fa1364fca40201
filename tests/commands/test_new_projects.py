"""A newcomer's first commands: `grpo quickstart`, `grpo init`, and the package as a wheel, which brings all that it reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from pipeline_parts import environment, sh
from study_parts import ROOT, shorten_quickstart
from waiting import started, wait_for

from grpo.commands.init import VERSION, init, pipeline
from grpo.commands.quickstart import OURS
from grpo.common.errors import UserError
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
    done, made = sh(project, "grpo", "quickstart").stdout, project / "quickstart"
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
        assert (shown[arm][1], shown[arm][2]) == (first, last)
    for path in re.findall(r"^(?:the report|its summary|the runs)\s+(\S+)$", done, flags=re.MULTILINE):
        assert (project / path).exists()
    assert "mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:///quickstart/mlflow.db" in done

    shorten_quickstart(project / STUDY, steps=2000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started([sys.executable, "-m", "grpo", "quickstart"], cwd=project, env=environment(), **pipes) as process:
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
        precious = precious.rename(project / "quickstart")
    elif existing == "a file":
        (project / "quickstart").write_text("mine")
    else:
        (precious / OURS).touch()
        (project / "quickstart").symlink_to(precious)
    monkeypatch.chdir(project)
    code, said, error = grpo("quickstart")
    assert code == 2 and said == "" and "already exists and was not made by `grpo quickstart`" in error
    assert ((project / "quickstart") if existing == "a file" else precious / "data.txt").read_text() == "mine"


def test_its_stages_are_the_packages_but_for_its_code_and_the_kissing_number() -> None:
    ours = Repo(str(ROOT)).index.stages
    named = {stage.name.partition("@")[0] for stage in ours if stage.cmd}
    of_no_run = {"named_file", "pass_at_k"}  # mini names no file, and no arm to sample
    assert set(pipeline()["stages"]) == named - {"kissing_number"} | of_no_run
    assert not [
        dep for stage in pipeline()["stages"].values() for dep in stage.get("do", stage)["deps"] if dep.startswith("grpo/")
    ]


@pytest.mark.usefixtures("workdir")
def test_a_project_is_a_repository_whose_study_all_of_dvc_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = init(Path("lab"))
    assert said.endswith("git add -A && git commit -m Start  # runs record the commit\n  make repro")
    with pytest.raises(UserError, match="lab: already exists and is not an empty folder"):
        init(Path("lab"))
    monkeypatch.chdir("lab")
    study = load_study()
    assert study.study == "first" and study.active_experiments == ["rewards"] and len(study.seeds) == 3 and study.claims
    stages = {stage.name: stage for stage in Repo().index.stages}
    assert {"train@rewards-exact", "train@rewards-letters", "select@rewards", "writeup"} <= set(stages)
    assert VERSION in {dep.def_path for dep in stages["training_inputs"].deps}
    missing = {dep.def_path for stage in stages.values() for dep in stage.deps if not dep.exists}
    assert all(path.startswith(("data/", "reports/")) for path in missing), missing
    listed = subprocess.run(["git", "status", "--short", "-uall"], capture_output=True, text=True, check=True).stdout
    assert "studies/my_task.py" in listed and "data/" not in listed
    Path("data").mkdir(exist_ok=True)
    Path("data/mine.csv").write_text("asked,solved\n?,1\n")
    Repo().add("data/mine.csv")  # one's own data: git tracks what DVC writes, and not the file itself
    listed = subprocess.run(["git", "status", "--short", "-uall", "data"], capture_output=True, text=True, check=True).stdout
    assert listed.split() == ["??", "data/mine.csv.dvc"]
    targets = subprocess.run(["make"], capture_output=True, text=True, check=True).stdout
    assert "make repro" in targets


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(("exists", "fails", "message"), [(False, True, "no space left"), (True, False, "no program git")])
def test_nothing_is_left_where_git_fails(
    exists: bool, fails: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, git = Path("lab"), tmp_path / "programs/git"
    git.parent.mkdir()
    if exists:
        lab.mkdir()
    if fails:
        git.write_text("#!/bin/sh\necho 'no space left' >&2; exit 1\n")
        git.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(git.parent))
        with pytest.raises(UserError, match=message):
            init(lab)
    assert lab.exists() == exists and not (exists and any(lab.iterdir()))
    (git.parent / "git").unlink(missing_ok=True)
    (git.parent / "git").symlink_to(str(shutil.which("git")))
    with monkeypatch.context() as patched:  # the next attempt, in an environment that is not activated: DVC is found
        patched.setenv("PATH", str(git.parent))
        init(lab)
    assert Path("lab/.dvc/config").exists()


SECRETS = {
    name: f"keep-this-secret-{name}"
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY")
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python in an environment with this one's packages and the project from its wheel."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    wheel = next(tmp_path.glob("grpo_study-*.whl"))
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    in_git = subprocess.run(["git", "ls-files", "grpo"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert set(in_git) - names == set()

    # An environment with this one's packages, but for the project, whose .pth file is not followed there.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    return python


@pytest.mark.slow
def test_a_project_from_the_wheel_runs_to_its_report(python: Path, tmp_path: Path) -> None:
    """Two commands; then an edit of the reward makes the stages stale that depend on it, and no others."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MLFLOW_TRACKING_URI"}} | SECRETS
    env["PATH"] = f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(*command: str, folder: Path = tmp_path / "lab") -> str:
        ran = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "keep-this-secret" not in ran.stdout + ran.stderr
        return ran.stdout

    where = run(str(python), "-P", "-c", "import grpo; print(grpo.__file__)", folder=tmp_path)
    assert where.startswith(str(python.parents[1]))
    install = run(
        str(python), "-P", "-c", "from grpo.common import imports as i; print(i.pip_install('vllm'))", folder=tmp_path
    )
    constraints = install.split()[3]
    assert "torch==" in Path(constraints).read_text() and install == f"pip install -c {constraints} 'grpo-study[vllm]'\n"
    assert "make repro" in run("grpo", "init", "lab", folder=tmp_path)
    file = tmp_path / "lab/studies/first.yaml"
    shorter = {"steps: 1200": "steps: 40", "n_grpo_steps: 40": "n_grpo_steps: 2", "every: 8": "every: 1", "[0, 1, 2]": "[0, 1]"}
    text = file.read_text()
    for long, short in shorter.items():
        assert long in text
        text = text.replace(long, short)
    file.write_text(text)
    run("grpo", "study", "use", "first")
    assert "Done." in run("make", "repro")
    page = (tmp_path / "lab/reports/writeup.md").read_text()
    assert "letters ends above exact by at least 0.05" in page and "(own)" in page
    assert json.loads((tmp_path / "lab/data/training_inputs/rewards.json").read_text())["code"]
    assert "up to date" in run("dvc", "status")
    written = [path for path in (tmp_path / "lab").rglob("*") if path.is_file()]
    assert len(written) > 100 and not [path for path in written if b"keep-this-secret" in path.read_bytes()]

    with (tmp_path / "lab/studies/my_rewards.py").open("a") as rewards:
        rewards.write("\n# edited\n")
    run("dvc", "repro", "training_inputs")
    stale = run("dvc", "status", "--json")
    assert "train@rewards-letters" in stale and "model@main" not in stale and "dataset@main" not in stale
