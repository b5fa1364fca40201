"""Paths of a study's files, relative to the project's folder; dvc.yaml has the same paths.

DVC stores ``data/`` (large or many files), git stores ``reports/`` (small files for people).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from grpo.common.yaml_file import parse_yaml

MODELS = Path("data/model")  # one folder per task, as for datasets
DATASETS = Path("data/dataset")
SFT_DATASETS = Path("data/sft_dataset")
TRAINING_INPUTS = Path("data/training_inputs")  # one file per experiment
TASK_INPUTS = TRAINING_INPUTS / "tasks"  # one file per task
DATASET_INPUTS = TRAINING_INPUTS / "datasets"  # one file per task
PINNED_SOFTWARE = TRAINING_INPUTS / "software.json"
COMMENT_INPUTS = TRAINING_INPUTS / "comments/digest.json"  # digest of the comments beside the study's file
BASELINE = Path("data/math_baseline")
BEST_OF_N = Path("data/best_of_n")
EVALUATIONS = Path("data/evaluations")  # of files; no stage's output
RUNS = Path("data/runs")  # config.yaml, metrics.json, history.csv, validation.csv, rollouts.jsonl of each run
CHECKPOINTS = Path("data/checkpoints")
KL = Path("data/kl")  # of each experiment with kept checkpoints, each response with its KL
PASS_AT_K = Path("data/pass_at_k")  # of each experiment with sampled checkpoints, right samples by problem
KISSING_NUMBER = Path("data/kissing_number/program.py")  # the best program known; the only result in data/ that git stores
KISSING_SEARCH = Path("data/kissing_search")  # program.py (the best)
TIMING = Path("data/timing")  # times and MLflow ids, which differ between equal runs
CONVERSATION_LOG = TIMING / "kissing_number/conversation_log.json"

# Unfinished work. It is no stage's output, as DVC would remove it before the stage runs again.
STATE = Path("data/state")
RUN_STATE = STATE / "runs"  # saved states of runs
RUN_LOCKS = STATE / "locks"
KISSING_NUMBER_STATE = STATE / "kissing_number"  # the log of a search

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
PARAMS = Path("params.yaml")
STAGES = Path("stages.yaml")  # what dvc.yaml makes its stages from, computed from params.yaml

ROOT = Path(__file__).resolve().parents[2]  # folder with the package: a checkout, or site-packages

REPORTS = Path("reports")
DATASET_REPORTS = REPORTS / "dataset"
SFT_REPORTS = DATASET_REPORTS / "sft"  # below DATASET_REPORTS, which always exists; the stage `report` depends on it
NAMED_FILES = REPORTS / "named_files"  # digests of the files and folders that the study names
BASELINE_METRICS = REPORTS / "math_baseline.json"
BEST_OF_N_METRICS = REPORTS / "best_of_n.json"
KL_REPORTS = REPORTS / "kl"
PASS_AT_K_REPORTS = KL_REPORTS / "pass_at_k"  # below KL_REPORTS, which always exists; the stage `tables` depends on it
KISSING_NUMBER_REPORT = REPORTS / "kissing_number.json"
SELECT = REPORTS / "select"  # an experiment's winner; changes only if the winner does
CANDIDATES = REPORTS / "candidates"  # all arms of an experiment, and why the winner won
RECORD = REPORTS / "record.json"  # all that was measured and concluded, the same on every machine
OUTCOMES = REPORTS / "outcomes.csv"  # a row a run: scores by problem, from which all can be computed again
DIGESTS = REPORTS / "digests.txt"  # of each value of the record
PAIRS = REPORTS / "pairs.csv"  # the paired differences by which claims are judged
REPLICATES = REPORTS / "replicates"  # the same of each finished replicate
TIMING_TABLE = REPORTS / "timing.csv"  # a row a run: what differs between machines
TIMING_FIGURE = REPORTS / "timing.svg"
FIGURES = REPORTS / "figures"
TABLES = REPORTS / "tables"
METRICS = REPORTS / "metrics"  # each experiment's metrics for `dvc metrics` and `dvc exp show`
SUMMARY = REPORTS / "summary.json"
WRITEUP = REPORTS / "writeup.md"
KISSING_NUMBER_DELIVERY = REPORTS / "kissing_number"  # program, log and report, side by side
PAGE = REPORTS / "index.html"


def run_name(experiment: str, arm: str, seed: int) -> str:
    """``EXPERIMENT/ARM/SEED``: a run's folder below data/runs, data/checkpoints and data/timing."""
    return f"{experiment}/{arm}/{seed}"


def stage_of_run(run: str) -> str:
    """The DVC stage that trains the run ``EXPERIMENT/ARM/SEED`` of the active study, by stages.yaml."""
    folders = (run, *map(str, Path(run).parents))  # of a stage that trains several seeds or arms
    rows = _training_stages(STAGES.stat().st_mtime_ns) if STAGES.exists() else {}
    return "train@" + next((key for key, row in rows.items() if row["folder"] in folders), run.replace("/", "-"))


@cache
def _training_stages(_changed: int) -> dict[str, Any]:
    return dict(parse_yaml(STAGES)["runs"])


def run_timing(run: str) -> Path:
    """The file with a run's times."""
    return TIMING / run / "timing.json"


def model(task: str) -> Path:
    """The checkpoint that a task's runs start from."""
    return MODELS / task


def train(task: str) -> Path:
    """A task's training problems."""
    return DATASETS / task / "train.jsonl"


def validation(task: str) -> Path:
    """A task's validation problems."""
    return DATASETS / task / "validation.jsonl"


def sft_examples(task: str) -> Path:
    """A task's examples for supervised fine-tuning."""
    return SFT_DATASETS / task / "train.jsonl"


def dataset_report(task: str) -> Path:
    """Sizes and digests of a task's problems."""
    return DATASET_REPORTS / f"{task}.json"


def sft_report(task: str) -> Path:
    """Counts of a task's fine-tuning examples, and of those that earn the reward."""
    return SFT_REPORTS / f"{task}.json"


def shipped(name: str) -> Path:
    """A file that comes with the package: beside it in a checkout, inside it when installed from a wheel."""
    inside = ROOT / "grpo/shipped" / name
    return inside if inside.exists() else ROOT / name


def project_in(folder: Path) -> bool:
    """Whether the working folder is a project's and lies in ``folder``."""
    return (PARAMS.exists() or PIPELINE.exists()) and Path.cwd().is_relative_to(folder.resolve())


def workspace() -> Path:
    """The project's folder: the working folder, or in a DVC experiment the workspace that started it.

    `dvc exp run --temp` and `--queue` run stages in a copy below .dvc/tmp/exps, which is removed afterwards, and DVC_ROOT names
    the workspace. Files that must survive the experiment without being a stage's output go there.
    """
    here, root = Path.cwd(), Path(os.environ.get("DVC_ROOT") or ".").absolute()
    return root if root / ".dvc/tmp/exps" in here.parents else here
