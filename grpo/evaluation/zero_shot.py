"""The ``math_baseline`` stage: zero-shot evaluation of the base model in each format."""

from __future__ import annotations

from typing import Any

from grpo.common.files import files_digest, whole_folder, write_json
from grpo.common.records import read_problems
from grpo.evaluation.evaluator import CheckpointEvaluator, evaluate_checkpoint
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_params, study_state, study_tags


def run_math_baseline(study: Study) -> dict[str, Any]:
    """Evaluate the base model zero-shot, and write all completions, examples of each outcome, and the metrics.

    Returns:
        for each prompt what :func:`grpo.evaluation.evaluator.evaluate_checkpoint` returns.
    """
    evaluator = CheckpointEvaluator(study, paths.model(MAIN))
    problems = read_problems(paths.validation(MAIN))[: study.evaluation.zero_shot_problems]
    evaluator.require_room(problems, study.evaluation.zero_shot_prompts)
    with whole_folder(paths.BASELINE) as folder:
        metrics: dict[str, Any] = {
            p: evaluate_checkpoint(evaluator, problems, p, folder) for p in study.evaluation.zero_shot_prompts
        }
    write_json(paths.BASELINE_METRICS, metrics)
    evaluator.forget_chunks(paths.BASELINE)
    _track(study, metrics)
    return metrics


def _track(study: Study, metrics: dict[str, Any]) -> None:
    tags = study_tags(study) | {
        "experiment": "math_baseline",
        "stage": "math_baseline",
        "model_digest": files_digest(paths.model(MAIN)),
        "dataset_digest": files_digest(paths.validation(MAIN)),
    }
    state = study_state(study)
    for prompt, values in metrics.items():
        mlflow = MlflowRun(study.study, f"math_baseline/{prompt}", study_params(study) | {"prompt": prompt}, tags, state)
        mlflow.log({f"val/{key}": value for key, value in values.items() if isinstance(value, float)}, step=0)
        mlflow.artifact(paths.BASELINE / f"{prompt}_examples.md")
        mlflow.finish()
