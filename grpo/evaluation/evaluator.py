"""Evaluation of a checkpoint in a task's format: completions, metrics, and examples to read; the stage ``math_baseline``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo.common.files import atomic_folder, files_digest, require_writable, write_json, write_jsonl, write_text
from grpo.common.process import start_threads
from grpo.common.records import Problem, Rollout, read_problems
from grpo.common.safe_text import MARKDOWN
from grpo.evaluation.evaluate import category, count_categories, evaluate, evaluation_sampling, summarize
from grpo.models import require_checkpoint
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.results.intervals import wilson_interval
from grpo.rollout.make_engine import make_engine
from grpo.rollout.sampling import Sampler, episode_measures, transcript
from grpo.study import paths
from grpo.study.config import MAIN
from grpo.study.schema import Study
from grpo.tasks.build import longest_prompt, within
from grpo.tasks.dataset import entry_of_file
from grpo.tasks.rewards import score_of
from grpo.tasks.task import find_format
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_params, study_state, study_tags

EXAMPLES_OF_EACH = 10


class CheckpointEvaluator:
    """Evaluator of a checkpoint, loaded once and sampled in several formats of a task.

    Raises UserError if the folder holds no checkpoint. ``task``: name of the task in the study. ``limit``: key of params.yaml
    that limits the response length, for messages.
    """

    def __init__(self, study: Study, checkpoint: Path, task: str = MAIN, limit: str = "evaluation.max_tokens"):
        require_checkpoint(checkpoint)
        start_threads(study.threads)
        study = study.for_task(task)
        self.study, self.task_name, self.task = study, task, study.task(task)
        self.limit = limit
        self.tokenizer = load_tokenizer(checkpoint)
        engine = study.engine
        model = None if engine.name == "vllm" else load_model(checkpoint, engine.dtype, engine.device)
        self.engine = make_engine(study, checkpoint, model, self.tokenizer)

    def require_context_length(self, problems: Sequence[Problem], prompts: Sequence[str]) -> None:
        """Refuse problems that are too long for the model in one of these formats, before sampling.

        Raises UserError as :func:`grpo.rollout.engine.require_context_length`.
        """
        max_tokens = self.study.evaluation.max_tokens
        for prompt in prompts:
            self._sampler(prompt).require_context_length(problems, max_tokens, self.limit, f"tasks.{self.task_name}")

    def sample(self, problems: Sequence[Problem], prompt: str, n: int = 1) -> list[list[Rollout]]:
        """Sample and score ``n`` completions of each problem."""
        self.require_context_length(problems, [prompt])
        settings, sampler = self.study.evaluation, self._sampler(prompt)
        return evaluate(sampler, problems, evaluation_sampling(settings, sampler.format), settings.seed, n, progress=True)

    def _sampler(self, prompt: str) -> Sampler:
        reward = self.study.grpo.reward if self.study.metric == "reward" else None
        return Sampler(self.engine, self.tokenizer, find_format(self.task, prompt), score_of(self.task, prompt, reward))


def evaluate_checkpoint(
    evaluator: CheckpointEvaluator, problems: Sequence[Problem], prompt: str, folder: Path
) -> dict[str, Any]:
    """Evaluate one completion of each problem, and write PROMPT.jsonl and PROMPT_examples.md into ``folder``.

    Returns:
        counts of the three outcomes, mean rewards, and accuracy with a 95% Wilson interval, overall, by level and by subject.
    """
    rollouts = [rollout for (rollout,) in evaluator.sample(problems, prompt)]
    read = find_format(evaluator.task, prompt).read
    records = [_record(read(r.completion.text), r, evaluator.tokenizer) for r in rollouts]
    write_jsonl(folder / f"{prompt}.jsonl", records)
    write_text(folder / f"{prompt}_examples.md", examples_to_read(prompt, records))
    return {
        "problems": len(rollouts),
        "categories": count_categories([category(r.rewards) for r in rollouts]),
        **summarize(rollouts),
        **episode_measures(rollouts),
        "accuracy": _accuracy(rollouts),
        "accuracy_by_level": _accuracy_by(rollouts, lambda r: str(r.problem.level)),
        "accuracy_by_subject": _accuracy_by(rollouts, lambda r: r.problem.subject),
    }


Measure = Callable[[CheckpointEvaluator, Sequence[Problem], str, Path], dict[str, Any]]


def evaluate_any(
    study: Study, checkpoint: Path, task: str, prompt: str, problems: Sequence[Problem], folder: Path
) -> dict[str, Any]:
    """Evaluate any checkpoint on problems of a task of the study (:func:`evaluate_checkpoint`).

    Raises UserError if the task or prompt is unknown, there is no checkpoint, or ``folder`` cannot be written.
    """
    find_format(study.task(task), prompt)
    require_checkpoint(checkpoint)
    require_writable(folder)
    return evaluate_checkpoint(CheckpointEvaluator(study, checkpoint, task), problems, prompt, folder)


def _accuracy_by(rollouts: list[Rollout], key: Callable[[Rollout], str]) -> dict[str, dict[str, float]]:
    parts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        parts.setdefault(key(rollout) or "not stated", []).append(rollout)
    return {name: _accuracy(parts[name]) for name in sorted(parts)}


def _accuracy(rollouts: list[Rollout]) -> dict[str, float]:
    correct = sum(r.rewards["answer_reward"] for r in rollouts)
    low, high = wilson_interval(correct, len(rollouts))
    return {"value": correct / len(rollouts), "low": low, "high": high, "problems": len(rollouts)}


def _record(answer: str | None, rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    return {
        "problem": rollout.problem.id,
        "level": rollout.problem.level,
        "subject": rollout.problem.subject,
        "prompt": tokenizer.decode(rollout.prompt_ids),
        "response": transcript(rollout.completion),
        "answer": answer,
        "ground_truth": rollout.problem.ground_truth,
        "category": category(rollout.rewards),
        **rollout.rewards,
        "timed_out": rollout.timed_out,
        "finish_reason": rollout.completion.finish_reason,
        "response_length": rollout.length,
    }


def examples_to_read(prompt: str, records: list[dict[str, Any]]) -> str:
    """Write a page of examples of each outcome, on which a person can check the answer parser."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # training needs no page

    kinds = []
    for name, count in count_categories([r["category"] for r in records]).items():
        step = max(1, count // EXAMPLES_OF_EACH)
        shown = [r for r in records if r["category"] == name][::step][:EXAMPLES_OF_EACH]
        kinds.append({"name": name, "all": count, "shown": shown})
    environment = Environment(loader=PackageLoader("grpo.evaluation"), undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= MARKDOWN
    page = environment.get_template("examples.md.j2").render(prompt=prompt, total=len(records), kinds=kinds)
    return page.removesuffix("\n")


@contextmanager
def stage_run(
    study: Study, stage: str, name: str, params: Mapping[str, Any] = MappingProxyType({}), task: str = MAIN
) -> Iterator[MlflowRun]:
    """Give the block a run in MLflow, STAGE/NAME, for one format of a stage that evaluates models (by default ``name``)."""
    tags = study_tags(study, task) | {
        "experiment": stage,
        "stage": stage,
        "model_digest": files_digest(paths.model(task)),
        "dataset_digest": files_digest(paths.validation(task)),
    }
    given = {**study_params(study, task), "prompt": name, **params}
    mlflow = MlflowRun(study.study, f"{stage}/{name}", given, tags, study_state(study))
    yield mlflow
    mlflow.finish()


def run_math_baseline(study: Study) -> dict[str, Any]:
    """Evaluate the base model zero-shot, and write all completions, examples of each outcome, and the metrics.

    Returns for each prompt what :func:`evaluate_checkpoint` returns.
    """
    evaluator, prompts = CheckpointEvaluator(study, paths.model(MAIN)), study.evaluation.zero_shot_prompts
    problems = read_problems(paths.validation(MAIN))[: study.evaluation.zero_shot_problems]
    evaluator.require_context_length(problems, prompts)
    with atomic_folder(paths.BASELINE) as folder:
        metrics = {prompt: evaluate_checkpoint(evaluator, problems, prompt, folder) for prompt in prompts}
    write_json(paths.BASELINE_METRICS, metrics)
    for prompt, values in metrics.items():
        with stage_run(study, "math_baseline", prompt) as mlflow:
            mlflow.log({f"val/{key}": value for key, value in values.items() if isinstance(value, float)}, step=0)
            mlflow.artifact(paths.BASELINE / f"{prompt}_examples.md")
    return metrics


def evaluate_file(study: Study, file: Path, folder: Path, prompts: Sequence[str], measure: Measure) -> dict[str, Any]:
    """Ask the study's base model the questions of a file (:func:`entry_of_file`), and write what the stage writes.

    Questions that are too long for the model's context are left out, which is printed. ``measure``:
    :func:`evaluate_checkpoint`, or :func:`grpo.evaluation.best_of_n.sample_checkpoint`. Returns what ``measure`` returns for
    each prompt; also in ``folder``/metrics.json. Raises UserError if a row is unusable, no question fits, or the task lacks one
    of the prompts.
    """
    study = study.model_copy(update={"tasks": {**study.tasks, MAIN: entry_of_file(file)}})
    task = study.task(MAIN)
    problems = task.problems("validation")
    evaluator = CheckpointEvaluator(study, paths.model(MAIN))
    if (context := evaluator.engine.context) is not None:
        limit = context - study.evaluation.max_tokens
        fitting, too_long = within(problems, limit, partial(longest_prompt, task, prompts, evaluator.tokenizer))
        if fitting and too_long:
            print(f"{len(too_long)} of {len(problems)} questions are too long for the model's context and are left out")
        problems = fitting or problems
    evaluator.require_context_length(problems, prompts)
    with atomic_folder(folder) as target:
        metrics = {prompt: measure(evaluator, problems, prompt, target) for prompt in prompts}
        write_json(target / "metrics.json", metrics)
    return metrics
