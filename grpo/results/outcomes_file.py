"""reports/outcomes.csv: a row for each run, enough to compute every mean, interval, choice and verdict again without data/.

Git stores it, where it does not store the run folders. Its columns, all text, empty where a run has no such value:

- ``run`` (EXPERIMENT/ARM/SEED), ``metric`` (the reward by which the study compares runs), ``selection`` (number of problems
  that choose; the others judge), ``evaluations`` (their number), ``steps`` (the last one evaluated), ``trained`` (the last one
  trained), ``stopped`` (the step at which it diverged), ``learning_rate``, ``start_from``, ``response_length`` (before
  training); of a GRPO run ``groups`` in a step, ``train_steps`` with a training reward, and ``train_best``, the highest one
- scores by problem, see :func:`scores_of`: ``last`` (the last evaluation on all its problems); on the problems that all
  evaluations share: ``start`` (the untrained model), ``before`` (the evaluation before the last), ``best`` (the one with the
  highest mean; empty if that is the last)
- ``levels``: JSON, ``"METRIC AT to STEP"`` -> :func:`grpo.results.verdicts.level`, for the metrics that claims compare
- ``history`` and ``samples``: digests of history.csv, and of the responses that the page shows (:func:`samples_digest`)
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from grpo.common.files import read_bytes, read_jsonl, write_text
from grpo.results.claims import read_published
from grpo.results.intervals import Scores
from grpo.results.runs import ExperimentRuns, NotMeasured, Run, value
from grpo.results.verdicts import level
from grpo.study import paths
from grpo.study.claims import REWARD
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study

SHOWN = ("step", "problem", "prompt", "response", "ground_truth")
REWARDS = ("format_reward", "answer_reward", "reward", "token_entropy")


def write_outcomes(study: Study, evidence: Mapping[str, ExperimentRuns]) -> None:
    """Write reports/outcomes.csv. ``evidence``: by experiment (:func:`grpo.results.runs.evidence_of`)."""
    rows = []
    for name, found in evidence.items():
        runs = [run for arm in found.arms.values() for run in arm]
        claims = [claim for claim in (*read_published().claims, *study.own_claims) if claim.metric != REWARD]
        compared = [claim for claim in claims if name in claim.experiments()]
        others = {one for claim in compared for one in claim.experiments() if one in evidence}
        ends = {_trained(run) for one in others for arm in evidence[one].arms.values() for run in arm}
        rows += [_row(run, {(claim.metric, claim.at) for claim in compared}, ends) for run in runs]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(paths.OUTCOMES, text.getvalue())


def scores_of(numbers: Scores) -> str:
    """Scores of problems as text: a character each if all are 0 or 1, else numbers with all digits, parted by blanks."""
    if np.isin(numbers, (0, 1)).all():
        return "".join(map(str, numbers.astype(int)))
    return " ".join(map(repr, map(float, numbers)))


def samples_digest(samples: Iterable[Mapping[str, Any]]) -> str:
    """A digest of responses, each with :data:`SHOWN`, :data:`REWARDS` to six digits, and ``messages`` if it is an episode."""
    rows = [[*(one[key] for key in SHOWN), *(_six_digits(one[key]) for key in REWARDS), one.get("messages")] for one in samples]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]


def _six_digits(number: float | None) -> str:
    return "" if number is None or not math.isfinite(number) else f"{number:.6g}"


def _trained(run: Run) -> float:
    return float(run.history["step"].max())


def _row(run: Run, asked: set[tuple[str, str]], ends: set[float]) -> dict[str, Any]:
    rewards, place = run.history, int(run.outcomes.mean(axis=1).argmax())
    column, groups = f"train/{run.metric}", None
    trained = rewards.groupby("step")[column].first().dropna() if column in rewards else rewards["step"].iloc[:0]
    if value(run, "rollout_batch_size") is not None and run.metric != "reward":
        groups = value(run, "rollout_batch_size") // value(run, "group_size")
    levels = {}
    for metric, at in sorted(asked):
        for last in sorted({min(end, _trained(run)) for end in ends}):
            with suppress(NotMeasured):
                levels[f"{metric} {at} to {last:g}"] = level(run, metric, at, last)
    folder, made_by = paths.RUNS / run.name, stage_of_run(run.name)
    return {
        "run": run.name,
        "metric": run.metric,
        "selection": run.selection_problems,
        "evaluations": len(run.outcomes),
        "steps": int(run.validation["step"].iloc[-1]),
        "trained": f"{_trained(run):g}",
        "stopped": run.metrics["diverged_step"],
        "learning_rate": value(run, "learning_rate"),
        "start_from": value(run, "start_from"),
        "response_length": run.validation["val/response_length"].iloc[0] if "val/response_length" in run.validation else None,
        "groups": groups,
        "train_steps": len(trained) or None,
        "train_best": float(trained.max()) if len(trained) else None,
        "start": scores_of(run.outcomes[0]),
        "before": scores_of(run.outcomes[-2]),
        "best": "" if place == len(run.outcomes) - 1 else scores_of(run.outcomes[place]),
        "last": scores_of(run.last),
        "levels": json.dumps(levels),
        "history": hashlib.sha256(read_bytes(folder / "history.csv")).hexdigest()[:12],
        "samples": samples_digest(read_jsonl(folder / "rollouts.jsonl", made_by, dict)),
    }
