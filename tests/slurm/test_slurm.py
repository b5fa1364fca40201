"""`snakemake --profile slurm` on a real Slurm of one node with two GPUs (null devices): the smoke study, and resumed runs.

Needs root and Debian's packages, see cluster.sh.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from pipeline_parts import digests, environment, fresh_clone, lock, sh
from ruamel.yaml import YAML
from waiting import wait_for

CLUSTER = Path(__file__).parent / "cluster.sh"
# As a user would, but that it looks more often whether jobs have ended: here they take seconds.
SNAKEMAKE = ("snakemake", "--profile", "slurm", "--slurm-init-seconds-before-status-checks", "2")
RUNS = {"scancel": "3e-4", "scontrol requeue": "1e-3"}  # how the run of this arm is disturbed
STEPS = 24

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running cluster, which the commands of these tests use."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    start = time.perf_counter()
    subprocess.run([CLUSTER, "install"], check=True)
    installed = time.perf_counter()
    subprocess.run([CLUSTER, "start", folder], check=True)
    print(f"Slurm: installed in {installed - start:.0f} s, started in {time.perf_counter() - installed:.1f} s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield folder
    subprocess.run([CLUSTER, "stop", folder], check=True)


@pytest.fixture(scope="module")
def study(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A clone in which Snakemake has run the study on the cluster, and the rule of each Slurm job."""
    folder = fresh_clone(tmp_path_factory.mktemp("study") / "clone")
    edit(folder, resources={kind: {"gpus": 1} for kind in ("train", "asynchronous", "colocate")})
    start = time.perf_counter()
    sh(folder, *SNAKEMAKE)
    print(f"smoke study through Slurm: {time.perf_counter() - start:.0f} s")
    log = "".join(path.read_text() for path in (folder / ".snakemake" / "log").iterdir())
    jobs = re.findall(r"submitted with SLURM jobid (\d+) \(log: \S+/rule_(\w+)/\d+\.log\)", log)
    return folder, dict(jobs)


def edit(folder: Path, **changes: dict[str, object]) -> None:
    """Merge into the sections of params.yaml."""
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    for section, values in changes.items():
        for key, value in values.items():
            if isinstance(value, dict):
                params[section][key].update(value)
            else:
                params[section][key] = value
    yaml.dump(params, folder / "params.yaml")


def ended_jobs(cluster: Path) -> list[dict[str, str]]:
    """What Slurm itself recorded, an entry for each end of a job."""
    lines = (cluster / "jobcomp.log").read_text().splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def seconds(job: dict[str, str]) -> set[int]:
    """In which seconds the job ran, as whole seconds are what Slurm writes; the last is left out."""
    start, end = (int(datetime.fromisoformat(job[key]).timestamp()) for key in ("StartTime", "EndTime"))
    return set(range(start, end))


def test_two_gpus_run_two_stages_at_a_time_and_never_more(cluster: Path, study: tuple[Path, dict[str, str]]) -> None:
    folder, rules = study
    plan = json.loads((folder / ".stamps" / "plan.json").read_text())
    on_gpu = {entry["rule"] for entry in plan if entry["gpus"]} & set(rules.values())
    jobs = [job for job in ended_jobs(cluster) if rules.get(job["JobId"]) in on_gpu]
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    assert {rules[job["JobId"]] for job in jobs} == on_gpu
    assert len(on_gpu) == 23  # all training stages but those of keywords, colocation and asynchronous runs
    ran = [seconds(job) for job in jobs]
    at_once = [sum(second in job for job in ran) for second in set().union(*ran)]
    print(f"{len(jobs)} jobs with a GPU; seconds with so many at once: { ({n: at_once.count(n) for n in set(at_once)}) }")
    assert max(at_once) == 2


def test_the_results_are_those_of_dvc_repro(study: tuple[Path, dict[str, str]], finished: Path) -> None:
    folder, _ = study
    assert lock(folder) == lock(finished) and digests(folder) == digests(finished)
    result = sh(folder, *SNAKEMAKE)
    assert "Nothing to be done" in result.stdout + result.stderr


def wait_until_trained(folder: Path, arm: str, steps: int) -> None:
    """Until the run has saved its state after so many steps, or some more."""
    saved = f"data/state/runs/grpo_learning_rate/{arm}/0/*/step-*"
    wait_for(lambda: any(int(state.name.removeprefix("step-")) >= steps for state in folder.glob(saved)), 240)


def job_of(arm: str) -> str:
    """The number of the running job that trains this arm."""
    rule = f"rule_train_grpo_learning_rate_{arm.replace('-', '_')}"
    listed = subprocess.run(["squeue", "--noheader", "--format=%i %k", "--states=RUNNING"], capture_output=True, text=True)
    (number,) = (line.split()[0] for line in listed.stdout.splitlines() if line.split()[1] == rule)
    return number


def undisturbed(study: Path, folder: Path) -> dict[str, str]:
    """The digests of the same runs, trained without a break."""
    fresh_clone(folder)
    shutil.copy(study / "params.yaml", folder / "params.yaml")
    for name in ("dataset", "model"):
        shutil.copytree(study / "data" / name, folder / "data" / name)
    start = time.perf_counter()
    for arm in RUNS.values():
        sh(folder, "grpo", "train", "grpo_learning_rate", arm)
    print(f"{len(RUNS)} runs without a break: {time.perf_counter() - start:.0f} s")
    return digests(folder)


def test_a_run_goes_on_after_scancel(cluster: Path, study: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, _ = study
    edit(folder, grpo={"n_grpo_steps": STEPS})
    rules = [f"train_grpo_learning_rate_{arm.replace('-', '_')}" for arm in RUNS.values()]
    before = len(ended_jobs(cluster))
    start = time.perf_counter()
    jobs = {}
    with (tmp_path / "output").open("w") as output:
        snakemake = subprocess.Popen([*SNAKEMAKE, *rules], cwd=folder, env=environment(), stdout=output, stderr=output)
    try:
        for how, arm in RUNS.items():
            wait_until_trained(folder, arm, 3)
            jobs[how] = job_of(arm)
            subprocess.run([*how.split(), jobs[how]], check=True)
        assert snakemake.wait(600) == 0, (tmp_path / "output").read_text()[-3000:]
    finally:
        snakemake.kill()
    print(f"{len(RUNS)} runs, each stopped once and resumed: {time.perf_counter() - start:.0f} s")
    states = [(job["JobId"], job["JobState"]) for job in ended_jobs(cluster)[before:]]
    assert (jobs["scancel"], "CANCELLED") in states and (jobs["scancel"], "COMPLETED") not in states
    assert (jobs["scontrol requeue"], "COMPLETED") in states
    for arm in RUNS.values():
        said = re.search(r"resumed after step (\d+)", (folder / "logs" / f"train@grpo_learning_rate-{arm}.log").read_text())
        assert said and 3 <= int(said[1]) < STEPS, arm
        print(f"{arm}: resumed after step {said[1]} of {STEPS}")
    expected = undisturbed(folder, tmp_path / "undisturbed")
    found = digests(folder)
    assert {name for name in expected if name.endswith(("safetensors", "history.csv"))}
    assert {name: found.get(name) for name in expected} == expected
