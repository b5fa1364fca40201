"""Sampling and scoring of rollouts: responses of one turn, and episodes, in which policy and environment write in turn.

All episodes of a batch advance together. Tokens go in and tokens come out: what the policy sampled is never tokenised again,
and no earlier turn is rendered again. A turn's random numbers come from its seed, its question, its member of the group and its
number, so an episode depends neither on the others nor on the number of processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo.common.errors import UserError
from grpo.common.records import Completion, Episode, Problem, Rollout
from grpo.common.world import ALONE, World
from grpo.rollout.engine import CompletionSpec, Engine, SamplingParams, derive_seed, require_context_length
from grpo.tasks.environment import Answer, Environment
from grpo.tasks.rewards import ScoreFunction
from grpo.tasks.task import Format
from grpo.tasks.threads import Thread, in_threads

# The key of the limit that ended an episode (Episode.limit).
TOKENS, TURNS, OBSERVATION, SECONDS = "max_tokens", "max_turns", "max_observation_tokens", "tool_seconds"


@dataclass(frozen=True)
class Sampler:
    """Everything that turns problems into rollouts, in the processes of ``world``, which share the problems."""

    engine: Engine
    tokenizer: Any
    format: Format
    score: ScoreFunction
    world: World = ALONE

    def encode(self, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        """Token ids of each problem's prompt."""
        return self.format.encode_all(self.tokenizer, [self.format.prompt_of(problem) for problem in problems])

    def require_context_length(self, problems: Sequence[Problem], max_tokens: int, key: str, source: str) -> None:
        """Refuse problems with too long prompts, before sampling (:func:`grpo.rollout.engine.require_context_length`)."""
        environment = self.format.environment
        observations = environment.most_observation_tokens if environment else 0
        require_context_length(self.engine.context, self.encode(problems), max_tokens, key, source, observations)


def sample_rollouts(sampler: Sampler, problems: Sequence[Problem], params: SamplingParams, n: int, seed: int) -> list[Rollout]:
    """Sample ``n`` rollouts for each problem of this process's share, without scores.

    Returns the rollouts, those of a problem side by side.
    """
    prompts, share = sampler.encode(problems), sampler.world.share
    if sampler.format.environment is None:
        groups = sampler.engine.generate(prompts, params, n=n, seed=seed)
    else:
        groups = sample_episodes(sampler, problems, prompts, params, n, seed)
    if (sizes := [len(group) for group in groups]) != [n] * len(prompts[share]):
        raise ValueError(f"the engine was asked for groups of {n} responses, and returned groups of {sizes}")
    for length in (len(one.log_probs) for group in groups for one in group):
        if not 1 <= length <= params.max_tokens:
            raise ValueError(f"the engine was asked for 1 to {params.max_tokens} tokens, and returned a response of {length}")
    mine = zip(problems[share], prompts[share], groups, strict=True)
    return [Rollout(problem, ids, completion) for problem, ids, group in mine for completion in group]


def score_rollouts(score: ScoreFunction, rollouts: Sequence[Rollout]) -> None:
    """Score all rollouts at once, in place. Episodes let go of their environments, which no other process can be sent."""
    scored = score(rollouts)
    for rollout, rewards, timed_out in zip(rollouts, scored.rewards, scored.out_of_time, strict=True):
        rollout.rewards, rollout.timed_out = rewards, timed_out
        if (episode := rollout.completion.episode) is not None:
            rollout.completion = replace(rollout.completion, episode=replace(episode, instance=None))


# --------------------------------------------------------------------------------------------------------------------- episodes


class RunningEpisode:
    """An episode while it is sampled, with its own instance of the environment, its own thread for that, and its own seed."""

    def __init__(self, prompt: Sequence[int], seed: int):
        self.thread, self.prompt, self.seed = Thread(), prompt, seed
        self.instance: Any = None
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.observations: list[tuple[int, int]] = []
        self.messages: list[tuple[str, str]] = []
        self.calls: list[Any] = []  # of the newest turn
        self.tool_calls = self.tool_failures = self.policy_version = 0
        self.limit = ""
        self.over, self.turns = False, 0

    def end(self, limit: str = "") -> None:
        """End the episode, by a limit or because nothing is left to say."""
        self.over, self.limit = True, limit

    def take(self, turn: Completion) -> None:
        """Add a turn of the policy, which ends the episode if it was cut off."""
        self.token_ids += turn.token_ids
        self.log_probs += turn.log_probs
        self.messages.append(("assistant", turn.text))
        self.policy_version, self.turns = turn.policy_version, self.turns + 1
        if turn.finish_reason == "length":
            self.end(TOKENS)

    def read(self, ids: Sequence[int], messages: Sequence[dict[str, str]]) -> None:
        """Add what the environment wrote."""
        self.observations.append((len(self.token_ids), len(self.token_ids) + len(ids)))
        self.token_ids += ids
        self.messages += [(message["role"], message["content"]) for message in messages]

    def completion(self, reward: float | None) -> Completion:
        text = next(text for role, text in reversed(self.messages) if role == "assistant")
        done = Episode(tuple(self.messages), self.tool_calls, self.tool_failures, self.limit, reward, self.instance)
        reason = "length" if self.limit else "stop"
        ids, log_probs = tuple(self.token_ids), tuple(self.log_probs)
        return Completion(ids, text, log_probs, reason, self.policy_version, tuple(self.observations), done)


def sample_episodes(
    sampler: Sampler, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int
) -> list[list[Completion]]:
    """Sample ``n`` episodes of each problem of this process's share.

    Returns a list of ``n`` episodes for each problem, in the order of ``problems``. Raises UserError: the environment begins
    two episodes of a problem differently, or one of its methods fails that must not; or the chat template leaves out what the
    environment writes. ``prompts``: token ids of all problems' prompts. ``params``: ``max_tokens`` limits the sampled tokens of
    an episode, ``min_tokens`` those of each turn.
    """
    environment, share = sampler.format.environment, sampler.world.share
    assert environment is not None, "this format has no environment"
    require_tool_messages(sampler.format, sampler.tokenizer)
    seeds = _seeds(problems, seed)[share]
    episodes = [
        RunningEpisode(prompt, derive_seed(of_question, member))
        for prompt, of_question in zip(prompts[share], seeds, strict=True)
        for member in range(n)
    ]
    try:
        for place, episode in enumerate(episodes):
            _begin(environment, problems[share][place // n], episode)
        _play(sampler, environment, episodes, params, n, seed)
        rewards = _rewards(environment, episodes)
    finally:
        for episode in episodes:
            episode.thread.put(None)
    found = [episode.completion(reward) for episode, reward in zip(episodes, rewards, strict=True)]
    return [found[i : i + n] for i in range(0, len(found), n)]


def require_tool_messages(format: Format, tokenizer: Any) -> None:
    """Refuse a chat template that leaves out what the format's environment writes."""
    if (environment := format.environment) is None:
        return
    answer = {"role": "user"} if environment.speaks else {"role": "tool", "name": environment.tools[0]}
    (ids,) = _encode(format, tokenizer, [[answer | {"content": "a result"}]])
    if "a result" not in tokenizer.decode(ids):
        raise UserError(
            f"environment: the model's chat template leaves out messages of the role {answer['role']}, so the policy would not "
            "see what the environment answers. Use a model that was trained for that, or a format that is no chat."
        )


def _begin(environment: Environment, problem: Problem, episode: RunningEpisode) -> None:
    seed = derive_seed(episode.seed, "environment")
    episode.instance, text = episode.thread.result_of(partial(environment.begin, problem, seed))
    if text != environment.opening(problem):
        raise UserError(
            f"environment: {environment.environment}.reset returned two texts for the question {problem.id}. Return the "
            "same text for the same row, because a group's rewards are compared; draw what may differ in the tools."
        )


def _play(
    sampler: Sampler, environment: Environment, episodes: Sequence[RunningEpisode], params: SamplingParams, n: int, seed: int
) -> None:
    with sampler.engine.turns():
        for turn in range(environment.max_turns):
            going = [episode for episode in episodes if not episode.over]
            if not going:
                break
            draws = [
                CompletionSpec(derive_seed(each.seed, "turn", turn), params.max_tokens - len(each.log_probs)) for each in going
            ]
            size = n if turn == 0 else 1  # the members of a group share their prompt
            asked = [[*each.prompt, *each.token_ids] for each in going[::size]]
            groups = sampler.engine.generate(asked, params, size, derive_seed(seed, "turn", turn), draws)
            for episode, completion in zip(going, (one for group in groups for one in group), strict=True):
                episode.take(completion)
            _answer([episode for episode in going if not episode.over], sampler, params.max_tokens)


def _rewards(environment: Environment, episodes: Sequence[RunningEpisode]) -> list[float | None]:
    """Rewards of the environment, 0 for an episode whose tool may still be at work; None where the task verifies."""
    if not environment.rewards:
        return [None] * len(episodes)
    done = [episode for episode in episodes if episode.limit != SECONDS]
    found = in_threads([(each.thread, partial(environment.reward, each.instance)) for each in done], environment.tool_seconds)
    if None in found:
        raise UserError(
            f"environment: {environment.environment}.get_reward takes longer than tool_seconds ({environment.tool_seconds} s). "
            "Raise that."
        )
    given = iter(found)
    return [0.0 if episode.limit == SECONDS else next(given) for episode in episodes]


def _seeds(problems: Sequence[Problem], seed: int) -> list[int]:
    """A seed for each question; one that a batch has twice gets two."""
    seen: Counter[str] = Counter()
    found = []
    for problem in problems:
        found.append(derive_seed(seed, problem.id, seen[problem.id]))
        seen[problem.id] += 1
    return found


def _answer(episodes: Sequence[RunningEpisode], sampler: Sampler, max_tokens: int) -> None:
    """Let the environment answer the newest turn of each episode, and end those that are over.

    Calls run even where no turn can follow, as an environment's reward may depend on them.
    """
    environment, tokenizer = sampler.format.environment, sampler.tokenizer
    assert environment is not None
    if not environment.speaks:
        schemas = environment.schemas if sampler.format.chat else []
        said = [episode.messages[-1][1] for episode in episodes]
        before = [[*episode.prompt, *episode.token_ids] for episode in episodes]
        for episode, calls in zip(episodes, tokenizer.tool_calls(said, before, schemas), strict=True):
            episode.calls = calls
            episode.tool_calls += len(episode.calls)
            if not episode.calls:
                episode.end()
        episodes = [episode for episode in episodes if not episode.over]
    answers = in_threads(
        [(each.thread, partial(environment.answer, each.instance, each.messages[-1][1], each.calls)) for each in episodes],
        environment.tool_seconds,
    )
    spoken: list[tuple[RunningEpisode, Answer]] = []
    for episode, answer in zip(episodes, answers, strict=True):
        if answer is None:
            episode.tool_failures += 1
            episode.end(SECONDS)
            continue
        episode.tool_failures += answer.failures
        if not answer.messages:
            episode.end()
        elif episode.turns == environment.max_turns:
            episode.end(TURNS)
        elif len(episode.log_probs) >= max_tokens:
            episode.end(TOKENS)
        else:
            spoken.append((episode, answer))
    written = encode_answers(sampler.format, tokenizer, [answer.messages for _, answer in spoken])
    for (episode, _), (ids, messages) in zip(spoken, written, strict=True):
        if sampler.format.chat and episode.token_ids[-1] != tokenizer.end_of_turn_id:
            ids = [tokenizer.end_of_turn_id, *ids]  # the policy ended its turn with another token
        if len(ids) > environment.max_observation_tokens:
            episode.end(OBSERVATION)
        else:
            episode.read(ids, messages)


def encode_answers(
    format: Format, tokenizer: Any, answers: Sequence[Sequence[dict[str, str]]]
) -> list[tuple[list[int], list[dict[str, str]]]]:
    """Encode an environment's answers, each cut to ``max_observation_tokens`` with what stands around it.

    Returns for each answer its ids, and its messages as they were encoded. The ids are too many if the calls were.
    """
    assert format.environment is not None
    most = format.environment.max_observation_tokens - 1  # one may end the policy's turn
    found = [(ids, list(messages)) for ids, messages in zip(_encode(format, tokenizer, answers), answers, strict=True)]
    long = [place for place, (ids, _) in enumerate(found) if len(ids) > most]
    empty = _encode(format, tokenizer, [[message | {"content": ""} for message in found[place][1]] for place in long])
    for place, frame in zip(long, empty, strict=True):
        room = most - len(frame)
        while len(found[place][0]) > most and room > 0:
            cut = _cut(tokenizer, answers[place], room)
            (ids,) = _encode(format, tokenizer, [cut])
            found[place], room = (ids, cut), room - max(1, len(ids) - most)
    return found


def _cut(tokenizer: Any, messages: Sequence[dict[str, str]], room: int) -> list[dict[str, str]]:
    """Messages whose contents have ``room`` tokens together; the first keep theirs."""
    found = []
    for message in messages:
        ids = tokenizer(tokenizer.as_text(message["content"]), add_special_tokens=False)["input_ids"]
        kept = message["content"] if len(ids) <= room else tokenizer.decode(ids[:room]).rstrip("\ufffd")
        found.append(message | {"content": kept})
        room = max(0, room - len(ids))
    return found


def _encode(format: Format, tokenizer: Any, answers: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
    """Encode messages of an environment by the chat template, or, in a text that is no chat, one after the other."""
    if not answers:
        return []
    if format.chat:
        return [list(ids) for ids in tokenizer.next_turns(answers, **format.options)]
    texts = []
    for messages in answers:
        said = ((message["role"], tokenizer.as_text(message["content"])) for message in messages)
        texts.append("".join(f"<tool_response>{text}</tool_response>" if role == "tool" else text for role, text in said))
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def episode_measures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over episodes: turns, calls of tools, those that failed, tokens of the environment, share ended by a limit.

    Empty unless the rollouts are episodes.
    """
    episodes = [(each.completion.episode, each.completion.observed) for each in rollouts]
    known = [(episode, observed) for episode, observed in episodes if episode is not None]
    if not known:
        return {}
    columns: dict[str, Sequence[float]] = {
        "turns": [episode.turns for episode, _ in known],
        "tool_calls": [episode.tool_calls for episode, _ in known],
        "tool_failures": [episode.tool_failures for episode, _ in known],
        "environment_tokens": [observed for _, observed in known],
        "ended_by_limit": [bool(episode.limit) for episode, _ in known],
    }
    return {name: sum(values) / len(known) for name, values in columns.items()}


def transcript(completion: Completion) -> str:
    """The text of a response. Of an episode: all messages, with the role before each message of the environment."""
    if completion.episode is None:
        return completion.text
    # A line that only looks like the environment's is indented.
    written = ((role, re.sub(r"(?m)^(?=\[(tool|user)\] )", " ", text)) for role, text in completion.episode.messages)
    parts = (text if role == "assistant" else f"\n[{role}] {text}\n" for role, text in written)
    return "".join(parts).strip("\n")
