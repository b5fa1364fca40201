"""Made-up runs for tests of results and the report: small enough to work each number out by hand."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo.common.files import write_json, write_text
from grpo.results.runs import Run
from grpo.study import paths
from grpo.study.config import Experiment
from grpo.study.schema import Study

EXPERIMENT = "grpo_learning_rate"
PROBLEMS = 100


def each(score: float) -> NDArray[np.float64]:
    """The same reward for every problem: the interval over problems is one point."""
    return np.full(PROBLEMS, score)


def solved(share: float, problems: int = PROBLEMS) -> NDArray[np.float64]:
    """Rewards of the problems of which this share, the first ones, is solved; a larger share includes a smaller one."""
    return (np.arange(problems) < round(problems * share)).astype(float)


def run(
    arm: str,
    rewards: Sequence[float | NDArray[np.float64]],
    seed: int = 0,
    experiment: str = EXPERIMENT,
    every: int = 8,
    steps: int | None = None,
    forms: list[float] | None = None,
    diverged: int | None = None,
    cut: int | None = None,
    updates: int = 1,
    values: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    validation: Mapping[str, Any] | None = None,
    **history: Any,
) -> Run:
    """A run with an evaluation after every eighth step, the untrained one first, and a row of history for each evaluated step.

    Args:
        rewards: of each evaluation, as a share of solved problems or by problem.
        steps: number of steps with a row of history, if not those that were evaluated.
        forms: format reward of each evaluation; 1 in all.
        values: of the configuration.
        metrics, validation, history: further or other values of these files; in columns one for each row, or one for all.
    """
    outcomes = [solved(reward) if isinstance(reward, float | int) else reward for reward in rewards]
    means = [float(of.mean()) if reward is of else reward for of, reward in zip(outcomes, rewards, strict=True)]
    evaluated = [every * place for place in range(len(means))]
    rows = {"step": evaluated[1:] if steps is None else range(1, steps + 1), "token_entropy": 0.5, "gradient_norm": 0.25}
    rows |= {"clip_fraction": 0.0, "ratio_min": 1.0, "ratio_mean": 1.0, "ratio_max": 1.0} | history
    evaluations = {"step": evaluated, "val/answer_reward": means, "val/format_reward": forms or 1.0}
    evaluations |= {"val/response_length": 20.0, "val/token_entropy": 0.5} | dict(validation or {})
    final = {
        "first/answer_reward": means[0],
        "best/answer_reward": max(means),
        "best/step": evaluated[int(np.argmax(means))],
        "diverged_step": diverged,
        "diverged_reason": "answer reward under its start" if diverged is not None else "",
        "time_limit_step": cut,
        "steps": evaluated[-1],
    }
    config = {
        "identity": f"{arm}-{seed}",
        "same_as": None,
        "overrides": {},
        "before": [],
        "config": {
            key: {"value": value, "from": "study"} for key, value in ({"learning_rate": 1e-3} | dict(values or {})).items()
        },
        "software": {"torch": "2.0"},
        "updates_per_rollout_batch": updates,
    }
    frames, final = (pd.DataFrame(rows), pd.DataFrame(evaluations)), final | dict(metrics or {})
    return Run(experiment, arm, seed, config, final, *frames, np.stack(outcomes), outcomes[-1], 0)


def write_run(run: Run) -> None:
    """Write a run's folder in the working folder."""
    folder = paths.RUNS / run.name
    selecting = {"evaluation": {"selection_problems": run.selection_problems, "last_problems": len(run.last)}}
    write_json(folder / "config.yaml", selecting | run.config)  # JSON is YAML
    write_json(folder / "metrics.json", run.metrics)
    for name in ("history", "validation"):
        write_text(folder / f"{name}.csv", getattr(run, name).to_csv(index=False))
    write_text(folder / "outcomes.jsonl", _lines({"answer_reward": list(row)} for row in (*run.outcomes[:-1], run.last)))


def study_of(study: Study, **arms: dict[str, dict[str, Any]]) -> Study:
    """The study with these experiments and arms only, two seeds, and no search, traces or samples."""
    experiments = {
        name: study.experiments[name].model_copy(update={"arms": own, "builds_on": None, "seeds": None})
        if name in study.experiments
        else Experiment(arms=own)
        for name, own in arms.items()
    }
    changes = {"experiments": experiments, "seeds": [0, 1], "sft_datasets": {}, "kissing_number": None}
    evaluation = study.evaluation.model_copy(
        update={
            "zero_shot_prompts": ["r1_zero"],
            "best_of_n": study.evaluation.best_of_n.model_copy(update={"prompts": []}),
        }
    )
    return study.model_copy(update=changes | {"evaluation": evaluation, "claims": []})


def store(run: Run, seconds: float = 1.0, alone: bool = False) -> None:
    """Write a run's result files, and the times of its steps, each of which takes so long."""
    write_run(run)
    sample = {"prompt": "1 + 1?", "response": "1 + 1 = 2", "ground_truth": "2", "token_entropy": 0.5}
    sample |= dict.fromkeys(("format_reward", "answer_reward", "reward"), 1.0)
    evaluated = run.validation["step"].iloc[[0, -1]]
    samples = ({"step": int(step), "problem": f"p{i}"} | sample for step in evaluated for i in range(3))
    write_text(paths.RUNS / run.name / "rollouts.jsonl", _lines(samples))
    step = {"step_s": seconds, "rollout_s": seconds / 2, "training_s": seconds / 4, "training_peak_mb": 100.0 * seconds}
    write_json(
        paths.run_timing(run.name),
        {
            "total_s": 10 * seconds,
            "phases": {"rollout_s": 5 * seconds, "training_s": 2 * seconds, "evaluation_s": seconds},
            "steps": [{"step": int(number)} | step for number in run.history["step"]],
            "alone": alone,
            **({} if run.config["same_as"] else {"threads": 2, "device": "cpu"}),  # which only trained runs have
            "same_as": run.config["same_as"],
            "mlflow_run_id": f"id-{seconds:g}",
            "git_commit": f"{seconds:g}" * 40,
            "git_changed": "false",
            "hardware": {"processor": f"of {seconds:g} GHz", "cores": 2, "memory_gib": 8, "gpus": []},
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:00+00:00",
        },
    )


def store_general() -> None:
    """Write the other result files that a report reads: the zero-shot evaluation and the datasets of the task ``main``."""
    problems = [{"id": f"p{i}", "question": "q", "ground_truth": "1", "level": 1 + i % 2} for i in range(PROBLEMS)]
    write_text(paths.validation("main"), _lines(problems))
    part = {"problems": PROBLEMS, "digest": "a"}
    write_json(
        paths.dataset_report("main"),
        {"task": "arithmetic", "train": part, "validation": part, "dropped_from_train_as_overlap": []},
    )
    share = {"value": 0.25, "low": 0.0625, "high": 0.5, "problems": 4}
    counted = {"right": 1, "wrong": 3}
    write_json(
        paths.BASELINE_METRICS,
        {
            "r1_zero": {
                "problems": 4,
                "categories": counted,
                "accuracy": share,
                "format_reward": 0.5,
                "response_length": 8.0,
                "accuracy_by_level": {"1": share, "2": share},
            }
        },
    )
    write_json(paths.sft_report("main"), {"examples": 20, "correct": 12})
    response = {"problem": "p0", "prompt": "q", "response": "x" * 5000, "ground_truth": "1", "answer_reward": 0.0}
    rows = [response | {"category": category} for category, count in counted.items() for _ in range(count)]
    write_text(paths.BASELINE / "r1_zero.jsonl", _lines(rows))


def _lines(records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
