"""Estimate what a study takes before it runs: runs, steps, rollouts, hours, disk and cost.

Runs that equal an earlier run take over its results; which ones do depends on the winners. Known winners of the active study
are read from reports/select; unknown ones are assumed: the pinned arm, or else the experiment's first. The number of such
runs seldom depends on them.
"""

from __future__ import annotations

from typing import Any

from grpo.commands.gpu_memory import BYTES, GIB, PROMPT_TOKENS, Shape, prompt_lengths, shape_of, text_table
from grpo.common.files import read_json
from grpo.study import paths
from grpo.study.effective import EffectiveRun, digest, effective_run
from grpo.study.methods import ExpertIterationConfig, GrpoConfig, RunConfig, SftConfig
from grpo.study.schema import Study
from grpo.study.settings import MAIN, PretrainedHere

# Measured time of a step of math-h100 on one H200, without evaluations: random weights, and 256 responses of 500 tokens on
# average, limited to 1,024 (benchmarks/NOTES.md, "A step on a GPU").
MEASURED_MODEL, MEASURED_PARAMETERS, MEASURED_S_PER_STEP = "Qwen/Qwen2.5-Math-1.5B", 1_543_714_304, 14.0
STEP_ROLLOUTS, MEASURED_TOKENS, USUAL_LIMIT = 256, 500, 1024
PEAK_FLOPS = 989e12  # per second, bfloat16 without sparsity (NVIDIA's data sheets of the H100 SXM and the H200)
# Shares of a step's time for sampling and for one pass of training: medians of 7.8 s and 6.2 s in that measurement.
SAMPLING, TRAINING = 0.56, 0.44
WITHOUT_SIGNAL = 0.5  # assumed share of sampled groups that dynamic sampling replaces in each round


def step_flop(multiplied: int, prompt: float, response: float) -> float:
    """Floating-point operations to sample 256 rollouts and train on them once: 8 per parameter and token.

    Training takes 2 operations forward and 4 backward per token and parameter that it is multiplied with (Kaplan et al. 2020,
    arXiv 2001.08361, Section 2.1; without attention scores). Sampling takes another forward pass, 2 operations.

    Args:
        multiplied: parameters that a token is multiplied with.
        prompt, response: mean number of tokens.
    """
    return STEP_ROLLOUTS * (prompt + response) * 8 * multiplied


# Share of the peak that the measured step reaches.
UTILISATION = step_flop(MEASURED_PARAMETERS, PROMPT_TOKENS, MEASURED_TOKENS) / (MEASURED_S_PER_STEP * PEAK_FLOPS)
NOTES = {  # on where a time is from
    "guess": (
        "guess: 8 operations per parameter and token (Kaplan et al. 2020), responses of half their limit, at "
        f"{UTILISATION:.1%} of 989 TFLOP/s, as measured on one H200 ({MEASURED_S_PER_STEP:g} s a step of {STEP_ROLLOUTS} x "
        f"{MEASURED_TOKENS} tokens for {MEASURED_MODEL} with random weights, without evaluations); {SAMPLING:.0%} of a step is "
        "sampling; smaller cards take longer"
    ),
    "measured": "measured: times in data/timing of the experiment, or else of runs with the same method, by the work of a step",
    "unknown": "unknown: not in the sums of hours. Name the seconds of a step: --seconds-per-step",
}

Measured = dict[tuple[str, ...], tuple[float, float]]  # seconds and :func:`work` of the runs that were trained here, by _alike


def plan(study: Study, active: bool, seconds_per_step: float | None, price: float) -> dict[str, Any]:
    """Compute everything that `grpo plan` prints; ``--json`` prints it as it is.

    Args:
        active: whether the results in data/ and reports/ belong to this study, so that their times and winners count.
        seconds_per_step: seconds of a GRPO step with the study's default values; replaces measured times.
    """
    winners: dict[str, dict[str, Any]] = {}
    effective: list[EffectiveRun] = []
    for name in study.active_experiments:
        before = [winners[experiment] for experiment in study.needed_selections(name)]
        winners[name] = _winner(study, name, before, active)
        arms, seeds = study.experiments[name].arms, study.seeds_of(name)
        effective += [effective_run(study, name, arm, seed, before) for arm in arms for seed in seeds]
    measured, equals = _measured(effective) if active else {}, _equal_runs(study, effective)
    shapes = {task: None if isinstance(study.models[task], PretrainedHere) else shape_of(study, task) for task in study.tasks}
    rows = {}
    for run in (run for run in effective if not equals[run.name]):
        shape = shapes[run.task]
        rows[run.name] = _row(study, run, shape, *_seconds_per_work(study, run, shape, measured, seconds_per_step))

    def sums(runs: list[EffectiveRun]) -> dict[str, Any]:
        of = [rows[run.name] for run in runs if run.name in rows]
        total = {key: sum(row[key] or 0 for row in of) for key in ("steps", "rollouts", "hours", "gpu_hours", "disk_gib")}
        return {
            "runs": len(of),
            "taken_over": {run.name: other for run in runs if (other := equals[run.name])},
            **total,
            "runs_of_unknown_time": sum(row["hours"] is None for row in of),
            "disk_gib": None if any(row["disk_gib"] is None for row in of) else total["disk_gib"],
            "cost": total["gpu_hours"] * price,
            "time_from": sorted({row["time_from"] for row in of}),
        }

    return {
        "study": study.study,
        "seeds": study.seeds,
        "price_per_gpu_hour": price,
        "experiments": {name: sums([run for run in effective if run.experiment == name]) for name in study.active_experiments},
        "total": sums(effective),
        "assumed_winners": {
            name: winner["winner"]
            for name, winner in winners.items()
            if "assumed" in winner and any(name in study.needed_selections(other) for other in study.active_experiments)
        },
    }


def _winner(study: Study, experiment: str, before: list[dict[str, Any]], active: bool) -> dict[str, Any]:
    """The experiment's selection from disk, or an assumed one of the same form (:func:`grpo.results.selection.winner_file`)."""
    entry, path = study.experiments[experiment], paths.SELECT / f"{experiment}.json"
    runs = {arm: effective_run(study, experiment, arm, study.seeds[0], before) for arm in entry.arms}
    arm = study.selection.pinned.get(experiment) or next(iter(runs))
    configs, overrides = ({a: getattr(run, of) for a, run in runs.items()} for of in ("config", "overrides"))
    off_policy = [a for a, c in configs.items() if isinstance(c, GrpoConfig) and c.updates_per_rollout_batch > 1]
    ranking = sorted(off_policy, key=lambda a: a != arm)[: study.selection.best_few]
    assumed = {
        "experiment": experiment,
        "winner": arm,
        "overrides": overrides[arm],
        "off_policy_ranking": [{"arm": a, "overrides": overrides[a]} for a in ranking],
        "before": before,
    }
    if active and path.exists():
        keys = ("experiment", "winner", "overrides", "before")
        found: dict[str, Any] = read_json(path, made_by=f"select@{experiment}", keys=keys)
        chosen = [{"arm": found["winner"], "overrides": found["overrides"]}, *found.get("off_policy_ranking", [])]
        same_before = [w["winner"] for w in found["before"]] == [w["winner"] for w in before]
        # Otherwise the file is left from another study.
        if same_before and all(c["overrides"] == overrides.get(c["arm"]) for c in chosen):
            return assumed | found
    return assumed | {"assumed": True}


def _equal_runs(study: Study, runs: list[EffectiveRun]) -> dict[str, str | None]:
    """Map each run to the earlier run that it equals, or None; training looks in the same experiments."""
    keys = {run.name: digest([run.task, run.method, run.config.model_dump(), run.seed]) for run in runs}
    equals: dict[str, str | None] = {}
    for run in runs:
        before = study.needed_selections(run.experiment)
        equal = [o.name for b in before for o in runs if o.experiment == b and keys[o.name] == keys[run.name]]
        equals[run.name] = (equals[equal[0]] or equal[0]) if equal else None
    return equals


def _measured(runs: list[EffectiveRun]) -> Measured:
    found: Measured = {}
    for run in runs:
        path = paths.run_timing(run.name)
        if path.exists():
            timing = read_json(path, made_by=paths.stage_of_run(run.name), keys=("total_s", "steps", "same_as"))
            if timing["steps"] and not timing["same_as"]:
                for alike in _alike(run):
                    seconds, amount = found.get(alike, (0.0, 0.0))
                    found[alike] = seconds + timing["total_s"], amount + len(timing["steps"]) * work(run.config)
    return found


def _alike(run: EffectiveRun) -> list[tuple[str, ...]]:
    """The runs whose times tell a run's time, the most similar first: those of its experiment, then of its task and method."""
    return [(run.experiment,), (run.task, run.method)]


def work(config: RunConfig) -> float:
    """Work of one step, in units of 256 rollouts that are trained on once; for expert iteration if all answers are right."""
    sampled, trained = responses_of_step(config)
    return (SAMPLING * sampled + TRAINING * trained) / STEP_ROLLOUTS


def responses_of_step(config: RunConfig) -> tuple[float, int]:
    """Number of responses that a step samples, and that it trains on, counted in each epoch.

    Dynamic sampling is expected: a share w = :data:`WITHOUT_SIGNAL` of all groups has no signal, so that K rounds ask for
    w + w^2 + ... + w^K batches more.
    """
    match config:
        case SftConfig():
            return 0, config.train_batch_size
        case ExpertIterationConfig():
            batch = config.ei_batch_size * config.group_size
            return batch, batch * config.epochs_per_ei_step
    rounds, batch = range(config.dynamic_sampling_rounds + 1), config.rollout_batch_size
    return batch * sum(WITHOUT_SIGNAL**k for k in rounds), batch * config.epochs_per_rollout_batch


def _row(study: Study, run: EffectiveRun, shape: Shape | None, per_work: float | None, time_from: str) -> dict[str, Any]:
    """What a run takes; ``hours`` and ``disk_gib`` are None if unknown."""
    config = run.config
    seconds = None if per_work is None else per_work * work(config) * config.n_steps
    hours = None if seconds is None else min(seconds, config.wall_clock_limit_s or seconds) / 3600
    kept = len(study.checkpoints) + len(config.keep_steps)
    small = isinstance(study.models[run.task], PretrainedHere)  # a few MB
    weights = shape.parameters * BYTES[study.for_task(run.task).learner.dtype] / GIB if shape else 0.0 if small else None
    return {
        "steps": config.n_steps,
        "rollouts": round(config.n_steps * responses_of_step(config)[0]),
        "hours": hours,
        "gpu_hours": (hours or 0.0) * _gpus(study, run),
        "disk_gib": None if weights is None else kept * weights,
        "time_from": time_from,
    }


def _gpus(study: Study, run: EffectiveRun) -> int:
    return study.resources[study.resources_of(run.experiment, run.seed)].gpus


def _seconds_per_work(
    study: Study, run: EffectiveRun, shape: Shape | None, measured: Measured, given: float | None
) -> tuple[float | None, str]:
    """Seconds per unit of :func:`work`, and their source.

    A measured time is that of the runs most like this one; a guess is by :func:`step_flop` at :data:`UTILISATION`, divided by
    the number of processes.
    """
    if given is not None and run.task == MAIN:
        return given / work(study.grpo), "given"
    for alike in _alike(run):
        if alike in measured:
            seconds, amount = measured[alike]
            return seconds / amount, "measured"
    if not _gpus(study, run):
        return None, "unknown"
    prompt = prompt_lengths(study, run.task, run.config.prompt).mean
    response = getattr(run.config, "sampling_max_tokens", USUAL_LIMIT) / 2
    operations = step_flop(shape.multiplied if shape else MEASURED_PARAMETERS, prompt, response)
    return operations / (UTILISATION * PEAK_FLOPS) / study.learner.processes, "guess"


def table(found: dict[str, Any]) -> str:
    """Format a plan as text: one row per experiment; below it the sources of the numbers."""
    heads = ["experiment", "runs", "taken over", "steps", "rollouts", "hours", "GPU-hours", "disk GiB", "cost", "time from"]
    rows = [heads, *([name, *_cells(sums)] for name, sums in found["experiments"].items())]
    rows.append(["in all", *_cells(found["total"])[:-1], ""])
    notes = [
        f"cost: {found['price_per_gpu_hour']:g} per hour and GPU that `resources` reserves",
        *(NOTES[source] for source in found["total"]["time_from"] if source in NOTES),
        "not counted: stages that train no run (model, sampled traces, zero-shot baseline, best of N)",
        "disk: the kept checkpoints; twice that if DVC's cache cannot share files with the workspace",
    ]
    if free := dict.fromkeys(name.rpartition("/")[0] for name in found["total"]["taken_over"]):
        notes.append(f"arms that equal earlier runs and take over their results at no cost: {', '.join(free)}")
    if assumed := found["assumed_winners"]:
        notes.append(f"assumed winners: {', '.join(f'{name}: {arm}' for name, arm in assumed.items())}")
    text = text_table(rows, left=(0, len(heads) - 1))
    return "\n".join([f"study {found['study']}, seeds {found['seeds']}", text, "", *notes])


def _cells(sums: dict[str, Any]) -> list[str]:
    hours = "?" if sums["runs"] and sums["runs_of_unknown_time"] == sums["runs"] else f"{sums['hours']:,.2f}"
    disk = "?" if sums["disk_gib"] is None else f"{sums['disk_gib']:,.2f}"
    counts = [f"{value:,}" for value in (sums["runs"], len(sums["taken_over"]), sums["steps"], sums["rollouts"])]
    return [*counts, hours, f"{sums['gpu_hours']:,.1f}", disk, f"{sums['cost']:,.0f}", ", ".join(sums["time_from"])]
