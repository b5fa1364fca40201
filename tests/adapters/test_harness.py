"""A checkpoint of ours in lm-evaluation-harness, by its own command, as docs/commands.md says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.models.checkpoint import save_checkpoint

pytestmark = pytest.mark.adapters
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
