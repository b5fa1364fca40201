"""reports/answers.md: a short section for each question, each computed from result files or marked as an author's text."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.files import write_text
from grpo.reporting import what_it_would_take
from grpo.reporting.answers import drift, lengths, off_policy, overlap, parser_or_model, prompts, samples
from grpo.reporting.answers.kissing import write_delivery
from grpo.reporting.timing import seconds_of_arms
from grpo.results.runs import read_best_of_n
from grpo.study import paths
from grpo.study.schema import Study


def write_answers(study: Study) -> None:
    """Write reports/answers.md and reports/kissing_number/. What the study leaves out has no section.

    Raises:
        UserError: a result file is missing or damaged.
    """
    environment = Environment(
        loader=PackageLoader("grpo.reporting"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("answers.md.j2").render(study=study, **answers(study))
    write_text(paths.ANSWERS, text)
    write_delivery(study)


def answers(study: Study) -> dict[str, Any]:
    """What the page's template is filled with; an empty text or list where the study has nothing to say of a question."""
    unknown = what_it_would_take.read_contents()
    broad, focused = off_policy.sweeps(study)
    measured_kl = drift.runs_with_kl(study)
    apart = overlap.asynchronous_variants(study)
    sampled = read_best_of_n(study)
    return {
        "unknown": unknown,
        "unknown_table": what_it_would_take.table(unknown["undecided"], seconds_of_arms(study)),
        "parser_or_model": [
            parser_or_model.judge(prompt, parser_or_model.read_records(prompt)) for prompt in study.evaluation.zero_shot_prompts
        ],
        "lengths": [lengths.measured(study, name) for name in lengths.comparisons(study)],
        "sweep_log": off_policy.log_of_broad(study, broad) if broad else "",
        "sweep": off_policy.over_steps_and_wall_clock(study, focused) if focused else "",
        "sweep_figure": focused if focused in study.with_report("wall_clock") else "",
        "entropy": off_policy.entropy_beside_expert_iteration(study, focused) if focused else "",
        "prompts": [prompts.explain(study, name) for name in prompts.prompt_ablations(study)],
        "overlap": overlap.dominates(apart) if apart else "",
        "drift": drift.goes_with(measured_kl) if measured_kl else "",
        "samples": [
            samples.agreement(prompt, samples.read_zero_shot(prompt), samples.read_first_and_all(prompt), values)
            for prompt, values in sampled.items()
            if prompt in study.evaluation.zero_shot_prompts
        ],
        "kissing_number": study.kissing_number is not None,
    }
