"""Fine-tuning examples sampled from a teacher model: the ``sft_dataset`` stage with ``source: sampled``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.records import Problem, Rollout, read_problems
from grpo.evaluation.evaluator import CheckpointEvaluator
from grpo.models.source import folder_of
from grpo.study import paths
from grpo.study.config import SampledTraces
from grpo.study.schema import Study
from grpo.tasks.sft_dataset import Trace, build_sft_dataset
from grpo.tasks.task import Task, find_format


def sample_sft_dataset(
    study: Study, name: str, settings: SampledTraces, validation: Sequence[Problem], target: Path
) -> dict[str, Any]:
    """Sample the teacher's solutions of the training questions, and write them, right and wrong ones, to ``target``.

    Returns the report of :func:`build_sft_dataset`, with ``sampled``: the teacher, the number of responses, and the numbers
    left out. Raises UserError if the teacher cannot be loaded, lacks a chat template that it needs, or gave no usable response.
    """
    problems = read_problems(paths.train(name))
    if settings.questions is not None and settings.questions > len(problems):
        raise UserError(f"sft_datasets.{name}.questions: {settings.questions} are asked for, but there are {len(problems)}.")
    if settings.asked_in != settings.prompt:
        study.task(name).rewrite("", settings.asked_in, settings.prompt)  # refuse an unknown rewrite before sampling
    with folder_of(settings.model, f"sft_datasets.{name}.model") as folder:
        evaluator = _teacher(study, name, settings, folder)
        find_format(evaluator.task, settings.asked_in).encode(evaluator.tokenizer, "?")  # refuse a missing chat template
        groups = evaluator.sample(problems[: settings.questions], settings.asked_in, settings.samples)
    traces, counts = traces_of(evaluator.task, settings, [rollout for group in groups for rollout in group])
    if not traces:
        why = ", ".join(f"{reason}: {count}" for reason, count in counts.items() if reason != "responses")
        raise UserError(
            f"sft_datasets.{name}: of {counts['responses']} responses none can be used ({why}). "
            "Ask in another format, raise max_tokens, or take another model."
        )
    report = build_sft_dataset(evaluator.task, settings.source, settings.prompt, traces, validation, target)
    return report | {"sampled": {"teacher": settings.model.origin, "asked_in": settings.asked_in, **counts}}


def _teacher(study: Study, name: str, settings: SampledTraces, folder: Path) -> CheckpointEvaluator:
    """Load the teacher in place of the task's model, with the sampling settings of the data set."""
    sampling = settings.model_dump(include={"temperature", "top_p", "max_tokens", "seed"})
    evaluation = study.evaluation.model_copy(update=sampling)
    models = study.models | {name: settings.model}  # the engine uses the teacher's device
    asked = study.model_copy(update={"models": models, "evaluation": evaluation})
    return CheckpointEvaluator(asked, folder, name, limit=f"sft_datasets.{name}.max_tokens")


def traces_of(task: Task, settings: SampledTraces, rollouts: Sequence[Rollout]) -> tuple[list[Trace], dict[str, int]]:
    """Turn responses into traces in the format of the data set.

    Left out are responses cut off by the token limit, because they would teach the model not to end; repetitions; and, if the
    teacher was asked in another format, responses whose answer cannot be read. Returns the traces, and the number of responses,
    in total and left out by reason.
    """
    format, rewritten = find_format(task, settings.prompt), settings.asked_in != settings.prompt
    traces: dict[tuple[str, str], Trace] = {}
    counts = {"responses": len(rollouts), "cut_off": 0, "without_answer": 0, "repeated": 0}
    for rollout in rollouts:
        prompt, response = format.prompt_of(rollout.problem), rollout.completion.text
        found = task.rewrite(response, settings.asked_in, settings.prompt) if rewritten else response
        if rollout.completion.finish_reason == "length":
            counts["cut_off"] += 1
        elif found is None:
            counts["without_answer"] += 1
        elif (prompt, found) in traces:
            counts["repeated"] += 1
        else:
            traces[prompt, found] = (prompt, rollout.problem, found)
    return list(traces.values()), counts
