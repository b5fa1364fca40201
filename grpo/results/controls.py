"""What a study's controls leave of the gain: full reward against form alone, chance, and the untrained model's best prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.common.records import read_problems
from grpo.results.intervals import Scores, difference_of, mean_of
from grpo.results.runs import ExperimentRuns, Run, first_scores, read_baseline
from grpo.results.verdicts import comparison
from grpo.study import paths
from grpo.study.compose import BEST_PROMPT, CONTROLS_IN, FULL
from grpo.study.config import MAIN
from grpo.study.effective import seeds_with_a_base
from grpo.study.schema import Study

IN_WORDS = {  # arms of the experiment CONTROLS_IN
    FULL: "the full reward",
    "random_reward": "a random reward",
    "format_only": "the form's reward alone",
    "majority_reward": "agreement with the majority",
}


def beyond_controls(study: Study, evidence: Mapping[str, ExperimentRuns], headline: tuple[str, str]) -> dict[str, Any]:
    """Compare trained runs with the study's controls.

    ``evidence``: by experiment. ``headline``: experiment and arm that ``best_prompt`` is compared with if the study trains no
    control.

    Returns:
        ``experiment`` and ``arm`` of the trained runs, their means ``start`` and ``value``, whether the end's interval is above
        the start (``gains``), and ``beyond``: for each ``control``, in words ``what`` it is, its mean (``at``), trained runs
        minus control (``value``, ``low``, ``high``), and what that ``shows`` (:func:`grpo.results.verdicts.comparison`).
    """
    experiment, arm = (CONTROLS_IN, FULL) if CONTROLS_IN in evidence else headline
    found = evidence[experiment]
    runs, start = found.runs(arm), float(first_scores(found.runs(arm)).mean())
    pairs = [(name, IN_WORDS[name], found.final(name), found.final(arm)) for name in study.controls if name != BEST_PROMPT]
    if BEST_PROMPT in study.controls and (best := _best_prompt(study, runs)) is not None:
        pairs.append((BEST_PROMPT, *best))
    beyond = []
    for name, what, control, trained in pairs:
        ends = difference_of(control, trained).ends()
        beyond.append({"control": name, "what": what, "at": float(control.mean()), **ends, "shows": comparison(ends)})
    end = mean_of(found.final(arm))
    known = {"experiment": experiment, "arm": arm, "value": end.value, "start": start, "gains": end.low > start}
    return known | {"beyond": beyond}


def _best_prompt(study: Study, runs: Sequence[Run]) -> tuple[str, Scores, Scores] | None:
    """The zero-shot prompt with the highest answer reward, its scores and those of trained runs on the same problems.

    Runs whose own base model was not evaluated zero-shot are left out. None without problems that both answered.
    """
    baseline, without = read_baseline(study), seeds_with_a_base(study, MAIN)
    prompt = max(baseline, key=lambda name: float(baseline[name]["accuracy"]["value"]))
    path = paths.BASELINE / f"{prompt}.jsonl"
    right = dict(read_jsonl(path, "math_baseline", lambda line: (line["problem"], float(line["answer_reward"]))))
    of_base = [run for run in runs if run.seed not in without]
    ids = [problem.id for problem in read_problems(paths.validation(MAIN))]
    judging = range(runs[0].selection_problems, len(runs[0].last))
    shared = [place for place in judging if ids[place] in right]
    if not shared or not of_base:
        return None
    scores = np.tile([right[ids[place]] for place in shared], (len(of_base), 1))
    only = " of the first base" if len(of_base) < len(runs) else ""
    return f"the untrained model{only} under its best prompt, {prompt}", scores, np.stack([run.last[shared] for run in of_base])
