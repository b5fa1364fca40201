"""Estimate what a study takes before it runs: runs, steps, GPU-hours and cost on three kinds of card.

The unit of work is a step of 256 rollouts of at most 1,024 tokens that Qwen2.5-Math-1.5B samples and is trained on once. A run
that equals an earlier one costs nothing. Which ones do depends on winners: the pinned arm, or else an experiment's first, is
assumed to win.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from grpo.commands.gpu_memory import shape_of, text_table
from grpo.commands.power import power, power_table
from grpo.common.files import read_json
from grpo.reporting.writeup import read_timing_table
from grpo.study import paths
from grpo.study.config import MAIN, EvaluationSteps, ExpertIterationConfig, RunConfig, SftConfig
from grpo.study.effective import EffectiveRun, digest, effective_run
from grpo.study.schema import Study

# Seconds of a unit of work, and USD an hour.
CARDS = {"RTX 4090": (84.0, 0.5), "H100": (30.0, 2.5), "H200": (14.0, 3.5)}
PARAMETERS, ROLLOUTS, TOKENS = 1_543_714_304, 256, 1024  # of a unit
SAMPLING, TRAINING = 0.56, 0.44  # shares of a unit's time: medians of 7.8 s and 6.2 s on the H200
WITHOUT_SIGNAL = 0.5  # share of sampled groups that dynamic sampling replaces in each round
# H100-hours that CS336's assignment 5 (2025) gives its problems; those of the off-policy sweep are for both of ours.
BUDGETS = {
    **dict.fromkeys(("sft_experiment", "grpo_baselines", "grpo_length_normalization", "grpo_group_standard_deviation"), "2"),
    **dict.fromkeys(("grpo_off_policy_clip_ablation", "grpo_prompt_ablation"), "2"),
    **dict.fromkeys(("expert_iteration_experiment", "grpo_learning_rate"), "6"),
    "grpo_off_policy_sweep_broad": "12",
}
HEADS = ("experiment", "runs", "taken over", "steps")
NOTES = """\
known: seconds a step of 256 x 1,024 tokens, Qwen2.5-Math-1.5B: RTX 4090 84, H100 30 (Garg 2026); H200 14 (three steps here,
  random weights, benchmarks/NOTES.md)
guessed: 56% of a step is sampling; time grows with parameters and with the limit of tokens; prices of rented cards
counted: evaluations, zero-shot, best of N; not: traces of a teacher, models, KL, starts of stages, runs without a GPU
CS336: H100-hours that the assignment gives the problem, whatever the number of arms and seeds"""


def plan(study: Study, seconds_per_step: float | None, price: float | None) -> dict[str, Any]:
    """Compute what `grpo plan` prints, by card or for the given seconds of a GRPO step (with the study's default values)."""
    runs, evaluation = _assumed_runs(study), study.evaluation
    equal = _taken_over(study, runs)
    # Of a task's model: seconds of a unit of work over those of Qwen2.5-Math-1.5B on one GPU. Tasks on the CPU have none.
    on_gpus = {run.task: shape_of(study, run.task) for run in runs if _gpus(study, run)}
    each = PARAMETERS * study.learner.processes
    sizes = {task: (shape.multiplied if shape else PARAMETERS) / each for task, shape in on_gpus.items()}
    columns = {card: seconds for card, (seconds, _) in CARDS.items() if on_gpus}
    if seconds_per_step is not None:
        columns, sizes = {"given": seconds_per_step / work(study, study.grpo)}, {MAIN: 1.0}
    rows: dict[str, dict[str, Any]] = {}
    for name in study.active_experiments:
        of_it = [run for run in runs if run.experiment == name]
        new = [run for run in of_it if run.name not in equal]
        counts = {"runs": len(new), "taken over": len(of_it) - len(new), "steps": sum(run.config.n_steps for run in new)}
        hours = {
            column: sum(_hours(study, run, seconds * sizes[run.task]) for run in new if run.task in sizes)
            for column, seconds in columns.items()
        }
        rows[name] = counts | {"hours": hours}
    asked = evaluation.zero_shot_problems * len(evaluation.zero_shot_prompts)
    asked += evaluation.best_of_n.problems * evaluation.best_of_n.samples * len(evaluation.best_of_n.prompts)
    units = SAMPLING * asked / ROLLOUTS * evaluation.max_tokens / TOKENS * sizes.get(MAIN, 0.0)
    rows["math_baseline, best_of_n"] = {"hours": {column: seconds * units / 3600 for column, seconds in columns.items()}}
    total = {column: sum(row["hours"][column] for row in rows.values()) for column in columns}
    prices = {column: CARDS.get(column, CARDS["H100"])[1] if price is None else price for column in columns}
    cost = {column: hours * prices[column] for column, hours in total.items() if on_gpus}
    in_all = {key: sum(row.get(key, 0) for row in rows.values()) for key in ("runs", "taken over", "steps")}
    rows |= {"in all": {**in_all, "hours": total}}
    return {"study": study.study, "seeds": study.seeds, "rows": rows, "cost": cost, "power": power(study, runs)}


def _assumed_runs(study: Study) -> list[EffectiveRun]:
    """All runs of the study, if of each experiment the pinned arm or the first one wins."""
    runs: list[EffectiveRun] = []
    winners: dict[str, dict[str, Any]] = {}
    for name in study.active_experiments:
        before = [winners[experiment] for experiment in study.needed_selections(name)]
        arms = {arm: effective_run(study, name, arm, study.seeds[0], before) for arm in study.experiments[name].arms}
        winner, *others = study.selection.pinned_arms(name) or arms
        ranked = [arms[arm] for arm in dict.fromkeys([winner, *others, *arms])]
        off_policy = [run for run in ranked if getattr(run.config, "updates_per_rollout_batch", 1) > 1]
        ranking = [{"arm": run.arm, "overrides": run.overrides} for run in off_policy[: study.selection.best_few]]
        won = {"experiment": name, "winner": winner, "overrides": arms[winner].overrides}
        winners[name] = {**won, "off_policy_ranking": ranking}
        runs += [effective_run(study, name, arm, seed, before) for arm in arms for seed in study.seeds_of(name)]
    return runs


def _taken_over(study: Study, runs: list[EffectiveRun]) -> set[str]:
    """The runs that equal one of an experiment before them, whose results they take over."""
    keys = {run.name: digest([run.task, run.method, run.config.model_dump(), run.seed]) for run in runs}
    before = {run.name: study.needed_selections(run.experiment) for run in runs}
    return {run.name for run in runs for o in runs if o.experiment in before[run.name] and keys[o.name] == keys[run.name]}


def _gpus(study: Study, run: EffectiveRun) -> int:
    return study.resources[study.experiments[run.experiment].resources].gpus


def _hours(study: Study, run: EffectiveRun, unit: float) -> float:
    """GPU-hours of a run with its evaluations, or hours if it uses no GPU, by the seconds of a unit of work."""
    config, evaluation, steps, limit = run.config, study.evaluation, run.config.n_steps, run.config.wall_clock_limit_s
    step = unit * work(study, config)
    if limit is not None:
        steps = min(steps, ceil(limit / step))
    at = EvaluationSteps(config, evaluation.every)
    problems = sum(number in at for number in range(steps)) * evaluation.problems + evaluation.last_problems
    longest = min(evaluation.max_tokens, getattr(config, "sampling_max_tokens", evaluation.max_tokens))
    seconds = steps * step + unit * SAMPLING * problems / ROLLOUTS * longest / TOKENS
    return min(seconds, limit or seconds) * max(1, _gpus(study, run)) / 3600


def work(study: Study, config: RunConfig) -> float:
    """Units of work of one step; for expert iteration if all answers are right, with dynamic sampling the expected work."""
    length = getattr(config, "sampling_max_tokens", study.evaluation.max_tokens) / TOKENS
    match config:
        case SftConfig():
            return TRAINING * config.train_batch_size / ROLLOUTS * length
        case ExpertIterationConfig():
            rollouts, epochs = config.ei_batch_size * config.group_size, config.epochs_per_ei_step
        case _:
            rollouts, epochs = config.rollout_batch_size, config.epochs_per_rollout_batch
    again = sum(WITHOUT_SIGNAL**k for k in range(1, getattr(config, "dynamic_sampling_rounds", 0) + 1))
    return (SAMPLING * (1 + again) + TRAINING * epochs) * rollouts / ROLLOUTS * length


def _seconds_in_report() -> str:
    """Median seconds of a GRPO step in the report at hand, as a hint; empty without a report."""
    if not (paths.TIMING_TABLE.exists() and paths.RECORD.exists()):
        return ""
    timing, experiments = read_timing_table(), read_json(paths.RECORD, "tables")["experiments"]
    by_grpo = timing["experiment"].isin([name for name, entry in experiments.items() if entry["method"] == "grpo"])
    runs = timing[by_grpo & timing["same_as"].isna() & (timing["steps"] > 0)]
    each = (runs["rollout_s"] + runs["scoring_s"] + runs["training_s"]) / runs["steps"]
    return f" ({each.median():.2g} in the runs of {paths.TIMING_TABLE})" if len(each) else ""


def table(found: dict[str, Any]) -> str:
    """Format a plan as text: a row an experiment with its GPU-hours by card, the cost, and what is known and what guessed."""
    columns, on_gpus = list(found["rows"]["in all"]["hours"]), bool(found["cost"])
    digits = 1 if on_gpus else 2
    rows = [
        [name, *(f"{row[key]:,}" if key in row else "" for key in HEADS[1:])]
        + [f"{hours:,.{digits}f}" if (hours := row["hours"].get(column)) else "?" for column in columns]
        for name, row in found["rows"].items()
    ]
    study, hours_by, notes = f"study {found['study']}, seeds {found['seeds']}", "GPU-hours by card", [NOTES]
    if on_gpus:
        rows.append(["USD", "", "", "", *(f"{found['cost'][column]:,.0f}" for column in columns)])
        rows, columns = [[*row, BUDGETS.get(row[0], "")] for row in rows], [*columns, "CS336"]
    else:
        asked = "--seconds-per-step gives hours on this machine" + _seconds_in_report()
        hours_by, notes = f"no run uses a GPU: {'hours, one run after the other' if columns else asked}", []
    text = f"{study}; {hours_by}\n{text_table([[*HEADS, *columns], *rows])}"
    return "\n\n".join([text, *notes, *power_table(found["power"])])
