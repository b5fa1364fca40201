"""The ``math_baseline`` stage: zero-shot evaluation of the base model in each format."""

from __future__ import annotations

from typing import Any

from grpo.common.files import whole_folder, write_json
from grpo.common.records import read_problems
from grpo.evaluation.evaluator import CheckpointEvaluator, evaluate_checkpoint, stage_run
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN


def run_math_baseline(study: Study) -> dict[str, Any]:
    """Evaluate the base model zero-shot, and write all completions, examples of each outcome, and the metrics.

    Returns:
        for each prompt what :func:`grpo.evaluation.evaluator.evaluate_checkpoint` returns.
    """
    evaluator, prompts = CheckpointEvaluator(study, paths.model(MAIN)), study.evaluation.zero_shot_prompts
    problems = read_problems(paths.validation(MAIN))[: study.evaluation.zero_shot_problems]
    evaluator.require_room(problems, prompts)
    with whole_folder(paths.BASELINE) as folder:
        metrics = {prompt: evaluate_checkpoint(evaluator, problems, prompt, folder) for prompt in prompts}
    write_json(paths.BASELINE_METRICS, metrics)
    evaluator.forget_chunks(paths.BASELINE)
    for prompt, values in metrics.items():
        with stage_run(study, "math_baseline", prompt) as mlflow:
            mlflow.log({f"val/{key}": value for key, value in values.items() if isinstance(value, float)}, step=0)
            mlflow.artifact(paths.BASELINE / f"{prompt}_examples.md")
    return metrics
