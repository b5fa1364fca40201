"""The plain records that flow through a study: problems, completions and rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One question with its verifiable answer.

    Attributes:
        id: unique within a dataset.
        question: what replaces ``{question}`` in the prompt.
        ground_truth: the short answer the reward function compares with.
        level: difficulty (1 is easiest), or 0 where the source states none.
        subject: topic, or the empty string where the source states none.
    """

    id: str
    question: str
    ground_truth: str
    level: int = 0
    subject: str = ""


@dataclass(frozen=True)
class Completion:
    """What an engine sampled for one prompt.

    Attributes:
        token_ids: the sampled ids, in order. They travel to the learner as they are; the text is never tokenised again.
        text: the decoded ids, cut right after the stop string if one ended the completion.
        log_probs: natural-log probability of each sampled token under the distribution it was drawn from
            (after temperature, top-p and minimum length), same length as ``token_ids``.
        finish_reason: ``"stop"`` (end-of-text token or stop string) or ``"length"`` (token limit reached).
        policy_version: number of weight updates the sampling policy had received.
    """

    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...]
    finish_reason: str
    policy_version: int = 0


@dataclass(frozen=True)
class Rollout:
    """A completion with the problem it answers and the rewards it earned (``format_reward``, ``answer_reward``, ``reward``)."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    completion: Completion
    rewards: dict[str, float]


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(asdict(problem), ensure_ascii=False) + "\n")


def read_problems(path: Path) -> list[Problem]:
    """Read what :func:`write_problems` wrote.

    Raises:
        UserError: the file is missing or empty, or a line is not a problem.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file. Run `dvc repro dataset` to make it.")
    problems = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                problems.append(Problem(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{path}:{number}: not a problem record ({error}). Run `dvc repro -f dataset` to make it anew."
                ) from error
    if not problems:
        raise UserError(
            f"{path}: holds no problems. Check the sizes under `task:` in params.yaml and run `dvc repro -f dataset`."
        )
    return problems
