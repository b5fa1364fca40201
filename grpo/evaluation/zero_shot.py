"""The ``math_baseline`` stage: the base model without any training, under each prompt."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from grpo import paths
from grpo.evaluation.evaluate import CATEGORIES, category, evaluate, evaluation_sampling, summarize
from grpo.evaluation.statistics import wilson_interval
from grpo.files import files_digest, whole_folder, write_json, write_text
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.records import Rollout, read_problems
from grpo.rewards import REWARD_FNS
from grpo.rollout.engine import derive_seed
from grpo.rollout.make import make_engine
from grpo.study import Study
from grpo.tracking import MlflowRun

EXAMPLES_OF_EACH = 10


def run_math_baseline(study: Study) -> dict[str, Any]:
    """Evaluate the base model zero-shot, write every completion, examples of each outcome to read, and the metrics.

    Returns:
        for each prompt the counts of the three outcomes, the means of the rewards, and accuracy with a 95% Wilson
        interval, overall and by level.
    """
    torch.set_num_threads(study.threads)
    tokenizer = load_tokenizer(paths.MODEL)
    model = load_model(paths.MODEL, study.engine.dtype, study.engine.device)
    engine = make_engine(study, model, tokenizer)
    problems = read_problems(paths.VALIDATION)[: study.evaluation.zero_shot_problems]
    metrics: dict[str, Any] = {}
    with whole_folder(paths.BASELINE) as folder:
        for prompt in study.evaluation.zero_shot_prompts:
            sampling = evaluation_sampling(study.evaluation, prompt)
            rollouts = evaluate(
                engine, tokenizer, problems, prompt, sampling, REWARD_FNS[prompt], derive_seed(study.evaluation.seed)
            )
            metrics[prompt] = _metrics(rollouts)
            records = [_record(r, tokenizer) for r in rollouts]
            write_text(folder / f"{prompt}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
            write_text(folder / f"{prompt}_examples.md", examples_to_read(prompt, records))
    write_json(paths.BASELINE_METRICS, metrics)
    _track(study, metrics)
    return metrics


def _metrics(rollouts: list[Rollout]) -> dict[str, Any]:
    n = len(rollouts)
    counts = Counter(category(r.rewards) for r in rollouts)
    by_level = {}
    for level in sorted({r.problem.level for r in rollouts}):
        of_level = [r for r in rollouts if r.problem.level == level]
        by_level[str(level)] = _accuracy(of_level)
    return {
        "problems": n,
        "categories": {name: counts[name] for name in CATEGORIES},
        **summarize(rollouts),
        "accuracy": _accuracy(rollouts),
        "accuracy_by_level": by_level,
    }


def _accuracy(rollouts: list[Rollout]) -> dict[str, float]:
    correct = sum(r.rewards["answer_reward"] for r in rollouts)
    low, high = wilson_interval(correct, len(rollouts))
    return {"value": correct / len(rollouts), "low": low, "high": high, "problems": len(rollouts)}


def _record(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    return {
        "problem": rollout.problem.id,
        "level": rollout.problem.level,
        "subject": rollout.problem.subject,
        "prompt": tokenizer.decode(rollout.prompt_ids),
        "response": rollout.completion.text,
        "ground_truth": rollout.problem.ground_truth,
        "category": category(rollout.rewards),
        **rollout.rewards,
        "finish_reason": rollout.completion.finish_reason,
        "response_length": len(rollout.completion.token_ids),
    }


def examples_to_read(prompt: str, records: list[dict[str, Any]]) -> str:
    """A page on which a person can judge parser against model: the first examples of each outcome."""
    lines = [f"# Zero-shot examples under the {prompt} prompt", ""]
    for name in CATEGORIES:
        of_kind = [r for r in records if r["category"] == name]
        shown = of_kind[:EXAMPLES_OF_EACH]
        lines += [f"## {name}: {len(of_kind)} of {len(records)}, {len(shown)} shown", ""]
        for record in shown:
            lines += [
                f"**{record['problem']}**, ground truth `{record['ground_truth']}`, {record['response_length']} tokens",
                "",
            ]
            lines += ["````text", f"{record['prompt']}⟶{record['response']}", "````", ""]
    return "\n".join(lines)


def _track(study: Study, metrics: dict[str, Any]) -> None:
    tags = {
        "stage": "math_baseline",
        "model_digest": files_digest(paths.MODEL),
        "dataset_digest": files_digest(paths.VALIDATION),
    }
    for prompt, values in metrics.items():
        mlflow = MlflowRun("math_baseline", prompt, study.evaluation.model_dump() | {"prompt": prompt}, tags)
        mlflow.log({f"val/{key}": value for key, value in values.items() if isinstance(value, float)}, step=0)
        mlflow.artifact(paths.BASELINE / f"{prompt}_examples.md")
        mlflow.finish()
