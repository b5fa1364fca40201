"""The ``best_of_n`` stage: several samples of each problem, and the accuracy of choosing among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo.common.files import atomic_folder, note_that_off, read_jsonl, write_json, write_text
from grpo.common.records import Rollout, read_problems
from grpo.evaluation.best_of_n import best_at_n, majority_at_n, pass_at_n, ranking_quality
from grpo.evaluation.episodes import transcript
from grpo.evaluation.evaluator import CheckpointEvaluator, stage_run
from grpo.grader.pool import grade_batch
from grpo.results.statistics import mean_over_problems
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN, BestOfN
from grpo.tasks.task import Format, find_format
from grpo.tracking.mlflow_study import flat


def run_best_of_n(study: Study) -> dict[str, Any]:
    """Sample the base model several times on each problem in each format, and write samples and estimates.

    Returns:
        for each prompt: for each N ``pass``, ``best`` and ``majority`` with 95% intervals over problems, and ``ranking``.
    """
    settings = study.evaluation.best_of_n
    evaluator = CheckpointEvaluator(study, paths.model(MAIN))
    problems = read_problems(paths.validation(MAIN))[: settings.problems]
    evaluator.require_room(problems, settings.prompts)
    metrics: dict[str, Any] = {}
    with atomic_folder(paths.BEST_OF_N) as folder:
        for prompt in settings.prompts:
            format = find_format(evaluator.task, prompt)
            groups = evaluator.sample(problems, prompt, n=settings.samples)
            lines = [json.dumps(_record(format, group), ensure_ascii=False) for group in groups]
            write_text(folder / f"{prompt}.jsonl", "\n".join(lines) + "\n")
            metrics[prompt] = with_zero_shot(study, prompt, estimates(settings, format, groups))
        if not settings.prompts:
            note_that_off(folder, "evaluation.best_of_n.prompts")
    write_json(paths.BEST_OF_N_METRICS, metrics)
    evaluator.forget_chunks(paths.BEST_OF_N)
    for prompt, values in metrics.items():
        with stage_run(study, "best_of_n", prompt, flat({"evaluation": {"best_of_n": settings.model_dump()}})) as mlflow:
            for n, kinds in values["n"].items():
                mlflow.log({f"{kind}_at_n": estimate["value"] for kind, estimate in kinds.items()}, step=int(n))
    return metrics


def estimates(settings: BestOfN, format: Format, groups: Sequence[Sequence[Rollout]]) -> dict[str, Any]:
    """Compute all estimates from one format's samples. A sample is right, or has the form, if its reward for that is 1."""
    correct = np.array([[float(r.rewards["answer_reward"] == 1.0) for r in group] for group in groups])
    scores = np.array([[mean_log_prob(r) for r in group] for group in groups])
    lengths = np.array([[r.length for r in group] for group in groups], dtype=float)
    formed = np.array([[float(r.rewards["format_reward"] == 1.0) for r in group] for group in groups])
    votes = np.array(votes_of([[format.read(r.completion.text) for r in group] for group in groups]))
    by_n = {
        str(n): {
            "pass": mean_over_problems(pass_at_n(correct, n)),
            "best": mean_over_problems(best_at_n(correct, scores, n)),
            "majority": mean_over_problems(majority_at_n(correct, votes, n)),
        }
        for n in settings.n
    }
    return {
        "problems": len(groups),
        "samples": settings.samples,
        "n": by_n,
        "ranking": ranking_quality(correct, scores, lengths, formed),
    }


def with_zero_shot(study: Study, prompt: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace the estimates for N = 1 by the zero-shot accuracy, if both stages asked the same problems in this format.

    The handout defines N = 1 by the zero-shot generations (NLPDL, homework 3, problem 2).

    Raises:
        UserError: the zero-shot generations are missing or damaged.
    """
    evaluation = study.evaluation
    same = evaluation.best_of_n.problems == evaluation.zero_shot_problems and prompt in evaluation.zero_shot_prompts
    if not same or "1" not in metrics["n"]:
        return metrics
    path = paths.BASELINE / f"{prompt}.jsonl"
    right = dict(read_jsonl(path, "math_baseline", lambda line: (line["problem"], float(line["answer_reward"] == 1.0))))
    figure = mean_over_problems(list(right.values()))
    return metrics | {"n": metrics["n"] | {"1": dict.fromkeys(metrics["n"]["1"], figure)}}


def mean_log_prob(rollout: Rollout) -> float:
    """Mean log-prob (nats) of the sampled tokens under the distribution that they were drawn from."""
    log_probs = rollout.completion.log_probs
    return sum(log_probs) / len(log_probs) if log_probs else 0.0


def votes_of(answers: Sequence[Sequence[str | None]]) -> list[list[int]]:
    """Number the answers of each problem: equal numbers for answers that the grader finds equal, -1 without an answer.

    An answer gets the number of the first answer that it equals.
    """
    distinct = [list(dict.fromkeys(a for a in of_problem if a)) for of_problem in answers]
    pairs = [(later, earlier) for of_problem in distinct for i, later in enumerate(of_problem) for earlier in of_problem[:i]]
    equal = {pair for pair, verdict in zip(pairs, grade_batch(pairs), strict=True) if verdict.equal}
    votes = []
    for of_problem, options in zip(answers, distinct, strict=True):
        number = {a: next((j for j, other in enumerate(options[:i]) if (a, other) in equal), i) for i, a in enumerate(options)}
        votes.append([number[a] if a else -1 for a in of_problem])
    return votes


def _record(format: Format, group: Sequence[Rollout]) -> dict[str, Any]:
    problem = group[0].problem
    return {
        "problem": problem.id,
        "level": problem.level,
        "subject": problem.subject,
        "ground_truth": problem.ground_truth,
        "samples": [
            {
                "response": transcript(r.completion),
                "answer": format.read(r.completion.text),
                "mean_log_prob": mean_log_prob(r),
                "response_length": r.length,
                "finish_reason": r.completion.finish_reason,
                **r.rewards,
            }
            for r in group
        ],
    }
