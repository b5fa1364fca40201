"""Estimators of pass@N, Best@N and majority@N from one set of samples.

Each estimator uses all S samples of a problem, and its value is the expectation over a random choice of N of them. So the three
differ in how they choose an answer, not in the samples they see.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_SUBSETS = 2000  # if there are more subsets, majority@N uses this many random ones


def pass_at_n(correct: Floats, n: int) -> Floats:
    """Probability that at least one of ``n`` samples is right: 1 - C(S - c, n) / C(S, n) (Chen et al. 2021, arXiv:2107.03374).

    Args:
        correct: (problems, S), 1.0 where a sample is right, else 0.0.

    Returns:
        (problems,).
    """
    samples = correct.shape[1]
    return np.array([1 - comb(samples - int(right), n) / comb(samples, n) for right in correct.sum(axis=1)])


def best_at_n(correct: Floats, scores: Floats, n: int) -> Floats:
    """Probability that the sample with the highest score among ``n`` is right.

    The sample of rank k (0 is best) is the best in C(S - 1 - k, n - 1) of the C(S, n) subsets. Samples with equal scores count
    with their mean correctness.

    Args:
        correct: (problems, S).
        scores: (problems, S), such as mean token log-probabilities.

    Returns:
        (problems,).
    """
    samples = correct.shape[1]
    weights = np.array([comb(samples - 1 - k, n - 1) for k in range(samples)]) / comb(samples, n)
    results = []
    for right, score in zip(correct, scores, strict=True):
        _, rank = np.unique(-score, return_inverse=True)
        mean_of_equals = np.bincount(rank, right) / np.bincount(rank)
        results.append(weights @ mean_of_equals[np.sort(rank)])
    return np.array(results)


def majority_at_n(correct: Floats, votes: NDArray[np.int64], n: int, seed: int = 0) -> Floats:
    """Probability that the most frequent answer among ``n`` samples is right; tied answers have equal weight.

    It averages over all subsets of n samples, or over MAX_SUBSETS random ones if there are more.

    Args:
        correct: (problems, S).
        votes: (problems, S), equal numbers for equal answers; -1 for a sample without an answer, which has no vote.

    Returns:
        (problems,); a subset without votes counts as wrong.
    """
    chosen = _subsets(correct.shape[1], n, np.random.default_rng(seed))
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

    Only problems with both right and wrong samples (mixed ones) are informative.

    Args:
        correct, scores, lengths: (problems, S); length in tokens.
        formed: (problems, S), 1.0 where a sample has the right form.

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
