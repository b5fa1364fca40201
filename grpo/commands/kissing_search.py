"""The stage ``kissing_number``: verify the committed program, search with a language model if asked to, and report both."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo.common.files import atomic_folder, files_digest, note_that_off, write_json
from grpo.common.imports import require_extra
from grpo.discovery import verifier
from grpo.discovery.log import BEST_PROGRAM, LOG, Log, SearchSettings, open_log, summarise, to_json
from grpo.discovery.search import Budget, Propose, search
from grpo.discovery.verifier import verify_program, verify_text
from grpo.study import paths
from grpo.study.kept import keep_until_stored, remove_stored
from grpo.study.schema import Study
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_state

CODE = Path(verifier.__file__).parent
KISSING_NUMBER_METRICS = paths.METRICS / "kissing_number.json"


def run_kissing_number(study: Study) -> dict[str, Any]:
    """Verify the committed program, search, and write data/kissing_search, reports/kissing_number.json and its metrics.

    A search that was killed continues unless its settings or its code have changed. If the study has no section
    `kissing_number`, the report is empty and the folders say so, as DVC needs a stage's outputs. Returns the report's content.
    """
    wanted = study.kissing_number
    if wanted is None:
        for unused in (paths.KISSING_SEARCH, paths.CONVERSATION_LOG.parent):
            with atomic_folder(unused) as folder:
                note_that_off(folder, "kissing_number")
        for empty in (paths.KISSING_NUMBER_REPORT, KISSING_NUMBER_METRICS):
            write_json(empty, {})
        return {}
    committed = verify_program(paths.KISSING_NUMBER)
    propose: Propose | None = None
    settings = SearchSettings(None, wanted.seed)
    if wanted.strategy and wanted.model:
        require_extra("openai", "openai", f"the strategy {wanted.strategy}")
        from grpo.discovery.language_model import endpoint_from_environment, propose_with

        endpoint = endpoint_from_environment(os.environ, wanted.model)
        propose = propose_with(endpoint, wanted.strategy)
        settings = SearchSettings(wanted.strategy, wanted.seed, endpoint.model, endpoint.base_url)
    model = re.sub(r"[^\w.-]+", "_", settings.model or "none")
    state = paths.KISSING_NUMBER_STATE / f"{settings.strategy}-{settings.seed}-{model}-{files_digest(CODE)}"
    remove_stored(state)
    with atomic_folder(paths.KISSING_SEARCH) as folder:
        log = open_log(state / LOG, settings)
        budget = Budget(wanted.calls, wanted.tokens, wanted.seconds)
        ended_by = search(propose, verify_text, budget, log) if propose else ""
        result = summarise(log, ended_by, committed)
        best = log.path.with_name(BEST_PROGRAM) if result["best_from"] == "search" else paths.KISSING_NUMBER
        shutil.copy(best, folder / BEST_PROGRAM)
    with atomic_folder(paths.CONVERSATION_LOG.parent) as folder:
        write_json(folder / LOG, to_json(settings, log.attempts))
    write_json(paths.KISSING_NUMBER_REPORT, result)
    write_json(KISSING_NUMBER_METRICS, {"end": result["best"]})
    _track(study, log, result)
    keep_until_stored(state, paths.CONVERSATION_LOG.parent)
    for former in paths.KISSING_NUMBER_STATE.glob("*"):  # of other settings or other code
        if former != state:
            shutil.rmtree(former)
    return result


def _track(study: Study, log: Log, result: dict[str, Any]) -> None:
    """Log the stage as one MLflow run: each attempt's score and the best so far, log and program as artifacts."""
    run = MlflowRun(
        study.study,
        f"kissing_number/{log.settings.strategy or 'no_search'}-{log.settings.seed}",
        asdict(log.settings),
        {"study": study.study, "experiment": "kissing_number", "stage": "kissing_number"},
        study_state(study),
    )
    best = accumulate((attempt.score for attempt in log.attempts), max)
    for attempt, so_far in zip(log.attempts, best, strict=True):
        run.log({"score": attempt.score, "best": so_far}, step=attempt.index)
    run.log({"best_with_committed_program": result["best"]}, step=len(log.attempts))
    run.artifact(paths.CONVERSATION_LOG)
    run.artifact(paths.KISSING_SEARCH / BEST_PROGRAM)
    run.finish()
