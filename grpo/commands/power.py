"""What a study can see before it runs: for each claim and experiment the smallest difference that is found with 80% power."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo.commands.gpu_memory import text_table
from grpo.common.errors import UserError
from grpo.common.files import read_json
from grpo.results.claims import claims_of, stands_for
from grpo.results.intervals import ASSUMED_DF, ASSUMED_RUN_SD, mean_of_pairs, satterthwaite
from grpo.results.pairs import Pairs, read_pairs
from grpo.results.verdicts import MARGIN, is_ratio, smallest_seen
from grpo.study import paths
from grpo.study.claims import PLACES, AnyClaim
from grpo.study.config import setting_of
from grpo.study.effective import EffectiveRun
from grpo.study.schema import Study

# Without finished runs: medians of the study mini (November 2026) of the standard deviation between seeds of two arms' paired
# difference (33 pairs, half of them .050 to .113), and of the logarithm of a ratio: of mini and of reports/literature (49 pairs
# of entropies, KL and lengths of wrong answers, half of them .065 to .19; peaks of the gradient's norm: .5 and 1.6).
SD, LOG_SD, LOG_SD_OF_PEAKS = 0.07, 0.1, 0.9
OVER_PROBLEMS = 0.05  # variance of the difference over problems; with each pair's own SD it gives mini's intervals (a test)
MOST = 1000  # seeds
Spread = tuple[float, float]  # standard deviation between seeds, variance over problems
HEADS = ("claim, or two arms", "seeds", "sees", "margin", "seeds for it", "spread", "note")
MORE = "more problems"
NOTES = f"""\
sees: the true distance from the margin that is found in 80% of studies (of a metric, x: the factor)
seeds for it: the seeds that see a distance of the margin's size, so that "no difference" can be found, too;
  {MORE}: raise evaluation.last_problems, as no number of seeds is enough
spread: standard deviation between seeds of the arms' paired difference (of a ratio: of its logarithm), of finished runs, or
  * of the study mini: {SD:g} (half of its pairs have .05 to .11, the others from .017 to .25); of ratios in our studies:
    {LOG_SD:g} (half of the pairs have .065 to .19), of peaks {LOG_SD_OF_PEAKS:g}"""


def precision(spread: Spread, seeds: int, problems: int) -> tuple[float, float]:
    """Predict the standard error of two arms' difference, and degrees of freedom: one less, as an interval's are estimated."""
    runs = (spread[0] ** 2 / seeds, seeds - 1) if seeds > 1 else (2 * ASSUMED_RUN_SD**2, ASSUMED_DF)
    over = [(spread[1] / problems, problems - 1)] if problems > 1 else []
    variance, df = satterthwaite([runs, *over])
    return math.sqrt(variance), max(runs[1], df - 1)


def power(study: Study, runs: Sequence[EffectiveRun]) -> list[dict[str, Any]]:
    """Make a row for each claim that the study tests with these assumed runs, and for two arms of each experiment."""
    record, pairs = _finished(study)
    evaluation, rows = study.evaluation, []
    problems = evaluation.last_problems - evaluation.selection_problems
    for claim, own in claims_of(study):
        if not (own or stands_for(study, claim)) or {*claim.experiments()} - {*study.active_experiments}:
            continue
        ratio, seeds = is_ratio(claim), min(len(study.seeds_of(name)) for name, _ in claim.arms())
        many = 1 if ratio else evaluation.problems if claim.at == "start" else problems
        default = (LOG_SD_OF_PEAKS if claim.at == "peak" else LOG_SD, 0.0) if ratio else (SD, OVER_PROBLEMS)
        margin, measured = math.log(claim.by) if ratio else claim.by, _spread(pairs.get(claim.id))
        row = _row(claim.experiment, seeds, many, margin, measured, default)
        if ratio:
            row |= {key: math.exp(min(row[key], 700)) for key in ("sees", "margin")}
        (_, arm), (_, other) = claim.arms()
        about = f"{claim.id}: {arm} {claim.KIND} {other}" if own else claim.id
        rows.append(
            {"claim": claim.id, "about": about, "ratio": ratio} | row | {"note": _note(claim, runs, seeds, row["sees"])}
        )
    for name in study.active_experiments:
        if len({setting_of(arm) for arm in study.experiments[name].arms}) > 1:
            sds = _between(record["experiments"].get(name)) if record else []
            measured = (float(np.median(sds)), OVER_PROBLEMS) if sds else None
            row = _row(name, seeds := len(study.seeds_of(name)), problems, MARGIN, measured, (SD, OVER_PROBLEMS))
            rows.append(
                {"claim": "", "about": f"two arms of {name}", "ratio": False} | row | {"note": "one seed" if seeds == 1 else ""}
            )
    return rows


def _row(name: str, seeds: int, problems: int, margin: float, measured: Spread | None, default: Spread) -> dict[str, Any]:
    spread = measured or default
    enough = 2 + bisect_left(range(2, MOST), -margin, key=lambda n: -smallest_seen(*precision(spread, n, problems)))
    sees, needed = smallest_seen(*precision(spread, seeds, problems)), enough if enough < MOST else None
    by_problems = needed is None and smallest_seen(*precision((spread[0], 0.0), MOST, problems)) <= margin
    row = {"experiment": name, "seeds": seeds, "problems": problems, "margin": margin, "sees": sees}
    row |= {"more_problems": by_problems}  # of these problems no number of seeds is enough
    return row | {"seeds_for_margin": needed, "spread": spread[0], "measured": measured is not None}


def _finished(study: Study) -> tuple[dict[str, Any] | None, dict[str, Pairs]]:
    """The record and the pairs of the study, if its report is here."""
    try:
        record = read_json(paths.RECORD, made_by="tables", keys=("study", "experiments"))
        pairs = read_pairs(paths.PAIRS) if paths.PAIRS.exists() else {}
    except UserError:  # missing or damaged
        return None, {}
    return (record, pairs) if record["study"] == study.study else (None, {})


def _spread(pairs: Pairs | None) -> Spread | None:
    if pairs is None or len(pairs.seeds) < 2:
        return None
    (runs, problems), sd = pairs.differences.shape, float(pairs.differences.mean(axis=1).std(ddof=1))
    return sd, max(0.0, mean_of_pairs([pairs.differences]).se ** 2 - sd**2 / runs) * problems


def _between(entry: dict[str, Any] | None) -> list[float]:
    """Of each chosen arm but the leader the standard deviation between seeds of its difference to the leader."""
    arms = [arm for arm in entry["arms"] if arm["chosen"] and len(arm["by_run"]) > 1] if entry else []
    (leader,) = [arm["by_run"] for arm in arms if not arm["below"]] or [[]]
    return [float(np.subtract(arm["by_run"], leader).std(ddof=1)) for arm in arms if arm["below"]]


def _note(claim: AnyClaim, runs: Sequence[EffectiveRun], seeds: int, sees: float) -> str:
    """Where only one answer is possible, and why."""
    named = [[r for r in runs if r.experiment == e and arm in (*PLACES, r.arm, setting_of(r.arm))] for e, arm in claim.arms()]
    steps = min((max(run.config.n_steps for run in arm) for arm in named if arm), default=0)
    notes = {
        "only *not tested*: the study has no such arm": not all(named),
        f"only *not tested*: it is about step {claim.horizon}, and the runs take {steps}": all(named) and steps < claim.horizon,
        "only *not tested*: a ratio needs two seeds": seeds == 1 and is_ratio(claim),
        "only *open*: no difference of rewards is large enough to be seen": not is_ratio(claim) and claim.by + sees >= 1,
        "one seed: the spread of five published runs": seeds == 1 and not is_ratio(claim),
        "by design": claim.by_design is not None,
    }
    return "; ".join(text for text, said in notes.items() if said)


def power_table(rows: list[dict[str, Any]]) -> list[str]:
    """Format :func:`power` as text in two parts; none without rows."""
    lines = [[*HEADS]]
    for row in rows:
        sees, margin = (f"{'x' * row['ratio']}{row[key]:.3g}" for key in ("sees", "margin"))
        enough = row["seeds_for_margin"] or (MORE if row["more_problems"] else f"{MOST} or more")
        spread = f"{row['spread']:.3f}{'*' * (not row['measured'])}"
        lines.append([row["about"], str(row["seeds"]), sees, margin, str(enough), spread, row["note"]])
    return [text_table(lines), NOTES] if rows else []
