"""Studies of examples/ and the docs: an experiment, a checkpoint of the Hub that learns, settings, and a task of one's own."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from docs_parts import clone_with_study, run_to_the_report
from model_parts import tiny_checkpoint
from ruamel.yaml import YAML
from study_parts import ROOT, Grpo

from grpo.models.checkpoint import load_tokenizer
from grpo.study.compose import compose
from grpo.study.effective import effective_run
from grpo.study.schema import load_study

PAGE = (ROOT / "docs/settings.md").read_text()


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the study is in use, with few and short steps, and `my-model` beside it: a tiny Llama."""
    folder = tmp_path / "studies"
    folder.mkdir()
    for name in ("base", "mini"):
        (folder / f"{name}.yaml").write_text((ROOT / f"studies/{name}.yaml").read_text())
    for name in ("digits.py", "digits.yaml"):
        (folder / name).write_text((ROOT / "examples" / name).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    values = compose(Path("studies/digits.yaml"))
    values["experiments"]["grpo_learning_rate"]["arms"] = {"1e-2": {"learning_rate": 1e-2}}
    short = {"n_grpo_steps": 20, "rollout_batch_size": 64, "train_batch_size": 64, "sampling_max_tokens": 8}
    values["grpo"] |= short | {"sampling_min_tokens": 0, "gradient_accumulation_steps": 4}
    values["evaluation"] |= {"every": 5, "max_tokens": 8}
    YAML().dump(values, tmp_path / "params.yaml")
    tiny_checkpoint(tmp_path / "my-model", "llama", "like_llama3", ["Say number 12 in digits.", "You are a calculator."])
    return tmp_path


@pytest.mark.slow
def test_a_llama_that_is_asked_in_chats_learns(digits: Path, grpo: Callable[..., tuple[int, str, str]]) -> None:
    for command in ("dataset main", "model main", "math_baseline", "train grpo_learning_rate 1e-2"):
        code, _, error = grpo(*command.split())
        assert code == 0, error
    run = digits / "data/runs/grpo_learning_rate/1e-2/0"
    metrics = json.loads((run / "metrics.json").read_text())
    print(f"share of digits: {metrics['first/answer_reward']:.2f} before, {metrics['val/answer_reward']:.2f} after")
    assert metrics["first/answer_reward"] < 0.2 and metrics["val/answer_reward"] > 0.3
    with (run / "history.csv").open(newline="") as file:
        assert max(float(row["mismatch_mean"]) for row in csv.DictReader(file)) < 1e-4
    sample = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert sample["prompt"].startswith(f"<|begin_of_text|>{header.format('system')}You are a calculator.<|eot_id|>")
    assert sample["prompt"].endswith(f" in digits.<|eot_id|>{header.format('assistant')}")
    kept = digits / "data/checkpoints/grpo_learning_rate/1e-2/0/last"
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (kept / name).read_bytes() == (digits / "my-model" / name).read_bytes()
    assert len(load_tokenizer(kept).stop_token_ids) == 3


def test_the_pages_other_settings_are_accepted(tmp_path: Path) -> None:
    """Each put over the GSM8K study; and that one asks in chats."""
    others = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(others) == 4
    for text in others:
        text = re.sub(r"DIGEST[-\w]*", "ab" * 32, text)
        (tmp_path / "own.yaml").write_text(f"extends: gsm8k\ndescription: Mine.\n{text}")
        for name in ("base", "math-h100", "gsm8k"):
            (tmp_path / f"{name}.yaml").write_text((ROOT / f"studies/{name}.yaml").read_text())
        load_study(tmp_path / "own.yaml")
    study = load_study(ROOT / "studies/gsm8k.yaml")
    arms = study.experiments["grpo_prompt_ablation"].arms
    assert {study.task("main").formats[arm["prompt"]].chat for arm in arms.values()} == {True, False}


def test_it_adds_its_arms_to_a_study_and_they_start_from_the_winner(workdir: Path, grpo: Grpo) -> None:
    lab = workdir / "our lab"
    lab.mkdir()
    (lab / "group_size.yaml").write_text((ROOT / "examples/group_size.yaml").read_text())
    code, _, error = grpo("study", "use", str(lab / "group_size.yaml"))
    assert code == 0, error
    study = load_study()
    assert study.needed_selections("grpo_group_size") == ["grpo_learning_rate"]
    winner = {"experiment": "grpo_learning_rate", "winner": "low", "overrides": {"learning_rate": 5e-4}}
    for size in (8, 4):
        run = effective_run(study, "grpo_group_size", f"group_{size}", study.seeds[0], [winner])
        assert (run.config.group_size, run.sources["group_size"]) == (size, f"arm group_{size}")
        assert (run.config.learning_rate, run.sources["learning_rate"]) == (5e-4, "winner of grpo_learning_rate (low)")
    assert {"grpo_learning_rate", "grpo_group_size"} <= {row["experiment"] for row in study.runs_table().values()}


@pytest.mark.slow
def test_a_study_of_a_task_of_ones_own_in_a_folder_outside_the_project(tmp_path: Path) -> None:
    place = "../our lab"
    shorter = "models: {main: {steps: 40}}\n"
    run_to_the_report(clone_with_study(tmp_path / "clone", "extending.md", "backwards", place, shorter), place)
