"""Runs of arms in MLflow: the validation reward over an arm's seeds, so that MLflow's own charts draw its band.

The seeds train in processes of their own, so this is written by the report, when all of them are there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from grpo.reporting.charts import band_of
from grpo.reporting.timing import read_timing
from grpo.results.runs import Run, by_arm, read_runs
from grpo.study.schema import Study
from grpo.tracking.mlflow_uri import NOWHERE, client_of, failure, local_database, tracking_uri

if TYPE_CHECKING:
    from mlflow.entities import Run as Recorded
    from mlflow.tracking import MlflowClient

PARENT, MOST = "mlflow.parentRunId", 50_000  # MLflow's tag, and the most runs that it finds at once


def record_arms(study: Study) -> None:
    """Record each arm of several seeds as a run EXPERIMENT/ARM, below which its seeds' runs are moved.

    Its metrics, such as ``val/answer_reward_mean``, ``_low`` and ``_high``, are the mean, the lowest and the highest seed. An
    arm that was recorded stays as it is; one of which MLflow lacks a seed is left out. An error of MLflow is a warning.
    """
    uri = tracking_uri()
    if uri == NOWHERE or ((database := local_database(uri)) and not database.exists()):
        return
    try:
        client = client_of(uri)
        if (experiment := client.get_experiment_by_name(study.study)) is None:
            return
        known = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id], max_results=MOST)}
        for name in study.active_experiments:
            for runs in by_arm(read_runs(study, name)).values():
                if len(runs) > 1:
                    _record_arm(client, known, runs)
    except Exception as error:  # of a server, a database or a disk: MLflow has many kinds
        print(f"warning: {failure(uri, error)}\n  MLflow lacks runs of arms; reports/curves has their curves.", file=sys.stderr)


def _record_arm(client: MlflowClient, known: Mapping[str, Recorded], runs: Sequence[Run]) -> None:
    from mlflow.entities import Metric

    ids = [read_timing(run, own=True)["mlflow_run_id"] for run in runs]
    if not {*ids} <= known.keys():
        return
    parents = [known[one].data.tags.get(PARENT, "") for one in ids]
    above = known[parents[-1]].data.tags if parents[-1] in known else {}
    if "arm" in above and len({*parents}) == 1:
        return
    state = above.get(PARENT, "") if "arm" in above else parents[-1]  # of a seed that was trained again, the others' arm has it
    tags = {"experiment": runs[0].experiment, "arm": runs[0].arm, "seeds": ", ".join(str(run.seed) for run in runs)}
    tags |= {"study": known[ids[-1]].data.tags["study"]} | ({PARENT: state} if state else {})
    name, now, band = f"{runs[0].experiment}/{runs[0].arm}", round(1000 * time.time()), validation_band(runs)
    run_id = client.create_run(known[ids[-1]].info.experiment_id, tags=tags, run_name=name).info.run_id
    for key, column in (("mean", "value"), ("low", "low"), ("high", "high")):
        metrics = [Metric(f"{runs[0].column}_{key}", value, now, update) for update, value in band[column].items()]
        client.log_batch(run_id, metrics)
    client.set_terminated(run_id)
    for one in ids:
        client.set_tag(one, PARENT, run_id)


def validation_band(runs: Sequence[Run]) -> pd.DataFrame:
    """The ``value`` (mean), ``low`` and ``high`` of the validation reward over runs, by optimizer update, as in their curves.

    A run that stopped early keeps its last value. Where runs differ in the updates up to a step, it is their mean.
    """
    of_each = [run.validation.groupby("step")[[run.column, "update"]].last() for run in runs]
    rewards, updates = (pd.concat([of[key] for of in of_each], axis=1).sort_index() for key in (runs[0].column, "update"))
    return band_of(rewards.ffill()).set_index(updates.mean(axis=1).round().astype(int))
