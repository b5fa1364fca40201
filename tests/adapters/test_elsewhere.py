"""Our grader as a reward of TRL and of `verifiers`, TRL's rewards in ours, and a checkpoint in lm-evaluation-harness."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem
from grpo.models.checkpoint import save_checkpoint
from grpo.tasks.rewards import apply_reward
from grpo.tasks.task import ScoredBatch, make_task

pytestmark = pytest.mark.adapters


def test_trl_trains_on_our_grader(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A real trainer calls it in each of two steps, and logs as its reward what the responses earn."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    save_checkpoint(tmp_path / "model", model, tokenizer)
    right, judged = import_object("grader_for_trl:right"), []

    def boxed(completions: list[str], **columns: Any) -> list[float]:
        """What a random model samples, and in the place of every second response one that is right."""
        responses = [r"\boxed{0.50}" if i % 2 else text for i, text in enumerate(completions)]
        judged.append(right(completions=responses, **columns))
        return judged[-1]

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        reward_funcs=boxed,
        args=GRPOConfig(
            str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
            logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, beta=0.0, seed=0,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["Half of one?", "Two quarters?"], "answer": ["1/2", r"\frac12"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"),
    )  # fmt: skip
    trainer.train()
    assert judged == [[0.0, 1.0, 0.0, 1.0]] * 2
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in logged] == [0.5, 0.5] and all(entry["grad_norm"] > 0 for entry in logged)


def test_a_reward_of_trl_is_a_reward_of_ours(tmp_path: Path) -> None:
    """TRL's own function, called as a study calls it, with a weight beside the task's answer reward."""
    (tmp_path / "rewards_of_trl.py").write_text(
        "from trl.rewards import get_soft_overlong_punishment\n\n"
        "punish = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)\n"
    )  # 0 up to 6 tokens, -1 from 10 on, linear between
    completions = [Completion(tuple(range(n)), "", (0.0,) * n, "stop") for n in (6, 8, 12)]
    problems = [Problem(f"p/{i}", "?", "1") for i in range(3)]
    scored = ScoredBatch([{"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}] * 3, [False] * 3)
    found = apply_reward({"answer_reward": 1.0, "rewards_of_trl:punish": 2.0}, ["?"] * 3, completions, problems, scored)
    assert [each["reward"] for each in found.rewards] == [1.0, 0.0, -1.0]


def test_a_taskset_of_verifiers_with_our_grader(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(
        "import verifiers.v1 as vf\n\n\nclass Data(vf.TaskData):\n    answer: str\n\n\n"
        "class Halves(vf.Taskset[vf.Task[Data], vf.TasksetConfig]):\n    def load(self):\n"
        "        for n in range(4):\n"
        "            yield vf.Task[Data](Data(prompt=f'Half of {n}?', answer=f'{n}/2'), self.config.task)\n"
    )
    plugged = {"task": {"rewards": {"right": {"fn": "grader_for_verifiers:right"}}}}
    parts = {"train": {"select": {"limit": 2}}, "validation": {"select": {"skip": 2}}}
    task = make_task({"use": "verifiers_task:Verifiers", "environment": "halves:Halves", "config": plugged, **parts})
    problems = task.problems("train")
    assert task.verify([r"\boxed{0.50}", "0.5", r"\boxed{0}"], [problems[1], problems[1], problems[0]]) == [1.0, 0.0, 1.0]


QUESTIONS = ["Mia has 4.5 apples.", "Tom has 4.5 apples.", "Ana has 7 coins."]
TRUTHS = ["Half of nine.\n#### 4.5", "#### 4.50", "#### 7"]


@pytest.fixture
def checkpoint(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    """A model that has learnt to answer each of the three questions, as GSM8K's prompt puts them, by ``#### 4.50``."""
    end = [tokenizer.eos_token_id]
    rows = [tokenizer(f"Question: {q}\nAnswer:")["input_ids"] for q in QUESTIONS]
    response = [*tokenizer(" It is so.\n#### 4.50")["input_ids"], *end]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = sum(
            model(input_ids=torch.tensor([[*row, *response]]), labels=torch.tensor([[-100] * len(row) + response])).loss
            for row in rows
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    save_checkpoint(tmp_path / "checkpoint", model, tokenizer)
    return tmp_path / "checkpoint"


def test_gsm8ks_task_on_local_rows(checkpoint: Path, tmp_path: Path) -> None:
    """One of three: the harness compares letters, so 4.50 is not 4.5 to it."""
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "test.jsonl"
    rows.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(QUESTIONS, TRUTHS, strict=True)))
    task = {
        "include": str(TaskManager().task_index["gsm8k"].yaml_path),
        "task": "local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        **dict.fromkeys(("training_split", "validation_split", "fewshot_split")),
        "num_fewshot": 0,
    }
    (tmp_path / "local.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in task.items()))
    (tmp_path / "tokenizer").mkdir()
    for file in checkpoint.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "tokenizer")
    command = (
        f"-m lm_eval --model hf --device cpu --model_args pretrained={checkpoint},tokenizer={tmp_path / 'tokenizer'} "
        f"--tasks {tmp_path / 'local.yaml'} --gen_kwargs max_gen_toks=32 --output_path {tmp_path / 'out'}"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, *command.split()], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "out").rglob("results_*.json"))
    for filtered in ("strict-match", "flexible-extract"):
        assert found["results"]["local"][f"exact_match,{filtered}"] == pytest.approx(1 / 3)
