"""The stage ``kissing_number``: search within the study's budget, verify the committed program, and report both."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, files_digest, note_that_off, write_json
from grpo.common.imports import require_extra
from grpo.discovery import mutation
from grpo.discovery.log import BEST_PROGRAM, LOG, Log, Settings, open_log, score_rows, summarise
from grpo.discovery.sandboxed import landlock_version
from grpo.discovery.search import Budget, Propose, search
from grpo.discovery.verifier import verify_program, verify_text
from grpo.study import paths
from grpo.study.kept import keep_until_stored, remove_stored
from grpo.study.schema import Study
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_state

CODE = Path(mutation.__file__).parent
SCORES = "scores.jsonl"
KISSING_NUMBER_METRICS = paths.METRICS / "kissing_number.json"
UNFENCED = "KISSING_UNFENCED"  # environment variable; 1: run a language model's programs even if they can read any file


def run_kissing_number(study: Study) -> dict[str, Any]:
    """Search, verify the committed program, and write data/kissing_search, reports/kissing_number.json and its metrics.

    A search that was killed is continued unless its settings or its code have changed. If the study has no search, the
    report is empty and the folders say so, as DVC needs a stage's outputs to exist. Returns the report's content.
    """
    wanted = study.kissing_number
    if wanted is None:
        for unused in (paths.KISSING_SEARCH, paths.CONVERSATION_LOG.parent):
            with atomic_folder(unused) as folder:
                note_that_off(folder, "kissing_number")
        for empty in (paths.KISSING_NUMBER_REPORT, KISSING_NUMBER_METRICS):
            write_json(empty, {})
        return {}
    propose: Propose = mutation.propose
    settings = Settings("mutation", "mutation", wanted.seed)
    if wanted.strategy != "mutation":
        propose, settings = language_model(wanted.strategy, wanted.seed)
    model = re.sub(r"[^\w.-]+", "_", settings.model or "none")
    state = paths.KISSING_NUMBER_STATE / f"{settings.strategy}-{settings.seed}-{model}-{files_digest(CODE)}"
    remove_stored(state)
    with atomic_folder(paths.KISSING_SEARCH) as folder:
        log = open_log(state / LOG, settings)
        ended_by = search(propose, verify_text, Budget(wanted.calls, wanted.tokens, wanted.seconds), log)
        committed = verify_program(paths.KISSING_NUMBER)
        result = summarise(log, ended_by, committed)
        best = (
            log.best.proposal.program
            if log.best and result["best_from"] == "search"
            else paths.KISSING_NUMBER.read_text(encoding="utf-8")
        )
        (folder / BEST_PROGRAM).write_text(best or "", encoding="utf-8")
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in score_rows(log.attempts)]
        (folder / SCORES).write_text("".join(lines), encoding="utf-8")
    with atomic_folder(paths.CONVERSATION_LOG.parent) as folder:
        shutil.copy(log.path, folder / LOG)
    write_json(paths.KISSING_NUMBER_REPORT, result)
    write_json(KISSING_NUMBER_METRICS, {"end": result["best_of_search"]})
    _track(study, log, result)
    keep_until_stored(state, paths.CONVERSATION_LOG.parent)
    for former in paths.KISSING_NUMBER_STATE.glob("*"):  # of other settings or other code
        if former != state:
            shutil.rmtree(former)
    return result


def language_model(strategy: str, seed: int) -> tuple[Propose, Settings]:
    """Make the function that asks a language model under one of :data:`grpo.discovery.strategies.STRATEGIES`, and its settings.

    Raises:
        UserError: the model is not named, or reading is not restricted, without ``KISSING_UNFENCED``.
    """
    require_extra("openai", "openai", f"the strategy {strategy}")
    if not landlock_version() and os.environ.get(UNFENCED) != "1":
        raise UserError(
            f"{strategy}: on this system the language model's programs could read whatever you may read, and send it to the "
            "model. Search on Linux 5.13 or newer with Landlock, or in a container without anything of value, with "
            f"{UNFENCED}=1."
        )
    from grpo.discovery.language_model import endpoint_from_environment, propose_with

    endpoint = endpoint_from_environment(os.environ)
    return propose_with(endpoint, strategy), Settings("language model", strategy, seed, endpoint.model, endpoint.base_url)


def _track(study: Study, log: Log, result: dict[str, Any]) -> None:
    """Log the search as one MLflow run: score and best over attempts, log and program as artifacts."""
    run = MlflowRun(
        study.study,
        f"kissing_number/{log.settings.strategy}-{log.settings.seed}",
        asdict(log.settings),
        {"study": study.study, "experiment": "kissing_number", "stage": "kissing_number"},
        study_state(study),
    )
    for row in score_rows(log.attempts):
        run.log({"score": row["score"], "best": row["best"]}, step=row["attempt"])
    run.log({"best_with_committed_program": result["best"]}, step=len(log.attempts))
    run.artifact(paths.CONVERSATION_LOG)
    run.artifact(paths.KISSING_SEARCH / BEST_PROGRAM)
    run.finish()
