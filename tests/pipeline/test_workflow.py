"""The Snakemake side: the same files and the same dvc.lock as `dvc repro`, whatever happened before."""

import errno
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from pipeline_parts import ROOT, TRAINING, environment, processes
from ruamel.yaml import YAML
from study_parts import activate
from waiting import started, wait_for

sys.path.insert(0, str(ROOT / "workflow"))

import plan as workflow_plan
import repro
import with_gpus

from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.common.yaml_file import to_yaml
from grpo.study.schema import load_study

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc.*")

# The toy pipeline has three layers; its stages take no time, DVC and Snakemake about a second each.
# `ran.txt` is no output of any stage: it counts what was really run.
TOY = Path(__file__).with_name("toy")  # its pipeline.yaml would as dvc.yaml be a part of the study to DVC
ALL = ["report", "source", "train-1e-4", "train-no_std"]


def call(repo: Path, *command: str, ok: bool = True, timeout: float = 120) -> str:
    """Run a command in the repository and return all it printed."""
    done = subprocess.run(
        command, cwd=repo, env=environment(DVC_SITE_CACHE_DIR=str(repo / ".dvc" / "site"), CUDA_VISIBLE_DEVICES=""), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def snakemake(repo: Path, *arguments: str, profile: str = "local", **options: Any) -> str:
    """Run `snakemake --profile PROFILE` as a user would."""
    return call(repo, "snakemake", "--profile", profile, *arguments, **options)


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


def lock(repo: Path) -> dict[str, Any]:
    """The stages of dvc.lock."""
    return dict(YAML(typ="safe").load(repo / "dvc.lock")["stages"])


def new_repo(repo: Path) -> Path:
    """The toy pipeline in a new repository, with the project's own workflow folder."""
    repo.mkdir()
    shutil.copytree(ROOT / "workflow", repo / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("local", "slurm"):
        (repo / name).symlink_to((ROOT / name).readlink())
    for source, target in (("pipeline.yaml", "dvc.yaml"), ("params.yaml", "params.yaml")):
        shutil.copy(TOY / source, repo / target)
    # Were data/ not ignored by git already, DVC would write .gitignore files into it, in the order in which stages end; they
    # would be part of the hash of data/runs.
    shutil.copy(ROOT / ".gitignore", repo / ".gitignore")
    call(repo, "git", "init", "--quiet")
    call(repo, "dvc", "init", "--quiet")
    return repo


def planned(repo: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The plan by stage and the rules that would run, made in this process, which is faster than a dry run."""
    monkeypatch.chdir(repo)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(repo / ".dvc" / "site"))
    workflow_plan.make_plan()
    plan = json.loads((repo / ".stamps" / "plan.json").read_text())
    return {entry["stage"]: entry for entry in plan}, {e["rule"] for e in plan if not (repo / e["stamp"]).exists()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which DVC has run everything from scratch. Tests work on copies."""
    repo = new_repo(tmp_path_factory.mktemp("finished") / "repo")
    call(repo, "dvc", "repro")
    return repo


@pytest.fixture
def repo(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished repository, with nothing counted as run yet."""
    copy = tmp_path / "repo"
    shutil.copytree(finished, copy, symlinks=True)
    (copy / "ran.txt").unlink(missing_ok=True)
    return copy


@pytest.mark.slow
def test_from_scratch_makes_the_same_lock_as_dvc_repro(finished: Path, tmp_path: Path) -> None:
    other = new_repo(tmp_path / "other [1]'s")
    call(other, sys.executable, "workflow/repro.py")
    assert lock(finished) == lock(other)
    assert (finished / "report.txt").read_text() == (other / "report.txt").read_text() != ""
    assert sorted((finished / "ran.txt").read_text().split()) == ran(other) == ALL
    # And each is up to date in the eyes of the other.
    assert "up to date" in call(other, "dvc", "status")
    assert "Nothing to be done" in snakemake(finished)
    assert "Running stage 'train@1e-4-0'" in (other / "logs" / "train@1e-4-0.log").read_text()


@pytest.mark.slow
def test_an_edit_reruns_what_is_stale_and_a_revert_nothing(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does what the user wants to run again, and no more than that."""
    monkeypatch.setenv("SHELL", "/bin/false")  # as service users and cron have it; DVC takes it from the environment
    edit(repo, "params.yaml", '"1e-4": 2', '"1e-4": 5')
    text = snakemake(repo)
    assert ran(repo) == ["report", "train-1e-4"]
    assert "3 of 4 stages: train@1e-4-0, 0:0" in text and "4 of 4 stages: report.final-one, 0:0" in text
    assert text.splitlines()[-1].startswith("Done. The report is reports/index.html")
    edit(repo, "params.yaml", '"1e-4": 5', '"1e-4": 2')
    snakemake(repo)
    assert ran(repo) == ["report"]  # its output is not cached; the training's comes from the run cache
    snakemake(repo, "-R", "source")
    assert ran(repo) == ["source"]  # with the result that it had, so that DVC runs none of those that follow
    assert "didn't change, skipping" in (repo / "logs/report.final-one.log").read_text()
    (repo / "data" / "runs" / "1e-4-0").unlink()
    edit(repo, "params.yaml", "no_std: 3", "no_std: 4")
    snakemake(repo, "train_1e_4_0")  # brings back the lost output, and nothing else
    assert ran(repo) == [] and (repo / "data" / "runs" / "1e-4-0").exists()
    snakemake(repo, "-F", "train_1e_4_0")
    assert ran(repo) == ["source", "train-1e-4"]


def test_what_is_stale_is_planned(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "params.yaml", "base: 1", "base: 7")
    plan, stale = planned(repo, monkeypatch)
    assert stale == {entry["rule"] for entry in plan.values()}
    edit(repo, "params.yaml", "base: 7", "base: 1")
    assert planned(repo, monkeypatch)[1] == set()  # an edit that is taken back before any run
    (repo / "report.txt").write_text("something else")  # nothing follows it
    assert planned(repo, monkeypatch)[1] == {"report_final_one"}
    (repo / "data" / "runs" / "1e-4-0").unlink()
    assert planned(repo, monkeypatch)[1] == {"train_1e_4_0", "report_final_one"}


def test_a_cache_that_was_removed_costs_no_run(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are still in data/; what is stale for another reason runs, and fills the cache again."""
    shutil.rmtree(repo / ".dvc/cache")
    with pytest.raises(UserError, match=r"\.dvc/cache: DVC's cache lacks the results of source, train@.*`dvc commit`"):
        planned(repo, monkeypatch)
    edit(repo, "params.yaml", "base: 1", "base: 7")
    assert len(planned(repo, monkeypatch)[1]) == len(ALL)
    edit(repo, "params.yaml", "base: 7", "base: 1")
    call(repo, "dvc", "commit")
    assert planned(repo, monkeypatch)[1] == set()


def test_two_people_of_a_group_may_share_a_folder(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its owner may set the time of a file, so stamps are written anew; the umask decides about the lock."""
    planned(repo, monkeypatch)
    stamp, of_another = repo / ".stamps/source.done", repo / "linked"
    os.link(stamp, of_another)
    planned(repo, monkeypatch)
    assert stamp.exists() and not stamp.samefile(of_another)
    before = os.umask(0o002)
    with workflow_plan.only_one_here():
        os.umask(before)
        assert (repo / ".stamps/running.lock").stat().st_mode & 0o020


@pytest.mark.parametrize(("name", "length", "kept"), [("dvc", None, True), ("sleep", None, False), ("dvc", -1, False)])
def test_files_are_busy_while_a_dvc_has_them(
    repo: Path, monkeypatch: pytest.MonkeyPatch, name: str, length: int | None, kept: bool
) -> None:
    """In a new container the ids of the last one belong to other programs. A file that is not whole is of a killed DVC."""
    with started([name, "60"], executable=shutil.which("sleep")) as process:
        entry = {"pid": process.pid, "cmd": "dvc --wait-for-lock repro"}
        (repo / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(repo / "report.txt"): entry}, "read": {}})[:length])
        planned(repo, monkeypatch)
    assert (repo / ".dvc/tmp/rwlock").exists() is kept


OF_SNAKEMAKE = """
import pathlib, signal, sys, time
def end(signum, frame):
    open("came", "a").write(signal.Signals(signum).name)
    sys.exit(7)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, end)
pathlib.Path("started").touch()  # open() would warn of a file left open, and an exit within a warning is lost
while True: time.sleep(0.01)  # signal.pause() would miss a signal that comes just before it
"""


@pytest.mark.parametrize(
    ("start", "told", "came"),
    [([], ["SIGINT"], "SIGINT"), ([], ["SIGHUP"], "SIGHUP"), (["nohup"], ["SIGHUP", "SIGTERM"], "SIGTERM")],
    ids=["Ctrl-C", "terminal closed", "nohup"],
)
def test_make_repro_passes_on_what_it_is_told(tmp_path: Path, start: list[str], told: list[str], came: str) -> None:
    """Told alone, it ends as Snakemake does, for which another program stands here."""
    (tmp_path / "logs").mkdir()
    code = "import sys, repro; repro.SNAKEMAKE = [sys.executable, '-c', sys.argv[1]]; sys.exit(repro.run_snakemake())"
    with started(
        [*start, sys.executable, "-c", code, OF_SNAKEMAKE], cwd=tmp_path, env=environment(PYTHONPATH=f"{ROOT}:{ROOT}/workflow"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        wait_for((tmp_path / "started").exists)
        status = Path(f"/proc/{process.pid}/status")
        wait_for(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)
        for name in told:
            process.send_signal(signal.Signals[name])
        text, _ = process.communicate(timeout=30)
    assert (process.returncode, (tmp_path / "came").read_text()) == (7, came), text
    assert "Traceback" not in text


FULL, READ_ONLY, MINE = "The disk or your quota is full.", "It lies on a disk", "You may not write it."
FAILURES: dict[str, tuple[Exception, str]] = {
    "disk": (OSError(errno.ENOSPC, "No space left on device"), f"HERE: No space left on device. {FULL}"),
    "database": (sqlite3.OperationalError("database or disk is full"), f"HERE: database or disk is full. {FULL}"),
    "read-only": (OSError(errno.EROFS, "Read-only file system", "data/x"), f"data/x: Read-only file system. {READ_ONLY}"),
    "root's": (PermissionError(errno.EACCES, "Permission denied", "logs/x"), f"logs/x: Permission denied. {MINE}"),
}


@pytest.mark.parametrize(("failure", "told"), FAILURES.values(), ids=FAILURES)
def test_what_the_system_refuses_is_told_in_one_message_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, told: str
) -> None:
    def fail() -> None:
        raise failure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repro, "make_plan", fail)
    assert repro.main() == 2
    assert capsys.readouterr().err.startswith("error: " + told.replace("HERE", str(tmp_path)))


@pytest.mark.parametrize("name", ["runs {x}", "what?"])
def test_a_folder_with_a_special_name_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(name)}: .*Rename the folder"):
        planned(repo.rename(repo.with_name(name)), monkeypatch)


# What programs leave beside grader.py: macOS and KDE's file managers, Vim, Emacs, git and patch, Jupyter, PyCharm, NFS.
BESIDE_CODE = (
    *(".DS_Store", "._grader.py", ".directory", ".grader.py.swp", ".grader.py.un~", "grader.py~", "#grader.py#"),
    *("grader.py.orig", "grader.py.rej", ".ipynb_checkpoints/grader-checkpoint.py", ".idea/workspace.xml", ".nfs000001"),
)


@pytest.mark.slow
def test_what_editors_leave_makes_nothing_stale(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / ".dvcignore", repo)
    (repo / "code").mkdir()
    (repo / "code/grader.py").write_text("")
    edit(repo, "dvc.yaml", "deps: [data/source]", "deps: [data/source, code]")
    call(repo, "dvc", "commit", "--force", "--quiet")
    for name in BESIDE_CODE:
        (repo / "code" / name).parent.mkdir(exist_ok=True)
        (repo / "code" / name).write_bytes(b"\0\5\x16\7")  # no Python, whatever its name
    assert planned(repo, monkeypatch)[1] == set()
    (repo / "code/new.py").write_text("")
    assert {"train_1e_4_0", "train_no_std_0"} < planned(repo, monkeypatch)[1]


def test_changed_resources_and_removed_stages_make_nothing_stale(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "params.yaml", "train: {gpus: 0, cpus: 64", "train: {gpus: 2, cpus: 7")
    (repo / ".stamps").mkdir(exist_ok=True)
    (repo / ".stamps" / "former.done").write_text("of a stage that is no more")
    plan, stale = planned(repo, monkeypatch)
    assert stale == set() and not (repo / ".stamps" / "former.done").exists()
    train = plan["train@1e-4-0"]
    assert (train["gpus"], train["threads"], train["resources"]["cpus_per_gpu"]) == (2, 7, 4)
    waiting = {name: entry["priority"] for name, entry in plan.items()}  # the longest chain of stages that wait for one
    assert waiting == {"source": 2, "train@1e-4-0": 1, "train@no_std-0": 1, "report.final-one": 0}


@pytest.mark.slow
def test_make_repro_names_a_failed_stage_and_the_others_still_run(repo: Path) -> None:
    edit(repo, "dvc.yaml", "test ${item.arm} != ${broken}", r"printf 'warning: \033]2;x' && test ${item.arm} != ${broken}")
    edit(repo, "params.yaml", "broken: none", "broken: no_std")
    edit(repo, "params.yaml", "base: 1", "base: 3")
    text = call(repo, sys.executable, "workflow/repro.py", ok=False)
    assert ran(repo) == ["source", "train-1e-4"]
    assert "\ntrain@no_std-0 failed with exit code " in text and "Full log: logs/train@no_std-0.log\n" in text
    assert "failed to run" in text and "\033]2;" not in text  # the end of its log, without what leads a terminal
    assert re.search(r"^2 of 4 stages: train@1e-4-0, \d:\d\d, with warnings \(see logs/train@1e-4-0\.log\)$", text, re.M)
    assert "rule train" not in text and text.splitlines()[-1].startswith("Not all stages are done")


@pytest.mark.slow
def test_with_nothing_to_do_make_repro_does_not_start_snakemake(repo: Path) -> None:
    (repo / "snakemake").write_text("#!/bin/sh\ntouch called\n")
    (repo / "snakemake").chmod(0o755)
    command = ("env", f"PATH={repo}:{os.environ['PATH']}", sys.executable, "workflow/repro.py")
    assert "All stages are up to date" in call(repo, *command) and not (repo / "called").exists()
    (repo / "report.txt").unlink()
    call(repo, *command)
    assert (repo / "called").exists()


@pytest.mark.slow
def test_slurm_profile_plans_the_same_jobs(repo: Path) -> None:
    edit(repo, "params.yaml", "base: 1", "base: 2")
    edit(repo, "params.yaml", "train: {gpus: 0, cpus: 64", "train: {gpus: 2, cpus: 8")
    edit(repo, "workflow/profiles/slurm/config.yaml", "# config: [cpu_partition=cpu]", "config: [cpu_partition=cpu]")
    text = snakemake(repo, "--dry-run", profile="slurm")
    rules = {rule.split(":")[0]: rule for rule in text.split("\nrule ")[1:]}
    train = rules["train_1e_4_0"]
    assert re.search(r"gpu=2, cpus_per_gpu=4, tasks_per_gpu=0", train) and re.search(r"runtime=5\b", train)
    assert "slurm_partition=cpu" in rules["source"] and "slurm_partition" not in train


@pytest.mark.slow
def test_a_former_arm_leaves_dvc_lock(repo: Path) -> None:
    """DVC keeps its entry for ever; the last stage takes it out, as `grpo report` does, while DVC waits for that stage."""
    former = {name: entry for name, entry in lock(repo).items() if name != "report.final-one"}
    edit(repo, "params.yaml", '["1e-4", no_std]', '["1e-4"]')
    call(repo, "dvc", "repro")
    assert set(lock(repo)) == {*former, "report.final-one"}, "DVC does it by itself now"
    drop = "python -c 'import grpo.study.kept as lock; print(lock.drop_former_stages())'"
    edit(repo, "dvc.yaml", "cat data/runs/* > report.txt", f"cat data/runs/* > report.txt && {drop}")
    assert "['train@no_std-0']" in call(repo, "dvc", "repro")
    kept = lock(repo)
    assert {name: kept[name] for name in kept if name != "report.final-one"} == {
        name: former[name] for name in ("source", "train@1e-4-0")
    }
    assert drop in kept["report.final-one"]["cmd"] and (repo / "dvc.lock").read_text().startswith("schema: '2.0'\nstages:\n")
    assert "up to date" in call(repo, "dvc", "status")
    assert call(repo, "python", "-c", "import grpo.study.kept as lock; print(lock.drop_former_stages())").strip() == "[]"


def test_the_committed_dvc_lock_names_no_former_stage() -> None:
    """By the dvc.yaml and params.yaml committed with it: another study may be active in the workspace."""
    from dvc.repo import Repo
    from dvc.stage import PipelineStage

    with Repo(str(ROOT), rev="HEAD") as repo:
        known = {stage.name for stage in repo.index.stages if isinstance(stage, PipelineStage)}
        committed = YAML(typ="safe").load(repo.fs.read_text(repo.fs.join(repo.root_dir, "dvc.lock")))
    assert len(known) > 50
    assert set(committed["stages"]) - known == set()


def test_a_pipeline_that_cannot_be_planned_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(repo, "dvc.yaml", "resources: train", "resources: huge")
    with pytest.raises(UserError, match=r"has no resources.huge \(known: small, train\)"):
        planned(repo, monkeypatch)
    edit(repo, "dvc.yaml", "resources: huge", "resources: train")
    edit(repo, "params.yaml", "no_std: 3", "no_std: 3, no-std: 3")
    edit(repo, "params.yaml", '"1e-4", no_std', '"1e-4", no_std, no-std')
    with pytest.raises(UserError, match=r"both would be the rule train_no_std_0. Rename one"):
        planned(repo, monkeypatch)
    shutil.rmtree(repo / ".git")
    with pytest.raises(UserError, match=r"is not a git repository.* git init && git add"):
        planned(repo, monkeypatch)


@pytest.mark.nightly
def test_a_job_that_slurm_has_given_its_devices_takes_none(tmp_path: Path) -> None:
    """The plugin's job calls Snakemake again, as `--mode remote`; an allocation's environment alone does not make one."""
    repo = new_repo(tmp_path / "repo")
    edit(repo, "dvc.yaml", "    outs: [data/source]\n", "    outs: [data/source]\n    meta: {resources: train}\n")
    edit(repo, "params.yaml", "train: {gpus: 0", "train: {gpus: 1")
    salloc = environment(SLURM_JOB_ID="7", DVC_SITE_CACHE_DIR=str(repo / ".dvc" / "site"), CUDA_VISIBLE_DEVICES="")

    def run_source(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["snakemake", *options, "source"], cwd=repo, env=salloc, capture_output=True, text=True, timeout=120
        )

    done = run_source("--profile", "local")
    text = done.stdout + done.stderr
    assert "1 GPU(s) asked for, but this machine offers 0 (none)" in text and ran(repo) == []
    job = run_source("--executor", "local", "--cores", "1", "--nolock", "--rerun-triggers", "mtime", "--mode", "remote")
    assert job.returncode == 0 and ran(repo) == ["source"], job.stderr


MISTAKES = (  # arguments of Snakemake, the folder in which it is started, and what it says
    ("--profile local train@1e-4-0", ".", "Use Snakemake's name: train_1e_4_0."),
    ("--profile local --config shared_disk=false", ".", "Add one: dvc remote add -d NAME URL"),
    ("--profile slurm", ".", "no Slurm on this machine (sbatch)."),
    ("", "workflow", "Run Snakemake in the project's folder."),
)


@pytest.mark.slow
def test_what_cannot_be_is_said_before_a_stage_starts(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "bin").mkdir()  # all commands of this machine but Slurm's, which it may have
    for of_path in filter(Path.is_dir, map(Path, os.environ["PATH"].split(os.pathsep))):
        for command in of_path.iterdir():
            if command.name not in {"sbatch", "scontrol"} and not (folder / command.name).is_symlink():
                (folder / command.name).symlink_to(command.absolute())
    monkeypatch.setenv("PATH", str(folder))
    edit(repo, "params.yaml", "base: 1", "base: 2")
    for arguments, place, said in MISTAKES:
        text = call(repo / place, "snakemake", *arguments.split(), ok=False)
        assert said in text and "Traceback" not in text and ran(repo) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second disk")
def test_results_on_another_disk_as_the_docs_say(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = new_repo(tmp_path / "repo")
    with TemporaryDirectory(dir="/dev/shm") as other:
        (repo / "data").symlink_to(other)
        with pytest.raises(UserError, match=r"data: a symbolic link.*dvc cache dir --local FOLDER"):
            planned(repo, monkeypatch)
        (repo / "data").unlink()
        text = (ROOT / "docs/tracking.md").read_text(encoding="utf-8").partition("## Results on another disk")[2]
        commands = text.partition("```sh\n")[2].partition("```")[0].replace("/big", other)
        call(repo, "sh", "-ec", commands)
        (repo / "data/state/a").touch()
        call(repo, "dvc", "repro")
        assert lock(repo) == lock(finished) and ran(repo) == ALL
        assert sorted(Path(other).joinpath("state").iterdir()) == [Path(other, "state/a")]
        assert (repo / "data/source").resolve().is_relative_to(Path(other) / "cache")
        edit(repo, "params.yaml", "no_std: 3", "no_std: 4")
        call(repo, "dvc", "repro")
        assert ran(repo) == ["report", "train-no_std"]


@pytest.mark.slow
def test_make_repro_after_a_kill_and_beside_another(repo: Path) -> None:
    """SIGKILL would leave locks behind: DVC's, and Snakemake's, whose remedy is an argument that `make repro` does not have."""
    edit(repo, "dvc.yaml", "mkdir -p data && echo ${base}", "touch started && sleep ${nap} && mkdir -p data && echo ${base}")
    with (repo / "params.yaml").open("a") as params:
        params.write("nap: 54321\n")
    repro = (sys.executable, "workflow/repro.py")
    with started(repro, cwd=repo, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for((repo / "started").exists)
        said = call(repo, *repro, ok=False)
        assert f"is already running (process {process.pid} on " in said and "unlock" not in said
    wait_for(lambda: not processes(repo))
    (repo / ".dvc/tmp/rwlock").write_text("")  # what DVC leaves if it is killed at the worst moment
    edit(repo, "params.yaml", "nap: 54321", "nap: 0")
    call(repo, *repro)
    assert ran(repo) == ["source"]  # with the result that it had


@pytest.mark.slow
@pytest.mark.parametrize("told", ["all", "make repro alone"])
def test_sigterm_lets_the_step_be_finished_and_gives_back_dvcs_locks(repo: Path, told: str) -> None:
    """As `timeout` tells all processes to end, and `docker stop` one."""
    (repo / "training.py").write_text(TRAINING % (1.5, with_gpus.RESUME_ME))
    edit(repo, "dvc.yaml", "test ${item.arm} != ${broken}", "python training.py")
    edit(repo, "params.yaml", '["1e-4", no_std]', "[no_std]")
    command = ["snakemake", "--profile", "local"] if told == "all" else [sys.executable, "workflow/repro.py"]
    process = subprocess.Popen(
        command, cwd=repo, env=environment(), start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for((repo / "started").exists)
    (os.killpg if told == "all" else os.kill)(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and (repo / "saved").exists(), text
    assert not processes(repo)
    assert json.loads((repo / ".dvc" / "tmp" / "rwlock").read_text()) == {}
    edit(repo, "dvc.yaml", "python training.py", "true")
    snakemake(repo)  # needs no --unlock
    assert ran(repo) == ["train-no_std"]  # with the result that it had, so that the report is not made again


@pytest.mark.nightly
def test_two_clones_and_a_remote_make_the_lock_together(tmp_path: Path) -> None:
    """Machines that share no disk: all that goes between them goes through a DVC remote."""
    first, second, alone = new_repo(tmp_path / "first"), tmp_path / "second", tmp_path / "alone"
    call(first, "dvc", "remote", "add", "--quiet", "--default", "storage", str(tmp_path / "storage"))
    for clone in (second, alone):
        shutil.copytree(first, clone, symlinks=True)
    for repo, rules in ((first, ["train_1e_4_0"]), (second, []), (first, [])):
        snakemake(repo, *rules, "--cores", "2", "--config", "shared_disk=false", timeout=300)
    # Each training on one of the two; the report, which git keeps, on both.
    assert ran(first) == ["report", "source", "train-1e-4"]
    assert ran(second) == ["report", "train-no_std"]
    call(alone, "dvc", "repro")
    assert lock(first) == lock(second) == lock(alone)
    assert (first / "report.txt").read_text() == (alone / "report.txt").read_text()


@pytest.fixture(scope="module")
def without_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's dvc.yaml, params.yaml and stages.yaml, in a repository without results. Tests work on copies."""
    folder = new_repo(tmp_path_factory.mktemp("without_results") / "repo")
    for name in ("dvc.yaml", "params.yaml", "stages.yaml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def study(without_results: Path, tmp_path: Path) -> Path:
    return shutil.copytree(without_results, tmp_path / "study", symlinks=True)


def test_the_study_itself_can_be_planned(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without results everything is stale, and so it is with a lock that names no stage."""
    (study / "dvc.lock").write_text("schema: '2.0'\n")
    plan, stale = planned(study, monkeypatch)
    assert {"dataset@main", "model@main", "math_baseline", "tables", "select@grpo_learning_rate"} <= set(plan)
    assert {".stamps/tables.done", ".stamps/figures.done"} <= set(plan["writeup"]["after"])
    assert stale == {entry["rule"] for entry in plan.values()}


def test_a_stage_that_the_study_leaves_out_writes_a_note_and_counts_as_none(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it takes neither the model nor torch, whose import takes seconds."""
    values = YAML(typ="safe").load(study / "params.yaml")
    values["kissing_number"], values["evaluation"]["best_of_n"]["prompts"] = None, []
    write_text(study / "params.yaml", to_yaml(values))
    plan, _ = planned(study, monkeypatch)
    assert {name for name, entry in plan.items() if not entry["stamp"].endswith(".done")} == {"kissing_number", "best_of_n"}
    assert ".stamps/kissing_number.off" in plan["writeup"]["after"] and ".stamps/best_of_n.off" in plan["tables"]["after"]
    code = "import sys; from grpo.commands.stages import best_of_n; best_of_n(); sys.exit('torch' in sys.modules)"
    how = ["--log", "log", "--stamp", plan["best_of_n"]["stamp"], "--stages", "7"]
    assert call(study, sys.executable, "workflow/with_gpus.py", "0", *how, "--", sys.executable, "-c", code) == ""
    assert (study / plan["best_of_n"]["stamp"]).exists() and (study / "reports/best_of_n.json").read_text() == "{}\n"
    assert [file.name for file in (study / "data/best_of_n").iterdir()] == ["README.md"]
    assert "best_of_n" in planned(study, monkeypatch)[1]  # dvc.lock does not know of it, so the stamp has gone


def test_an_edit_of_arms_and_seeds_makes_its_stages(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(study, "params.yaml", "      reinforce_with", "      new: {}\n      reinforce_with")
    edit(study, "params.yaml", "seeds: [0, 1, 2, 3, 4]", "seeds: [0, 1]")
    monkeypatch.chdir(study)
    with pytest.raises(UserError, match="is not that of params"):
        load_study()
    plan, _ = planned(study, monkeypatch)
    assert "train@grpo_baselines-new" in plan and "train@grpo_colocate" in plan
    assert "train@grpo_colocate-one_update-2" not in plan
    assert load_study().seeds == [0, 1]


def test_a_study_for_gpus_is_not_submitted_with_a_torch_for_cpus(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.study.software._cuda_of_torch", lambda: "none")
    monkeypatch.chdir(study)
    workflow_plan.require_torch()
    activate("math-24gb-first", study)
    with pytest.raises(UserError, match=r"params.yaml: the study computes on GPUs, and torch .* is for CPUs"):
        workflow_plan.require_torch()


CONFLICT = "<<<<<<< HEAD\n{0}=======\n{0}>>>>>>> other\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("params.yaml", "  n_grpo_steps:", "  n_grpo_step:", "grpo.n_grpo_step: unknown key. Did you mean n_grpo_steps?"),
        ("params.yaml", "  n_grpo_steps:", "\tn_grpo_steps:", "params.yaml:LINE: not valid YAML (found character that"),
        ("params.yaml", "cpus: 1,", "", "params.yaml: resources.small.cpus: missing."),
        ("dvc.yaml", "cmd: grpo best_of_n", "cmd: grpo ${nowhere}", "DVC cannot read the pipeline"),
        ("dvc.lock", "stages: {}\n", CONFLICT, "'dvc.lock', YAML file structure is corrupted. `git checkout HEAD"),
        ("dvc.lock", "stages: {}\n", "stages: 3\n", "'./dvc.lock' validation failed. `git checkout HEAD -- dvc.lock` restores"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_first(
    study: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, told: str
) -> None:
    (study / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    text = (study / name).read_text()
    line = text[: text.index(old)].count("\n") + 1
    (study / name).write_text(text.replace(old, new.format(old) if new == CONFLICT else new, 1))
    with pytest.raises(UserError) as caught:
        planned(study, monkeypatch)
    assert told.replace("LINE", str(line)) in str(caught.value)
    assert not (study / ".stamps").exists()


def test_make_repro_ends_with_one_message(study: Path) -> None:
    site = study / ".dvc/site"

    def ended(*command: str) -> subprocess.CompletedProcess[str]:
        env = environment(DVC_SITE_CACHE_DIR=str(site), PYTHONSAFEPATH="1")
        return subprocess.run(command, cwd=study, env=env, capture_output=True, text=True, check=False)

    repro = sys.executable, str(study / "workflow/repro.py")
    ended("dvc", "status")
    for database in site.rglob("cache.db"):
        database.write_bytes(b"not a database" * 99)
    told = ended(*repro)
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert told.stderr.startswith(f"error: {site}/repo: DVC's database of known files cannot be used")
