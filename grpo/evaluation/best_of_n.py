"""The stages ``best_of_n`` and ``pass_at_k``: several samples of each problem, and pass@N, Best@N and majority@N.

Each estimator uses all S samples of a problem, and its value is the expectation over a random choice of N of them. So the three
differ in how they choose an answer, not in the samples they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.common.files import atomic_folder, read_jsonl, write_json, write_jsonl
from grpo.common.process import start_threads
from grpo.common.records import Problem, Rollout, read_problems
from grpo.evaluation.evaluator import CheckpointEvaluator, stage_run
from grpo.evaluation.kl import StartingModel, checkpoints_of, kept_checkpoints, metadata_of
from grpo.results.intervals import difference_of, mean_of, mean_over_problems
from grpo.rollout.sampling import transcript
from grpo.study import paths
from grpo.study.config import MAIN, BestOfN
from grpo.study.schema import Study
from grpo.tasks.rewards import votes_of
from grpo.tasks.task import Format, find_format
from grpo.tracking.mlflow_study import flat

Floats = NDArray[np.float64]

MAX_SUBSETS = 2000  # if there are more subsets, majority@N uses this many random ones


def pass_at_n(correct: Floats, n: int) -> Floats:
    """Probability that at least one of ``n`` samples is right: 1 - C(S - c, n) / C(S, n) (Chen et al. 2021, arXiv:2107.03374).

    ``correct``: (problems, S), 1.0 where a sample is right, else 0.0. Returns (problems,).
    """
    samples = correct.shape[1]
    return np.array([1 - comb(samples - int(right), n) / comb(samples, n) for right in correct.sum(axis=1)])


def best_at_n(correct: Floats, scores: Floats, n: int) -> Floats:
    """Probability that the sample with the highest score among ``n`` is right.

    The sample of rank k (0 is best) is the best in C(S - 1 - k, n - 1) of the C(S, n) subsets. Samples with equal scores count
    with their mean correctness. Returns (problems,). ``correct``: (problems, S). ``scores``: (problems, S), such as mean token
    log-probabilities.
    """
    samples = correct.shape[1]
    weights = np.array([comb(samples - 1 - k, n - 1) for k in range(samples)]) / comb(samples, n)
    results = []
    for right, score in zip(correct, scores, strict=True):
        _, rank = np.unique(-score, return_inverse=True)
        mean_of_equals = np.bincount(rank, right) / np.bincount(rank)
        results.append(weights @ mean_of_equals[np.sort(rank)])
    return np.array(results)


def majority_at_n(correct: Floats, votes: NDArray[np.int64], n: int) -> Floats:
    """Probability that the most frequent answer among ``n`` samples is right; tied answers have equal weight.

    It averages over all subsets of n samples, or over MAX_SUBSETS random ones if there are more. Returns (problems,); a subset
    without votes counts as wrong. ``correct``: (problems, S). ``votes``: (problems, S), equal numbers for equal answers; -1 for
    a sample without an answer, which has no vote.
    """
    chosen = _subsets(correct.shape[1], n, np.random.default_rng(0))
    results = []
    for right, vote in zip(correct, votes, strict=True):
        answers = np.unique(vote[vote >= 0])
        if not len(answers):
            results.append(0.0)
            continue
        is_answer = (vote[:, None] == answers[None, :]).astype(float)  # (S, answers)
        answer_right = (right @ is_answer) / is_answer.sum(axis=0)
        counts = chosen @ is_answer  # (subsets, answers)
        top = counts.max(axis=1, keepdims=True)
        winners = (counts == top) & (top > 0)
        results.append(float(((winners @ answer_right) / np.maximum(winners.sum(axis=1), 1)).mean()))
    return np.array(results)


def _subsets(samples: int, n: int, generator: np.random.Generator) -> Floats:
    """Indicator matrix (subsets, samples): 1.0 where a sample is in the subset."""
    if comb(samples, n) <= MAX_SUBSETS:
        members = np.array(list(combinations(range(samples), n)))
    else:
        members = np.argsort(generator.random((MAX_SUBSETS, samples)), axis=1)[:, :n]
    chosen = np.zeros((len(members), samples))
    np.put_along_axis(chosen, members, 1.0, axis=1)
    return chosen


def ranking_quality(correct: Floats, scores: Floats, lengths: Floats, formed: Floats) -> dict[str, float]:
    """Measure how well the score separates right from wrong samples of a problem, which decides how close Best@N is to pass@N.

    Only problems with both right and wrong samples (mixed ones) are informative. ``correct``, ``scores``, ``lengths``:
    (problems, S); length in tokens. ``formed``: (problems, S), 1.0 where a sample has the right form.

    Returns:
        shares of problems ``never_solved``, ``always_solved`` and ``mixed``. Over the mixed ones, and missing without any:
        ``share_right`` (accuracy of a random choice), ``top_right`` (accuracy of the sample with the highest score),
        ``outranks`` (probability that a right sample scores above a wrong one, ties half; 0.5 is no information),
        ``score_difference`` (right minus wrong, nats per token, medians), ``length_difference`` (right minus wrong, tokens,
        means) and ``top_wrong_form`` (share of the samples with the highest score that have a wrong form).
    """
    solved = correct.mean(axis=1)
    mixed = (solved > 0) & (solved < 1)
    result = {
        "never_solved": float((solved == 0).mean()),
        "always_solved": float((solved == 1).mean()),
        "mixed": float(mixed.mean()),
    }
    if not mixed.any():
        return result
    outranks, score_difference, length_difference = [], [], []
    for right, score, length in zip(correct[mixed] > 0, scores[mixed], lengths[mixed], strict=True):
        above = score[right][:, None] - score[~right][None, :]
        outranks.append(((above > 0) + 0.5 * (above == 0)).mean())
        # Medians, because a few very improbable samples would dominate a mean.
        score_difference.append(np.median(score[right]) - np.median(score[~right]))
        length_difference.append(length[right].mean() - length[~right].mean())
    return result | {
        "share_right": float(solved[mixed].mean()),
        "top_right": float(best_at_n(correct[mixed], scores[mixed], correct.shape[1]).mean()),
        "outranks": float(np.mean(outranks)),
        "score_difference": float(np.mean(score_difference)),
        "length_difference": float(np.mean(length_difference)),
        "top_wrong_form": float(best_at_n(1 - formed[mixed], scores[mixed], correct.shape[1]).mean()),
    }


# --------------------------------------------------------------------------------------------------------- stage


def run_best_of_n(study: Study) -> dict[str, Any]:
    """Sample the base model several times on each problem in each format, and write samples and estimates.

    Returns for each prompt: for each N ``pass``, ``best`` and ``majority`` with 95% intervals over problems, and ``ranking``.
    """
    settings = study.evaluation.best_of_n
    evaluator = CheckpointEvaluator(study, paths.model(MAIN))
    problems = read_problems(paths.validation(MAIN))[: settings.problems]
    evaluator.require_context_length(problems, settings.prompts)
    with atomic_folder(paths.BEST_OF_N) as folder:
        found = {prompt: sample_checkpoint(evaluator, problems, prompt, folder) for prompt in settings.prompts}
        metrics = {prompt: with_zero_shot(study, prompt, values) for prompt, values in found.items()}
    write_json(paths.BEST_OF_N_METRICS, metrics)
    for prompt, values in metrics.items():
        with stage_run(study, "best_of_n", prompt, flat({"evaluation": {"best_of_n": settings.model_dump()}})) as mlflow:
            for n, kinds in values["n"].items():
                mlflow.log({f"{kind}_at_n": estimate["value"] for kind, estimate in kinds.items()}, step=int(n))
    return metrics


def sample_checkpoint(evaluator: CheckpointEvaluator, problems: Sequence[Problem], prompt: str, folder: Path) -> dict[str, Any]:
    """Sample the first problems in a format as often as the study says, write PROMPT.jsonl, and compute all estimates."""
    settings, format = evaluator.study.evaluation.best_of_n, find_format(evaluator.task, prompt)
    groups = evaluator.sample(problems[: settings.problems], prompt, n=settings.samples)
    write_jsonl(folder / f"{prompt}.jsonl", (_record(format, group) for group in groups))
    return estimates(settings, format, groups)


def estimates(settings: BestOfN, format: Format, groups: Sequence[Sequence[Rollout]]) -> dict[str, Any]:
    """Compute all estimates from one format's samples. A sample is right, or has the form, if its reward for that is 1."""
    correct = np.array([[float(r.rewards["answer_reward"] == 1.0) for r in group] for group in groups])
    scores = np.array([[mean_log_prob(r) for r in group] for group in groups])
    lengths = np.array([[r.length for r in group] for group in groups], dtype=float)
    formed = np.array([[float(r.rewards["format_reward"] == 1.0) for r in group] for group in groups])
    votes = np.array(votes_of([[format.read(r.completion.text) for r in group] for group in groups]))
    by_n = {
        str(n): {
            "pass": mean_over_problems(pass_at_n(correct, n)),
            "best": mean_over_problems(best_at_n(correct, scores, n)),
            "majority": mean_over_problems(majority_at_n(correct, votes, n)),
        }
        for n in settings.n
    }
    return {
        "problems": len(groups),
        "samples": settings.samples,
        "n": by_n,
        "ranking": ranking_quality(correct, scores, lengths, formed),
    }


# --------------------------------------------------------------------------------------------- checkpoints of a run


def measure_pass_at_k(study: Study, experiment: str) -> dict[str, Any]:
    """Sample base, middle and last checkpoint of the runs that ``checkpoints`` names, and write data/pass_at_k and the report.

    The middle is the kept checkpoint (``keep_steps``) next to half of the run's steps; without one it is left out. Returns what
    :func:`pass_at_k_of` returns, by arm.
    """
    settings, task = study.evaluation.best_of_n, study.experiments[experiment].task
    start_threads(study.threads)
    problems = read_problems(paths.validation(task))[: settings.problems]
    found: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    starts: dict[tuple[str, str], StartingModel] = {}  # one at a time, as each has an engine
    of_starts: dict[tuple[str, str], list[int]] = {}

    def right(start: StartingModel, checkpoint: Path | None) -> list[int]:
        groups = start.sample(checkpoint, settings.samples)
        return [sum(rollout.rewards["answer_reward"] == 1.0 for rollout in group) for group in groups]

    for arm in (
        arm for name, _, arm in (checkpoint.partition("/") for checkpoint in settings.checkpoints) if name == experiment
    ):
        names = [paths.run_name(experiment, arm, seed) for seed in study.seeds_of(experiment)]
        for name in names:
            last = checkpoints_of(name) / "last"
            end = metadata_of(last, name)
            key = end["start"], end["prompt"]
            if key not in starts:
                starts.clear()
                starts[key] = StartingModel(study.for_task(task), task, Path(end["start"]), problems, end["prompt"])
            if key not in of_starts:
                of_starts[key] = right(starts[key], None)
            kept = [(folder, about["step"]) for folder, about in kept_checkpoints(name) if about["step"] < end["step"]]
            middle = sorted(kept, key=lambda one: abs(2 * one[1] - end["step"]))[:1]
            records.append({"run": name, "place": "base", "step": 0, "right": of_starts[key]})
            for place, folder, step in [*(("middle", *one) for one in middle), ("end", last, end["step"])]:
                records.append({"run": name, "place": place, "step": step, "right": right(starts[key], folder)})
        found[arm] = pass_at_k_of([record for record in records if record["run"] in names], settings.samples, settings.n)
    write_jsonl(paths.PASS_AT_K / f"{experiment}.jsonl", records)
    write_json(paths.PASS_AT_K_REPORTS / f"{experiment}.json", {"experiment": experiment, "arms": found})
    return found


def pass_at_k_of(records: Sequence[dict[str, Any]], samples: int, n: Sequence[int]) -> dict[str, Any]:
    """Estimate pass@k of an arm at base, middle and end.

    ``records``: of each run and place its ``step`` and, by problem, how many of ``samples`` are ``right``.

    Returns ``runs``, ``problems``, ``samples``; ``places``: for each that all runs have its ``step`` and ``k``, for each k
    pass@k and its difference ``above_base`` with 95% intervals over runs and problems, paired by both; ``base_ahead_from``: the
    smallest k at which the base is above the end with its whole interval, None if it is at none.
    """
    runs = list(dict.fromkeys(record["run"] for record in records))
    by_place = {place: [one for one in records if one["place"] == place] for place in ("base", "middle", "end")}
    places: dict[str, Any] = {}
    tables: dict[tuple[str, int], Floats] = {}
    for place, sampled in by_place.items():
        if len(sampled) < len(runs):
            continue
        for k in n:
            counts = [np.arange(samples) < np.array(one["right"])[:, None] for one in sampled]
            tables[place, k] = np.stack([pass_at_n(count.astype(float), k) for count in counts])
        one_base = place == "base" and all(one["right"] == sampled[0]["right"] for one in sampled)
        at_k: dict[str, Any] = {str(k): mean_of(tables[place, k], fixed=one_base).ends() for k in n}
        for k in n if place != "base" else ():
            at_k[str(k)]["above_base"] = difference_of(tables["base", k], tables[place, k]).ends()
        places[place] = {"step": max(one["step"] for one in sampled), "k": at_k}
    ahead = [k for k in n if places["end"]["k"][str(k)]["above_base"]["high"] < 0]
    about = {"runs": len(runs), "problems": len(records[0]["right"]), "samples": samples}
    return {**about, "places": places, "base_ahead_from": min(ahead, default=None)}


def with_zero_shot(study: Study, prompt: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace the estimates for N = 1 by the zero-shot accuracy, if both stages asked the same problems in this format.

    The handout defines N = 1 by the zero-shot generations (NLPDL, homework 3, problem 2). Raises UserError if the zero-shot
    generations are missing or damaged.
    """
    evaluation = study.evaluation
    same = evaluation.best_of_n.problems == evaluation.zero_shot_problems and prompt in evaluation.zero_shot_prompts
    if not same or "1" not in metrics["n"]:
        return metrics
    path = paths.BASELINE / f"{prompt}.jsonl"
    right = dict(read_jsonl(path, "math_baseline", lambda line: (line["problem"], float(line["answer_reward"] == 1.0))))
    figure = mean_over_problems(list(right.values()))
    return metrics | {"n": metrics["n"] | {"1": dict.fromkeys(metrics["n"]["1"], figure)}}


def mean_log_prob(rollout: Rollout) -> float:
    """Mean log-prob (nats) of the sampled tokens under the distribution that they were drawn from."""
    log_probs = rollout.completion.log_probs
    return sum(log_probs) / len(log_probs) if log_probs else 0.0


def _record(format: Format, group: Sequence[Rollout]) -> dict[str, Any]:
    problem = group[0].problem
    return {
        "problem": problem.id,
        "level": problem.level,
        "subject": problem.subject,
        "ground_truth": problem.ground_truth,
        "samples": [
            {
                "response": transcript(r.completion),
                "answer": format.read(r.completion.text),
                "mean_log_prob": mean_log_prob(r),
                "response_length": r.length,
                "finish_reason": r.completion.finish_reason,
                **r.rewards,
            }
            for r in group
        ],
    }
