"""Examples to fine-tune on that another model samples: the stage ``sft_dataset`` with ``source: sampled``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.records import Problem, Rollout, read_problems
from grpo.evaluation.evaluator import CheckpointEvaluator
from grpo.models.source import folder_of
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import HubModel, SampledTraces
from grpo.tasks.sft_dataset import Trace, build_sft_dataset
from grpo.tasks.task import Task, find_format


def sample_sft_dataset(
    study: Study, name: str, settings: SampledTraces, validation: Sequence[Problem], target: Path
) -> dict[str, Any]:
    """Ask the teacher the training questions, and write its solutions to ``target``, right and wrong ones.

    A killed sampling goes on where it was, to the same bits.

    Args:
        name: the task's in the study.
        validation: its validation problems.

    Returns:
        the report of :func:`build_sft_dataset`, and ``sampled``: who was asked, how many responses there were, and how many
        of them were left out.

    Raises:
        UserError: the teacher cannot be loaded, has no chat template where it is asked in a chat, or solved nothing.
    """
    problems = read_problems(paths.train(name))
    if settings.questions is not None and settings.questions > len(problems):
        raise UserError(f"sft_datasets.{name}.questions: {settings.questions} are asked for, but there are {len(problems)}.")
    if settings.asked_in != settings.prompt:
        study.task(name).rewrite("", settings.asked_in, settings.prompt)  # refuses what it does not know now, not in an hour
    evaluator = _teacher(study, name, settings)
    find_format(evaluator.task, settings.asked_in).encode(evaluator.tokenizer, "?")  # refuses where there is no chat template
    groups = evaluator.sample(problems[: settings.questions], settings.asked_in, settings.samples)
    traces, counts = traces_of(evaluator.task, settings, [rollout for group in groups for rollout in group])
    if not traces:
        why = ", ".join(f"{reason}: {count}" for reason, count in counts.items() if reason != "responses")
        raise UserError(
            f"sft_datasets.{name}: of {counts['responses']} responses none can be used ({why}). "
            "Ask in another format, raise max_tokens, or take another model."
        )
    report = build_sft_dataset(evaluator.task, settings.source, settings.prompt, traces, validation, target)
    evaluator.forget_chunks(target.parent)
    model = settings.model
    teacher = f"{model.repo} at {model.revision}" if isinstance(model, HubModel) else model.path
    return report | {"sampled": {"teacher": teacher, "asked_in": settings.asked_in, **counts}}


def _teacher(study: Study, name: str, settings: SampledTraces) -> CheckpointEvaluator:
    """The teacher in the place of the task's model, to be sampled as the settings say."""
    sampling = settings.model_dump(include={"temperature", "top_p", "max_tokens", "seed"})
    evaluation = study.evaluation.model_copy(update=sampling)
    models = study.models | {name: settings.model}  # whose device counts, not that of the model that learns
    asked = study.model_copy(update={"models": models, "evaluation": evaluation})
    folder = folder_of(settings.model, f"sft_datasets.{name}.model")
    return CheckpointEvaluator(asked, folder, name, limit=f"sft_datasets.{name}.max_tokens")


def traces_of(task: Task, settings: SampledTraces, rollouts: Sequence[Rollout]) -> tuple[list[Trace], dict[str, int]]:
    """The responses as traces in the format that these are to have.

    Responses that the token limit cut teach not to end, and are left out; so are those whose answer cannot be read, unless they
    stand in the format that was asked for, and repetitions.

    Returns:
        the traces, and how many responses there were and were left out, by reason.
    """
    format, rewritten = find_format(task, settings.prompt), settings.asked_in != settings.prompt
    traces: dict[tuple[str, str], Trace] = {}
    counts = {"responses": len(rollouts), "cut_off": 0, "without_answer": 0, "repeated": 0}
    for rollout in rollouts:
        prompt, response = format.prompt(rollout.problem.question), rollout.completion.text
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
