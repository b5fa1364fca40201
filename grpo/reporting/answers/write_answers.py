"""The page reports/answers.md: a section for each question, computed from result files or marked as an author's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.common.files import write_text
from grpo.reporting.answers.courses import asked_of_courses
from grpo.reporting.answers.drift import goes_with, growth
from grpo.reporting.answers.kissing import write_delivery
from grpo.reporting.answers.lengths import lengths_table
from grpo.reporting.answers.off_policy import (
    entropy_beside_expert_iteration,
    log_of_broad,
    over_steps_and_wall_clock,
    read_ranking,
    sweeps,
)
from grpo.reporting.answers.overlap import asynchronous_variants, dominates
from grpo.reporting.answers.parser_or_model import is_mathematical, judge, read_records, read_sampled
from grpo.reporting.answers.prompts import explain
from grpo.reporting.answers.samples import agreement, read_first_and_all
from grpo.reporting.answers.side_by_side import asynchronous, colocated
from grpo.reporting.baseline import discuss_best_of_n
from grpo.reporting.discussion import Numbers
from grpo.reporting.sentences import templates
from grpo.reporting.timing import seconds_of_arms
from grpo.reporting.what_it_would_take import read_contents, table
from grpo.results.runs import by_arm, read_best_of_n, read_zero_shot
from grpo.results.verdicts import KL
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN


def write_answers(study: Study, numbers: Mapping[str, Numbers]) -> None:
    """Write reports/answers.md and reports/kissing_number/. An experiment that the study leaves out has no section.

    Args:
        numbers: experiment -> :func:`grpo.reporting.discussion.numbers_of`.

    Raises:
        UserError: a result file is missing or damaged.
    """
    write_text(paths.ANSWERS, templates().get_template("answers.md.j2").render(study=study, **answers(study, numbers)))
    write_delivery(study)


def answers(study: Study, numbers: Mapping[str, Numbers]) -> dict[str, Any]:
    """Values for the page's template; an empty text or list leaves a section out."""
    unknown = read_contents()
    broad, focused = sweeps(study)
    apart, sampled = asynchronous_variants(study), read_best_of_n(study)
    asked = {question: numbers[name] for name, question in asked_of_courses(study).items()}
    measured_kl = [run for n in numbers.values() for run in _runs(n) if KL in run.history]
    iterated = [n for name, n in numbers.items() if study.experiments[name].method == "expert_iteration"]
    prompts = study.evaluation.zero_shot_prompts if is_mathematical(study.task(MAIN)) else []
    return {
        "unknown": unknown,
        "unknown_table": table(unknown["undecided"], seconds_of_arms(study)),
        "parser_or_model": [judge(prompt, read_records(prompt), read_sampled(prompt)) for prompt in prompts],
        "asked": asked,
        "lengths": lengths_table(_runs(asked["grpo_length_normalization"])) if "grpo_length_normalization" in asked else "",
        "sweep_log": log_of_broad(numbers[broad], _runs(numbers[broad]), read_ranking(broad)) if broad else "",
        "sweep": over_steps_and_wall_clock(numbers[focused]) if focused else [],
        "sweep_figure": focused if focused in study.with_report("wall_clock") else "",
        "entropy": entropy_beside_expert_iteration(numbers[focused], iterated) if focused else "",
        "prompts": explain(asked["grpo_prompt_ablation"]) if "grpo_prompt_ablation" in asked else [],
        "colocated": [text for name in study.with_report("colocated") for text in colocated(numbers[name])],
        "asynchronous": [
            text
            for name in study.with_report("staleness")
            for text in asynchronous(numbers[name], next((numbers[one] for one in study.with_report("colocated")), None))
        ],
        "overlap": dominates(apart) if apart else "",
        "growth": [growth(runs) for runs in by_arm(measured_kl).values()],
        "drift": goes_with(measured_kl) if measured_kl else "",
        "best_of_n": [discuss_best_of_n(prompt, values) for prompt, values in sampled.items()],
        "samples": [
            agreement(prompt, read_zero_shot(prompt), read_first_and_all(prompt), values)
            for prompt, values in sampled.items()
            if prompt in study.evaluation.zero_shot_prompts
        ],
        "kissing_number": study.kissing_number is not None,
    }


def _runs(numbers: Numbers) -> list[Any]:
    return [run for arm in numbers["arms"] for run in arm["all"]]
