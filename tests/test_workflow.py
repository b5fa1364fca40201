"""The Snakemake side: the same files and the same dvc.lock as `dvc repro`, whatever happened before.

A toy pipeline of three layers stands in for the study; its stages take no time, DVC and Snakemake about a second each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import load_yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow"))

import plan as workflow_plan  # noqa: E402

WITH_GPUS = ROOT / "workflow" / "with_gpus.py"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc.*")

# `ran.txt` is no output of any stage: it counts what was really run.
DVC_YAML = """
stages:
  source:
    cmd: mkdir -p data && echo ${base} > data/source && echo source >> ran.txt
    params: [base]
    outs: [data/source]
  train:
    matrix: {arm: "${arms}", seed: [0]}
    cmd: >-
      test ${item.arm} != ${broken} && mkdir -p data/runs && grep -Eo '${item.arm}"?: [0-9]+' params.yaml |
      cat data/source - > data/runs/${item.arm}-${item.seed} && echo train-${item.arm} >> ran.txt
    deps: [data/source]
    params: ["scales.${item.arm}"]
    outs: ["data/runs/${item.arm}-${item.seed}"]
    meta: {resources: train}
  report.final-one:
    cmd: cat data/runs/* > report.txt && echo report >> ran.txt
    deps: [data/runs]
    outs:
      - report.txt: {cache: false}
    meta: {resources: small}
"""
PARAMS = """
base: 1
arms: ["1e-4", no_std]
scales: {"1e-4": 2, no_std: 3}
broken: none
resources:
  small: {gpus: 0, cpus: 1, mem_mb: 100, runtime_min: 5}
  train: {gpus: 0, cpus: 64, mem_mb: 100, runtime_min: 5}
"""
ALL = ["report", "source", "train-1e-4", "train-no_std"]


def environment(**extra: str) -> dict[str, str]:
    """The environment of every command: this interpreter's programs first, nothing of the machine's GPUs or Slurm."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SNAKEMAKE_", "DVC_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    git = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t"}
    return {**kept, **git, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "DVC_NO_ANALYTICS": "1", **extra}


def call(repo: Path, *command: str, ok: bool = True) -> str:
    """Run a command in the repository and return all it printed."""
    done = subprocess.run(
        command, cwd=repo, env=environment(DVC_SITE_CACHE_DIR=str(repo / ".dvc" / "site")), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def snakemake(repo: Path, *arguments: str, profile: str = "local", ok: bool = True) -> str:
    """Run `snakemake --profile PROFILE` as a user would."""
    return call(repo, "snakemake", "--profile", profile, *arguments, ok=ok)


def ran(repo: Path) -> list[str]:
    """What ran since the last question."""
    path = repo / "ran.txt"
    lines = sorted(path.read_text().split()) if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def edit(repo: Path, file: str, old: str, new: str) -> None:
    """Replace a piece of a file that must be there."""
    text = (repo / file).read_text()
    assert old in text
    (repo / file).write_text(text.replace(old, new))


def planned(repo: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The plan by stage and the rules that would run, made in this process, which is faster than a dry run."""
    monkeypatch.chdir(repo)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(repo / ".dvc" / "site"))
    workflow_plan.make_plan()
    plan = json.loads((repo / ".stamps" / "plan.json").read_text())
    return {entry["stage"]: entry for entry in plan}, {e["rule"] for e in plan if not (repo / e["stamp"]).exists()}


def lock(repo: Path) -> dict[str, Any]:
    """The stages of dvc.lock."""
    return dict(load_yaml(str(repo / "dvc.lock"))["stages"])


def new_repo(repo: Path) -> Path:
    """The toy pipeline in a new repository, with the project's own workflow folder."""
    repo.mkdir()
    shutil.copytree(ROOT / "workflow", repo / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("local", "slurm"):
        (repo / name).symlink_to((ROOT / name).readlink())
    (repo / "dvc.yaml").write_text(DVC_YAML)
    (repo / "params.yaml").write_text(PARAMS)
    # Were data/ not ignored by git already, DVC would write .gitignore files into it, in the order in which stages end; they
    # would be part of the hash of data/runs.
    shutil.copy(ROOT / ".gitignore", repo / ".gitignore")
    call(repo, "git", "init", "--quiet")
    call(repo, "dvc", "init", "--quiet")
    return repo


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which Snakemake has run everything from scratch. Tests work on copies."""
    repo = new_repo(tmp_path_factory.mktemp("finished") / "repo")
    snakemake(repo)
    return repo


@pytest.fixture
def repo(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished repository, with nothing counted as run yet."""
    copy = tmp_path / "repo"
    shutil.copytree(finished, copy, symlinks=True)
    (copy / "ran.txt").unlink(missing_ok=True)
    return copy


# ------------------------------------------------------------------------------------------------------------ Snakemake


def test_from_scratch_makes_the_same_lock_as_dvc_repro(finished: Path, tmp_path: Path) -> None:
    twin = new_repo(tmp_path / "twin")
    call(twin, "dvc", "repro")
    assert lock(finished) == lock(twin)
    assert (finished / "report.txt").read_text() == (twin / "report.txt").read_text() != ""
    assert sorted((finished / "ran.txt").read_text().split()) == ran(twin) == ALL
    # And each is up to date in the eyes of the other.
    assert "up to date" in call(finished, "dvc", "status")
    assert "Nothing to be done" in snakemake(twin)


def test_second_run_does_nothing(repo: Path) -> None:
    assert "Nothing to be done" in snakemake(repo)
    assert ran(repo) == []
    assert "Running stage 'train@1e-4-0'" in (repo / "logs" / "train@1e-4-0.log").read_text()
    assert (repo / "logs" / "report.final-one.benchmark.tsv").exists()


def test_edit_reruns_the_stale_stage_and_what_follows_and_a_revert_trains_nothing(repo: Path) -> None:
    edit(repo, "params.yaml", '"1e-4": 2', '"1e-4": 5')
    text = snakemake(repo)
    assert ran(repo) == ["report", "train-1e-4"]
    assert "rule train_1e_4_0" in text and "rule train_no_std_0" not in text and "rule source" not in text
    edit(repo, "params.yaml", '"1e-4": 5', '"1e-4": 2')
    snakemake(repo)
    assert ran(repo) == ["report"]  # its output is not cached; the training's comes from the run cache


def test_a_revert_before_any_run_is_nothing(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "params.yaml", "base: 1", "base: 7")
    plan, stale = planned(repo, monkeypatch)
    assert stale == {entry["rule"] for entry in plan.values()}
    edit(repo, "params.yaml", "base: 7", "base: 1")
    assert planned(repo, monkeypatch)[1] == set()


def test_edit_of_one_arm_plans_that_arm_and_the_report(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "params.yaml", '"1e-4": 2', '"1e-4": 5')
    assert planned(repo, monkeypatch)[1] == {"train_1e_4_0", "report_final_one"}


def test_changed_resources_and_removed_stages_make_nothing_stale(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "params.yaml", "train: {gpus: 0, cpus: 64", "train: {gpus: 2, cpus: 7")
    (repo / ".stamps" / "former.done").write_text("of a stage that is no more")
    plan, stale = planned(repo, monkeypatch)
    assert stale == set() and not (repo / ".stamps" / "former.done").exists()
    train = plan["train@1e-4-0"]
    assert (train["gpus"], train["threads"], train["resources"]["cpus_per_gpu"]) == (2, 7, 4)


def test_one_rule_asked_for_brings_back_a_lost_output_and_nothing_else(repo: Path) -> None:
    (repo / "data" / "runs" / "1e-4-0").unlink()
    edit(repo, "params.yaml", "no_std: 3", "no_std: 4")
    snakemake(repo, "train_1e_4_0")
    assert (repo / "data" / "runs" / "1e-4-0").exists()
    assert ran(repo) == []


def test_failure_names_the_log_and_the_other_stages_still_run(repo: Path) -> None:
    edit(repo, "params.yaml", "broken: none", "broken: no_std")
    edit(repo, "params.yaml", "base: 1", "base: 3")
    text = snakemake(repo, ok=False)
    assert "All of it: logs/train@no_std-0.log" in text
    assert "failed to run" in text  # the end of that log is shown
    assert ran(repo) == ["source", "train-1e-4"]


def test_slurm_profile_plans_the_same_jobs(repo: Path) -> None:
    edit(repo, "params.yaml", "base: 1", "base: 2")
    edit(repo, "params.yaml", "train: {gpus: 0, cpus: 64", "train: {gpus: 2, cpus: 8")
    text = snakemake(repo, "--dry-run", profile="slurm")
    assert "rule train_1e_4_0" in text
    train = text[text.index("rule train_1e_4_0") :]
    assert re.search(r"gpu=2, cpus_per_gpu=4, tasks_per_gpu=0", train) and re.search(r"runtime=5\b", train)


def test_unknown_resources_are_refused_with_the_remedy(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "dvc.yaml", "resources: train", "resources: huge")
    with pytest.raises(workflow_plan.PlanError, match=r"has no resources.huge \(it has: small, train\)"):
        planned(repo, monkeypatch)


def test_names_that_would_be_one_rule_are_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "params.yaml", '"1e-4", no_std', '"1e-4", no_std, no-std')
    edit(repo, "params.yaml", "no_std: 3", "no_std: 3, no-std: 3")
    with pytest.raises(workflow_plan.PlanError, match=r"would both be the rule train_no_std_0. Rename one"):
        planned(repo, monkeypatch)


def test_broken_pipeline_is_told_in_dvcs_words(repo: Path) -> None:
    edit(repo, "dvc.yaml", "${base}", "${nowhere}")
    text = snakemake(repo, ok=False)
    assert "DVC cannot read the pipeline" in text and "nowhere" in text and "Traceback" not in text


def test_gpus_that_the_machine_lacks_are_refused_with_the_remedy(repo: Path) -> None:
    edit(repo, "params.yaml", '"1e-4": 2', '"1e-4": 5')
    edit(repo, "params.yaml", "train: {gpus: 0", "train: {gpus: 1")
    text = snakemake(repo, ok=False)
    assert "1 GPU(s) asked for, but this machine offers 0 (none)" in text
    assert ran(repo) == []


def test_killed_snakemake_leaves_no_training_and_the_next_run_finishes(repo: Path) -> None:
    edit(repo, "dvc.yaml", "test ${item.arm} != ${broken}", "touch started-${item.arm} && sleep ${nap}")
    (repo / "params.yaml").write_text(PARAMS + "nap: 54321\n")
    process = subprocess.Popen(
        ["snakemake", "--profile", "local", "--quiet", "all"], cwd=repo, env=environment(), start_new_session=True
    )
    wait_for(lambda: any(repo.glob("started-*")))
    process.kill()
    process.wait()
    wait_for(lambda: not processes_in(repo))
    (repo / ".dvc" / "tmp" / "rwlock").write_text("")  # what DVC leaves if it is killed at the worst moment
    edit(repo, "params.yaml", "54321", "0")
    snakemake(repo, "--unlock")
    snakemake(repo)
    assert ran(repo) == ["train-1e-4", "train-no_std"]  # with the results they had, so that the report is not made again
    assert "up to date" in call(repo, "dvc", "status")


# ------------------------------------------------------------------------------------------------------------ with_gpus


def wait_for(condition: Any, seconds: float = 30) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def processes_in(folder: Path) -> list[str]:
    """Commands of the running processes whose working folder is this one."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def start(folder: Path, count: int, *command: str, **extra: str) -> subprocess.Popen[str]:
    """Start with_gpus.py on a machine with the devices 0 and 1."""
    return subprocess.Popen(
        [sys.executable, str(WITH_GPUS), str(count), "--", *command], cwd=folder, text=True,
        env=environment(**{"CUDA_VISIBLE_DEVICES": "0,1", **extra}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until_released(name: str) -> list[str]:
    """A command that writes the devices it sees to NAME.devices, and ends when NAME.go exists."""
    return ["sh", "-c", f"echo $CUDA_VISIBLE_DEVICES > {name}.tmp; mv {name}.tmp {name}.devices; "
            f"while [ ! -e {name}.go ]; do sleep 0.05; done"]  # fmt: skip


def test_concurrent_commands_get_distinct_devices_and_the_third_waits(tmp_path: Path) -> None:
    first, second = (start(tmp_path, 1, *until_released(name)) for name in "ab")
    wait_for(lambda: len(list(tmp_path.glob("[ab].devices"))) == 2)
    assert {(tmp_path / f"{name}.devices").read_text().strip() for name in "ab"} == {"0", "1"}
    third = start(tmp_path, 2, *until_released("c"))
    (tmp_path / "a.go").touch()
    assert first.wait(30) == 0
    time.sleep(0.5)
    assert not (tmp_path / "c.devices").exists()  # it needs both
    (tmp_path / "b.go").touch()
    (tmp_path / "c.go").touch()
    assert second.wait(30) == third.wait(30) == 0
    assert (tmp_path / "c.devices").read_text().strip() == "0,1"


def test_more_devices_than_exist_are_refused(tmp_path: Path) -> None:
    process = start(tmp_path, 3, "true")
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "3 GPU(s) asked for, but this machine offers 2 (0, 1)" in text and "params.yaml" in text


def test_under_slurm_and_without_gpus_nothing_is_handed_out(tmp_path: Path) -> None:
    under_slurm = start(tmp_path, 2, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="5")
    without = start(tmp_path, 0, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 3")
    assert under_slurm.communicate(timeout=30)[0] == "5\n"
    assert without.communicate(timeout=30)[0] == "0,1\n"
    assert (under_slurm.returncode, without.returncode) == (0, 3)
    assert not (tmp_path / ".stamps").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_leaves_nothing_running_and_frees_its_devices(tmp_path: Path, signum: signal.Signals) -> None:
    # The grandchild would outlive its parent, as a training outlives a killed dvc.
    process = start(tmp_path, 2, "sh", "-c", "sleep 54321 & touch started; wait")
    wait_for((tmp_path / "started").exists)
    process.send_signal(signum)
    assert process.wait(30) == 128 + signum
    wait_for(lambda: not processes_in(tmp_path))
    assert start(tmp_path, 2, "true").wait(30) == 0


# ----------------------------------------------------------------------------------------------------- the project's own


def test_the_study_itself_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's dvc.yaml and params.yaml, in a repository without results: everything is stale."""
    study = new_repo(tmp_path / "study")
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, study / name)
    plan, stale = planned(study, monkeypatch)
    assert {"dataset", "model", "math_baseline", "writeup", "select@grpo_learning_rate"} <= set(plan)
    assert ".stamps/tables.done" in plan["writeup"]["after"]
    assert stale == {entry["rule"] for entry in plan.values()}
