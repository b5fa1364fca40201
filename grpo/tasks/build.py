"""The ``dataset`` stage: problems of the study's task, checked and split."""

from __future__ import annotations

from collections import Counter
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import files_digest, whole_folder, write_json
from grpo.common.records import Problem, write_records
from grpo.grader.grader import check_ground_truth
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.sections import ArithmeticTask
from grpo.tasks import arithmetic, gsm8k, math
from grpo.tasks.overlap import separate


def build_dataset(study: Study) -> dict[str, Any]:
    """Load or generate the problems, refuse an overlap of the splits, and write them as JSONL with a report.

    Returns:
        the report: sizes, levels, dropped problems, and a digest of each split.

    Raises:
        UserError: a missing source, an overlap, a ground truth the grader cannot read, or too few problems.
    """
    if isinstance(study.task, ArithmeticTask):
        train, validation = arithmetic.load(study.task)
        dropped: list[str] = []
        for problem in (*train, *validation):
            check_ground_truth(problem.ground_truth)
    else:
        loader = {"math": math.load, "gsm8k": gsm8k.load}[study.task.name]
        train, validation, dropped = separate(*loader(study.task), study.task.drop_overlap)
    _check_sizes(study, train, validation)
    with whole_folder(paths.TRAIN.parent) as folder:
        write_records(folder / paths.TRAIN.name, train)
        write_records(folder / paths.VALIDATION.name, validation)
    report = {
        "task": study.task.name,
        "train": _describe(train) | {"digest": files_digest(paths.TRAIN)},
        "validation": _describe(validation) | {"digest": files_digest(paths.VALIDATION)},
        "dropped_from_train_as_overlap": dropped,
    }
    write_json(paths.DATASET_REPORT, report)
    return report


def _describe(problems: list[Problem]) -> dict[str, Any]:
    levels = Counter(problem.level for problem in problems)
    return {"problems": len(problems), "levels": {str(level): levels[level] for level in sorted(levels)}}


def _check_sizes(study: Study, train: list[Problem], validation: list[Problem]) -> None:
    needed = study.grpo.n_prompts_per_rollout_batch
    if len(train) < needed:
        raise UserError(
            f"task: {len(train)} training problems are fewer than the {needed} of one rollout batch. Use a larger source."
        )
    evaluation = study.evaluation
    asked = {key: getattr(evaluation, key) for key in ("problems", "zero_shot_problems")}
    sampled = {"best_of_n.problems": evaluation.best_of_n.problems} if evaluation.best_of_n.prompts else {}
    for key, wanted in (asked | sampled).items():
        if len(validation) < wanted:
            raise UserError(
                f"params.yaml: evaluation.{key}: {wanted} problems are asked for, but the validation split has "
                f"{len(validation)}. Lower it."
            )
