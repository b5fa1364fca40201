"""reports/answers.md: a short section for each question, each computed from result files or marked as an author's text."""

from __future__ import annotations

from typing import Any

from grpo.common.files import write_text
from grpo.reporting.answers.drift import goes_with, runs_with_kl
from grpo.reporting.answers.kissing import write_delivery
from grpo.reporting.answers.lengths import comparisons, measured
from grpo.reporting.answers.off_policy import (
    entropy_beside_expert_iteration,
    log_of_broad,
    over_steps_and_wall_clock,
    sweeps,
)
from grpo.reporting.answers.overlap import asynchronous_variants, dominates
from grpo.reporting.answers.parser_or_model import judge, read_records
from grpo.reporting.answers.prompts import explain, prompt_ablations
from grpo.reporting.answers.samples import agreement, read_first_and_all, read_zero_shot
from grpo.reporting.sections import templates
from grpo.reporting.timing import seconds_of_arms
from grpo.reporting.what_it_would_take import read_contents, table
from grpo.results.runs import read_best_of_n
from grpo.study import paths
from grpo.study.schema import Study


def write_answers(study: Study) -> None:
    """Write reports/answers.md and reports/kissing_number/. What the study leaves out has no section.

    Raises:
        UserError: a result file is missing or damaged.
    """
    text = templates().get_template("answers.md.j2").render(study=study, **answers(study))
    write_text(paths.ANSWERS, text)
    write_delivery(study)


def answers(study: Study) -> dict[str, Any]:
    """What the page's template is filled with; an empty text or list where the study has nothing to say of a question."""
    unknown = read_contents()
    broad, focused = sweeps(study)
    measured_kl = runs_with_kl(study)
    apart = asynchronous_variants(study)
    sampled = read_best_of_n(study)
    return {
        "unknown": unknown,
        "unknown_table": table(unknown["undecided"], seconds_of_arms(study)),
        "parser_or_model": [judge(prompt, read_records(prompt)) for prompt in study.evaluation.zero_shot_prompts],
        "lengths": [measured(study, name) for name in comparisons(study)],
        "sweep_log": log_of_broad(study, broad) if broad else "",
        "sweep": over_steps_and_wall_clock(study, focused) if focused else "",
        "sweep_figure": focused if focused in study.with_report("wall_clock") else "",
        "entropy": entropy_beside_expert_iteration(study, focused) if focused else "",
        "prompts": [explain(study, name) for name in prompt_ablations(study)],
        "overlap": dominates(apart) if apart else "",
        "drift": goes_with(measured_kl) if measured_kl else "",
        "samples": [
            agreement(prompt, read_zero_shot(prompt), read_first_and_all(prompt), values)
            for prompt, values in sampled.items()
            if prompt in study.evaluation.zero_shot_prompts
        ],
        "kissing_number": study.kissing_number is not None,
    }
