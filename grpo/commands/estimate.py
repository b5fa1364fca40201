"""Estimate what a study takes before it runs: runs, steps, GPU-hours and cost on three kinds of card.

The unit of work is a step of 256 rollouts of at most 1,024 tokens that Qwen2.5-Math-1.5B samples and is trained on once. A run
that equals an earlier one costs nothing. Which ones do depends on winners: the pinned arm, or else an experiment's first, is
assumed to win.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from grpo.commands.gpu_memory import shape_of, text_table
from grpo.common.files import read_json
from grpo.study import paths
from grpo.study.effective import EffectiveRun, digest, effective_run
from grpo.study.methods import ExpertIterationConfig, RunConfig, SftConfig
from grpo.study.schema import Study
from grpo.study.settings import MAIN, EvaluationSteps

CARDS = {"RTX 4090": (84.0, 0.5), "H100": (30.0, 2.5), "H200": (14.0, 3.5)}  # seconds of a unit of work; USD an hour
PARAMETERS, ROLLOUTS, TOKENS = 1_543_714_304, 256, 1024  # of a unit
SAMPLING, TRAINING = 0.56, 0.44  # shares of a unit's time: medians of 7.8 s and 6.2 s on the H200
WITHOUT_SIGNAL = 0.5  # share of sampled groups that dynamic sampling replaces in each round
# H100-hours that CS336's assignment 5 (2025) gives its problems; those of the off-policy sweep are for both of ours.
BUDGETS = {
    "sft_experiment": 2,
    "expert_iteration_experiment": 6,
    "grpo_learning_rate": 6,
    "grpo_baselines": 2,
    "grpo_length_normalization": 2,
    "grpo_group_standard_deviation": 2,
    "grpo_off_policy_sweep_broad": 12,
    "grpo_off_policy_clip_ablation": 2,
    "grpo_prompt_ablation": 2,
}
HEADS = ("experiment", "runs", "taken over", "steps", "CS336")
NOTES = """\
known: seconds a step of 256 x 1,024 tokens, Qwen2.5-Math-1.5B: RTX 4090 84, H100 30 (Garg 2026); H200 14 (three steps here,
  random weights, benchmarks/NOTES.md). `here`: runs of this study that have finished
guessed: 56% of a step is sampling; time grows with parameters and with the limit of tokens; prices of rented cards
counted: evaluations, zero-shot, best of N; not counted: traces of a teacher, models, KL, starts of stages, runs without a GPU
CS336: H100-hours that the assignment gives the problem, whatever the number of arms and seeds"""

Seconds = dict[str, float]  # of a unit of work, by task


def plan(study: Study, active: bool, seconds_per_step: float | None, price: float | None) -> dict[str, Any]:
    """Compute everything that `grpo plan` prints; ``--json`` prints it as it is.

    Args:
        active: whether the results in data/ belong to this study, so that their times count.
        seconds_per_step: seconds of a GRPO step with the study's default values, in the place of the cards.
        price: of a GPU-hour; None: a guess by card.
    """
    runs = _assumed_runs(study)
    equal = _taken_over(study, runs)
    on_gpus = {run.task for run in runs if _gpus(study, run)}
    shapes = {task: shape_of(study, task) for task in on_gpus}
    size = {task: (shape.multiplied if shape else PARAMETERS) / PARAMETERS for task, shape in shapes.items()}
    columns: dict[str, Seconds] = {
        card: {task: seconds * size[task] / study.learner.processes for task in on_gpus}
        for card, (seconds, _) in CARDS.items()
        if on_gpus
    }
    if seconds_per_step is not None:
        columns = {"given": {MAIN: seconds_per_step / work(study, study.grpo)}}
    elif active and (measured := _measured(study, runs)):
        columns["here"] = measured
    evaluation = study.evaluation
    asked = evaluation.zero_shot_problems * len(evaluation.zero_shot_prompts)
    asked += evaluation.best_of_n.problems * evaluation.best_of_n.samples * len(evaluation.best_of_n.prompts)
    rows: dict[str, dict[str, Any]] = {}
    for name in study.active_experiments:
        of_it = [run for run in runs if run.experiment == name]
        new = [run for run in of_it if run.name not in equal]
        counts = {"runs": len(new), "taken over": len(of_it) - len(new), "steps": sum(run.config.n_steps for run in new)}
        hours = {column: sum(_hours(study, run, by_task) for run in new) for column, by_task in columns.items()}
        rows[name] = {**counts, "CS336": BUDGETS.get(name, ""), "hours": hours}
    units = SAMPLING * asked / ROLLOUTS * evaluation.max_tokens / TOKENS
    sampled = {column: by_task[MAIN] * units / 3600 for column, by_task in columns.items() if MAIN in by_task}
    rows["math_baseline, best_of_n"] = {"hours": sampled}
    total = {column: sum(row["hours"].get(column, 0.0) for row in rows.values()) for column in columns}
    prices = {column: CARDS.get(column, CARDS["H100"])[1] if price is None else price for column in columns}
    cost = {column: hours * prices[column] if on_gpus else 0.0 for column, hours in total.items()}
    in_all = {key: sum(row.get(key, 0) for row in rows.values()) for key in ("runs", "taken over", "steps")}
    return {"study": study.study, "seeds": study.seeds, "rows": {**rows, "in all": {**in_all, "hours": total}}, "cost": cost}


def _assumed_runs(study: Study) -> list[EffectiveRun]:
    """All runs of the study, if of each experiment the pinned arm or the first one wins."""
    runs: list[EffectiveRun] = []
    winners: dict[str, dict[str, Any]] = {}
    for name in study.active_experiments:
        before = [winners[experiment] for experiment in study.needed_selections(name)]
        arms = {arm: effective_run(study, name, arm, study.seeds[0], before) for arm in study.experiments[name].arms}
        winner = study.selection.pinned.get(name) or next(iter(arms))
        off_policy = [run for run in arms.values() if getattr(run.config, "updates_per_rollout_batch", 1) > 1]
        ranking = [{"arm": run.arm, "overrides": run.overrides} for run in off_policy[: study.selection.best_few]]
        winners[name] = {
            "experiment": name,
            "winner": winner,
            "overrides": arms[winner].overrides,
            "off_policy_ranking": ranking,
        }
        runs += [effective_run(study, name, arm, seed, before) for arm in arms for seed in study.seeds_of(name)]
    return runs


def _taken_over(study: Study, runs: list[EffectiveRun]) -> set[str]:
    """The runs that equal one of an experiment before them, whose results they take over."""
    keys = {run.name: digest([run.task, run.method, run.config.model_dump(), run.seed]) for run in runs}
    before = {run.name: study.needed_selections(run.experiment) for run in runs}
    return {run.name for run in runs for o in runs if o.experiment in before[run.name] and keys[o.name] == keys[run.name]}


def _measured(study: Study, runs: list[EffectiveRun]) -> Seconds:
    """Seconds of a unit of work by task, from the runs that have finished here."""
    spent: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if (path := paths.run_timing(run.name)).exists():
            timing = read_json(path, made_by=paths.stage_of_run(run.name), keys=("total_s", "steps", "same_as"))
            if timing["steps"] and not timing["same_as"]:
                spent.setdefault(run.task, []).append((timing["total_s"], _work_of_run(study, run, len(timing["steps"]))))
    return {task: sum(seconds for seconds, _ in each) / sum(units for _, units in each) for task, each in spent.items()}


def _gpus(study: Study, run: EffectiveRun) -> int:
    return study.resources[study.experiments[run.experiment].resources].gpus


def _hours(study: Study, run: EffectiveRun, by_task: Seconds) -> float:
    """GPU-hours of a run, or hours if it uses no GPU; 0 if its task's seconds are unknown."""
    if run.task not in by_task:
        return 0.0
    unit, steps, limit = by_task[run.task], run.config.n_steps, run.config.wall_clock_limit_s
    if limit is not None:
        steps = min(steps, ceil(limit / (unit * work(study, run.config))))
    seconds = unit * _work_of_run(study, run, steps)
    return min(seconds, limit or seconds) * max(1, _gpus(study, run)) / 3600


def _work_of_run(study: Study, run: EffectiveRun, steps: int) -> float:
    """Units of work of so many steps and of the evaluations among them."""
    at = EvaluationSteps(run.config, study.evaluation.every)
    evaluated = sum(step in at for step in range(steps)) * study.evaluation.problems + study.evaluation.last_problems
    return steps * work(study, run.config) + SAMPLING * evaluated / ROLLOUTS * _length(study, run.config)


def _length(study: Study, config: RunConfig) -> float:
    """The limit of a response's tokens over that of a unit."""
    return float(getattr(config, "sampling_max_tokens", study.evaluation.max_tokens)) / TOKENS


def work(study: Study, config: RunConfig) -> float:
    """Units of work of one step; for expert iteration if all answers are right, with dynamic sampling the expected work."""
    match config:
        case SftConfig():
            return TRAINING * config.train_batch_size / ROLLOUTS * _length(study, config)
        case ExpertIterationConfig():
            rollouts, epochs = config.ei_batch_size * config.group_size, config.epochs_per_ei_step
        case _:
            rollouts, epochs = config.rollout_batch_size, config.epochs_per_rollout_batch
    again = sum(WITHOUT_SIGNAL**k for k in range(1, getattr(config, "dynamic_sampling_rounds", 0) + 1))
    return (SAMPLING * (1 + again) + TRAINING * epochs) * rollouts / ROLLOUTS * _length(study, config)


def table(found: dict[str, Any]) -> str:
    """Format a plan as text: a row an experiment with its GPU-hours by card, the cost, and what is known and what guessed."""
    columns = list(found["cost"])
    rows = [
        [name, *(f"{row[key]:,}" if key in row else "" for key in HEADS[1:4]), str(row.get("CS336", ""))]
        + [f"{hours:,.1f}" if (hours := row["hours"].get(column)) else "?" for column in columns]
        for name, row in found["rows"].items()
    ]
    rows.append(["USD", "", "", "", "", *(f"{found['cost'][column]:,.0f}" for column in columns)])
    text = text_table([[*HEADS, *columns], *rows])
    return f"study {found['study']}, seeds {found['seeds']}; GPU-hours by card\n{text}\n\n{NOTES}"
