"""The page reports/answers.md: a section for each question, computed from result files or marked as an author's text."""

from __future__ import annotations

from typing import Any

from grpo.common.files import write_text
from grpo.reporting import asynchronous
from grpo.reporting.answers import ablations, off_policy, second_reading
from grpo.reporting.kissing_number import write_delivery
from grpo.reporting.record import Record
from grpo.reporting.sentences import render
from grpo.reporting.timing import seconds_of_arms
from grpo.reporting.wall_clock import times_of_steps
from grpo.reporting.what_it_would_take import table
from grpo.results.runs import by_arm, read_zero_shot
from grpo.results.verdicts import KL
from grpo.study import paths
from grpo.study.settings import MAIN


def write_answers(record: Record) -> None:
    """Write reports/answers.md and reports/kissing_number/. An experiment that the study leaves out has no section."""
    write_text(paths.ANSWERS, render("answers.md.j2", study=record.study, **answers(record)))
    write_delivery(record.study)


def answers(record: Record) -> dict[str, Any]:
    """Values for the page's template; an empty text or list leaves a section out."""
    study, numbers, runs = record.study, record.numbers, record.runs
    broad, focused = off_policy.sweeps(study)
    apart = times_of_steps(record.runs_with("staleness"))
    names = {question: name for name, question in ablations.asked_of_courses(study).items()}
    normalized, prompted = names.get("grpo_length_normalization"), names.get("grpo_prompt_ablation")
    measured_kl = [run for run in record.all_runs if KL in run.history]
    iterated = [n for name, n in numbers.items() if study.experiments[name].method == "expert_iteration"]
    prompts = study.evaluation.zero_shot_prompts if second_reading.is_mathematical(study.task(MAIN)) else []
    one_process = next((numbers[name] for name in study.with_report("colocated")), None)
    return {
        "unknown": record.unknown,
        "unknown_table": table(record.unknown["undecided"], seconds_of_arms(study)),
        "parser_or_model": [
            second_reading.judge(prompt, second_reading.read_records(prompt), second_reading.read_sampled(prompt))
            for prompt in prompts
        ],
        "asked": {question: numbers[name] for question, name in names.items()},
        "lengths": ablations.lengths_table(runs[normalized]) if normalized else "",
        "sweep_log": off_policy.log_of_broad(numbers[broad], runs[broad]) if broad else "",
        "sweep": off_policy.over_steps_and_wall_clock(numbers[focused]) if focused else [],
        "sweep_figure": focused if focused in study.with_report("wall_clock") else "",
        "entropy": off_policy.entropy_beside_expert_iteration(numbers[focused], iterated) if focused else "",
        "prompts": ablations.explain_prompts(numbers[prompted]) if prompted else [],
        "colocated": [text for name in study.with_report("colocated") for text in asynchronous.discuss_updates(numbers[name])],
        "asynchronous": [
            text for name in study.with_report("staleness") for text in asynchronous.discuss_effects(numbers[name], one_process)
        ],
        "overlap": asynchronous.dominates(apart) if apart else "",
        "growth": [ablations.growth(of_arm) for of_arm in by_arm(measured_kl).values()],
        "drift": ablations.goes_with(measured_kl) if measured_kl else "",
        "best_of_n": [second_reading.discuss_best_of_n(prompt, values) for prompt, values in record.sampled.items()],
        "samples": [
            second_reading.agreement(prompt, read_zero_shot(prompt), second_reading.read_first_and_all(prompt), values)
            for prompt, values in record.sampled.items()
            if prompt in study.evaluation.zero_shot_prompts
        ],
        "kissing_number": study.kissing_number is not None,
    }
