"""The records of a study: problems, completions, rollouts and examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.common.errors import UserError
from grpo.common.files import read_jsonl, write_jsonl

if TYPE_CHECKING:  # torch is not needed to read problems
    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """One question with its verifiable answer."""

    id: str  # unique within a dataset
    question: str  # replaces ``{question}`` in the prompt
    ground_truth: str  # the short answer that the reward function compares with
    level: int = 0  # difficulty (1 is easiest); 0 if the source gives none
    subject: str = ""  # topic; empty if the source gives none
    columns: dict[str, Any] = field(default_factory=dict, hash=False)  # further JSON values, for reward functions

    def __post_init__(self) -> None:
        _check_types(self)


FINISH_REASONS = ("stop", "length")
TOOL_CALL = ("<tool_call>", "</tool_call>")  # around the JSON of a call, unless the tokenizer defines another form


@dataclass(frozen=True)
class Episode:
    """What happened in an episode of several turns (:mod:`grpo.rollout.sampling`)."""

    # Role and text of each message after the prompt: `assistant` (of the policy), `tool` or `user` (of the environment).
    messages: tuple[tuple[str, str], ...]
    tool_calls: int = 0  # that the policy wrote, those that could not be read included
    tool_failures: int = 0  # calls that ended in an error, took too long, or could not be read
    limit: str = ""  # key of the limit that ended the episode; empty if the policy or the environment ended it
    reward: float | None = None  # what the environment's `get_reward` returned; None if the task verifies the last turn
    instance: Any = field(default=None, compare=False, repr=False)  # the environment, until the rollout has its rewards

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return sum(role == "assistant" for role, _ in self.messages)


@dataclass(frozen=True)
class Completion:
    """What followed one prompt: one response of the policy, or an episode in which an environment wrote some of the tokens."""

    token_ids: tuple[int, ...]  # all ids after the prompt, in order. The learner uses them; the text is never tokenised again
    # The decoded ids with special tokens, without the stop token at the end; cut right after the stop string if one ended the
    # completion. In an episode the text of the last turn.
    text: str
    # Natural log-probability of each sampled token, after temperature, top-p and minimum length.
    log_probs: tuple[float, ...]
    finish_reason: str  # "stop" (stop token or stop string) or "length" (token limit; in an episode any limit)
    policy_version: int = 0  # number of weight updates that the sampling policy had received
    # Start and end in `token_ids` of each piece that the environment wrote: read, like the prompt, and not learnt.
    observations: tuple[tuple[int, int], ...] = ()
    episode: Episode | None = None  # None for one response

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"the engine ended a response with {self.finish_reason!r}, not with 'stop' or 'length'")
        sampled = len(self.token_ids) - self.observed
        if sampled != len(self.log_probs):
            raise ValueError(f"the engine gave {sampled} tokens with {len(self.log_probs)} log-probabilities")

    @property
    def observed(self) -> int:
        """Number of tokens that the environment wrote."""
        return sum(end - start for start, end in self.observations)

    @property
    def sampled(self) -> Sequence[int]:
        """Positions in ``token_ids`` of the sampled tokens."""
        if not self.observations:
            return range(len(self.token_ids))
        written = {place for span in self.observations for place in range(*span)}
        return [place for place in range(len(self.token_ids)) if place not in written]


def is_number(value: object) -> bool:
    """Whether a reward is a number: of Python, or a scalar of numpy or torch."""
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0


def whole(reward: Any) -> float:
    """Return 0 or 1 in place of a reward that differs from it by rounding only, such as the float32 sum of ten tenths."""
    reward = float(reward)
    return next((near for near in (0.0, 1.0) if abs(reward - near) <= 1e-6), reward)


@dataclass
class Rollout:
    """One response on its way from the engine to the optimizer. Later steps fill in rewards, advantage and log-probs."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    completion: Completion
    # `format_reward`, `answer_reward` and `reward`, each from 0 to 1; empty until scored. A response is right if its reward is
    # 1. With the study's own reward, `reward` may be any number, or NaN where that abstains.
    rewards: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False  # the grader ran out of time on the answer, which counts as wrong
    advantage: float = 0.0  # the reward normalised within the group; representable in float32
    # (length,) log-probs of the sampled tokens under the sampling policy (None if on-policy) and the starting weights (None if
    # not needed).
    old_log_probs: Tensor | None = field(default=None, compare=False, repr=False)
    reference_log_probs: Tensor | None = field(default=None, compare=False, repr=False)
    group: int = field(default=0, compare=False, repr=False)  # number of its group within the rollout batch
    length_penalty: float = 0.0  # what `reward` includes for a long response (`overlong_buffer`), from -1 to 0

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return len(self.completion.log_probs)


def response_tokens(rollouts: Iterable[Rollout]) -> int:
    """Total number of sampled tokens."""
    return sum(rollout.length for rollout in rollouts)


@dataclass(frozen=True)
class Example:
    """One reasoning trace for supervised fine-tuning: the whole prompt, as the model sees it, and the response to learn."""

    prompt: str
    response: str
    ground_truth: str
    reward: float  # of the response

    def __post_init__(self) -> None:
        _check_types(self)


def require_tokens(prompts: Sequence[Sequence[int]]) -> None:
    """Raise UserError if a prompt has no tokens, after which a model cannot predict a response."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i + 1} of {len(prompts)} has no tokens. Leave it out, or ask in a format with more text.")


def is_text(value: str) -> bool:
    """Whether a string can be encoded in UTF-8. Half a surrogate pair, which JSON allows, cannot."""
    return not re.search("[\ud800-\udfff]", value)


_KINDS: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (float, int), "dict[str, Any]": dict}


def _check_types(record: Problem | Example) -> None:
    """Raise UserError unless each field has its type, and text is valid UTF-8, as files, tokenizers and the grader need."""
    for column in fields(record):
        value, name = getattr(record, column.name), str(column.type)
        if not isinstance(value, _KINDS[name]) or (isinstance(value, str) and not is_text(value)):
            kind = {"str": "text that UTF-8 can hold", "dict[str, Any]": "a dictionary"}.get(name, "a number")
            raise UserError(f"{type(record).__name__}: {column.name} is {value!r}, not {kind}. Correct the task.")


def write_records(path: Path, records: Iterable[Problem | Example]) -> None:
    """Write one JSON object per line; a problem without ``columns`` has no such key."""
    all_values = map(asdict, records)
    write_jsonl(path, ({k: value for k, value in values.items() if k != "columns" or value} for values in all_values))


def read_problems(path: Path) -> list[Problem]:
    """Read the problems of a task's split; UserError if the file is missing or empty, or a line is no problem."""
    return read_jsonl(path, f"dataset@{path.parent.name}", lambda values: Problem(**values))


def read_examples(path: Path) -> list[Example]:
    """Read reasoning traces; errors as :func:`read_problems`."""
    return read_jsonl(path, f"sft_dataset@{path.parent.name}", lambda values: Example(**values))
