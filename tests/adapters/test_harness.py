"""`grpo benchmark` with the real harness: numbers that can be counted by hand, and a disagreement that is made on purpose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from study_parts import activate

from grpo.models.checkpoint import save_checkpoint

pytestmark = pytest.mark.adapters
QUESTIONS = ["Mia has 4.5 apples.", "Tom has 4.5 apples.", "Ana has 7 coins."]
TRUTHS = ["Half of nine.\n#### 4.5", "#### 4.50", "#### 7"]
Grpo = Callable[..., tuple[int, str, str]]


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


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    activate("smoke", tmp_path)
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(QUESTIONS, TRUTHS, strict=True)))
    return file


def test_a_task_of_the_harness_on_local_rows_beside_our_grader(checkpoint: Path, rows: Path, grpo: Grpo) -> None:
    """4.50 is 4.5 for the grader and not for an exact match of letters, which agree on 4.50 and on 7."""
    code, out, error = grpo(
        *("benchmark", str(checkpoint), "--task", "gsm8k", "--file", str(rows), "--shots", "0", "--max-tokens", "32")
    )
    assert code == 0, error
    found = json.loads(Path("benchmark/gsm8k.json").read_text())
    assert {name: a["right"] for name, a in found["accuracy"].items()} == {
        "exact_match, strict-match": 1,
        "exact_match, flexible-extract": 1,
        "our grader": 2,
    }
    (differs,) = found["disagreements"]
    assert (differs["problem"], differs["answer"], differs["ground_truth"]) == (0, "4.50", "4.5")
    assert "our grader: 0.667 (0.208 to 0.939)" in out
    page = Path("benchmark/gsm8k.md").read_text()
    assert "| 0 | `It is so.␤#### 4.50` | `4.50` | `4.5` | wrong | wrong | right |" in page
    assert len(Path("benchmark/gsm8k.jsonl").read_text().splitlines()) == found["problems"] == 3


OWN = """
dataset_path: json
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match}]
num_fewshot: 2
"""


@pytest.mark.parametrize(
    ("own", "options", "told"),
    [
        (OWN, [], "own: its prompt needs 2 examples. Give a file of them with --shots-file, or --shots 0"),
        (OWN.replace("generate_until", "loglikelihood"), ["--shots", "0"], "answered by loglikelihood"),
        (OWN + "process_docs: !function nowhere.at_all\n", ["--shots", "0"], r"own: the harness could not load it \(.*nowhere"),
        (OWN, ["--shots", "0", "--max-tokens", "256"], "must be less than .* length .256.. Lower --max-tokens"),
    ],
)
def test_what_cannot_be_run_is_told_and_leaves_nothing(
    model: Any, tokenizer: Any, rows: Path, grpo: Grpo, own: str, options: list[str], told: str
) -> None:
    save_checkpoint(Path("checkpoint"), model, tokenizer)
    Path("own.yaml").write_text(own)
    code, _, error = grpo("benchmark", "checkpoint", "--task", "own.yaml", "--file", str(rows), *options)
    assert code == 2 and re.search(told, error), error
    assert not Path("benchmark").exists()
