"""evaluate_vllm with a stand-in for vLLM that answers as scripted; tests/rollout/test_vllm.py calls it with vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo import evaluate_vllm, question_only_reward_fn

ANSWERS = {"1 + 1?": r"\boxed{2}", "1 + 2?": r"\boxed{4}", "1 + 3?": "four"}


class Scripted:
    def generate(self, prompts: list[str], params: Any) -> list[Any]:
        assert params == "sampling parameters"
        return [SimpleNamespace(outputs=[SimpleNamespace(text=ANSWERS[prompt])]) for prompt in prompts]


def test_four_arguments_evaluate_and_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward function knows the ground truths, because the handout's four arguments do not include them."""
    monkeypatch.chdir(tmp_path)
    truths = dict(zip(ANSWERS, "234", strict=True))

    def reward(response: str, prompt: str) -> dict[str, float]:
        return question_only_reward_fn(response, truths[prompt])

    records = evaluate_vllm(Scripted(), reward, list(ANSWERS), "sampling parameters")
    assert [(record["prompt"], record["response"]) for record in records] == list(ANSWERS.items())
    assert [(record["format_reward"], record["reward"]) for record in records] == [(1, 1), (1, 0), (0, 0)]
    assert [json.loads(line) for line in Path("data/evaluate_vllm.jsonl").read_text().splitlines()] == records
    metrics = json.loads(Path("data/evaluate_vllm_metrics.json").read_text())
    assert list(metrics.pop("categories").values()) == [1, 1, 1]
    assert metrics == pytest.approx({"format_reward": 2 / 3, "answer_reward": 1 / 3, "reward": 1 / 3})
    given = evaluate_vllm(Scripted(), question_only_reward_fn, list(ANSWERS), "sampling parameters", ["2", "3", "4"])
    assert [record.pop("ground_truth") for record in given] == ["2", "3", "4"]
    assert given == records
