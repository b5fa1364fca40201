"""Zero-shot evaluation of the base model in each format: the ``math_baseline`` stage, or on the problems of a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from grpo.common.files import atomic_folder, write_json
from grpo.common.records import read_problems
from grpo.evaluation.evaluator import CheckpointEvaluator, evaluate_checkpoint, stage_run
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN
from grpo.tasks.build import longest_prompt, within


def run_math_baseline(study: Study) -> dict[str, Any]:
    """Evaluate the base model zero-shot, and write all completions, examples of each outcome, and the metrics.

    Returns:
        for each prompt what :func:`grpo.evaluation.evaluator.evaluate_checkpoint` returns.
    """
    evaluator, prompts = CheckpointEvaluator(study, paths.model(MAIN)), study.evaluation.zero_shot_prompts
    problems = read_problems(paths.validation(MAIN))[: study.evaluation.zero_shot_problems]
    evaluator.require_room(problems, prompts)
    with atomic_folder(paths.BASELINE) as folder:
        metrics = {prompt: evaluate_checkpoint(evaluator, problems, prompt, folder) for prompt in prompts}
    write_json(paths.BASELINE_METRICS, metrics)
    evaluator.forget_chunks(paths.BASELINE)
    for prompt, values in metrics.items():
        with stage_run(study, "math_baseline", prompt) as mlflow:
            mlflow.log({f"val/{key}": value for key, value in values.items() if isinstance(value, float)}, step=0)
            mlflow.artifact(paths.BASELINE / f"{prompt}_examples.md")
    return metrics


def evaluate_file(study: Study, file: Path, folder: Path) -> dict[str, Any]:
    """Evaluate the base model zero-shot on the problems of a file that GSM8K's task reads, and write what the stage writes.

    Questions that are too long for the model's context are left out, which is printed.

    Returns:
        as :func:`run_math_baseline`; also in ``folder``/metrics.json.

    Raises:
        UserError: a row is unusable, no question fits, or GSM8K's task lacks one of the study's zero-shot prompts.
    """
    gsm8k = {"use": "gsm8k", "source": {"train": str(file), "validation": str(file)}}
    study = study.model_copy(update={"tasks": {**study.tasks, MAIN: gsm8k}})
    task, prompts = study.task(MAIN), study.evaluation.zero_shot_prompts
    problems = task.problems("validation")
    evaluator = CheckpointEvaluator(study, paths.model(MAIN))
    if (context := evaluator.engine.context) is not None:
        limit = context - study.evaluation.max_tokens
        fitting, too_long = within(problems, limit, partial(longest_prompt, task, prompts, evaluator.tokenizer))
        if fitting and too_long:
            print(f"{len(too_long)} of {len(problems)} questions are too long for the model's context and are left out")
        problems = fitting or problems
    evaluator.require_room(problems, prompts)
    with atomic_folder(folder) as target:
        metrics = {prompt: evaluate_checkpoint(evaluator, problems, prompt, target) for prompt in prompts}
        write_json(target / "metrics.json", metrics)
    evaluator.forget_chunks()
    return metrics
