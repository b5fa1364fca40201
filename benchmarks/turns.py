"""Measure a step of three turns against a step of one turn with as many sampled tokens: ``python benchmarks/turns.py``.

64 episodes of a random model of 0.85M parameters, sampled and trained on, on the CPU. The two take turns. Each turn ends after
16 tokens, because any character is a stop string after the minimum; the environment then writes about 14 tokens, which the
learner reads too: with the prompts, its rows have 1.57 times as many tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from step import BUDGET, make_model

from grpo.common.process import start_threads
from grpo.common.records import Problem, Rollout
from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.rollout.sampling import Sampler, sample_rollouts
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import GrpoConfig, LearnerSettings
from grpo.tasks.arithmetic import word_problems
from grpo.tasks.environment import Environment
from grpo.tasks.task import Format, ScoredBatch

TURNS, TOKENS, GROUPS, MEMBERS = 3, 16, 8, 8
ANY = (*map(chr, range(32, 127)), "\n", "\ufffd")


class Echo:
    """Answers each turn."""

    def reset(self) -> None:
        """Begin."""

    def step(self, text: str) -> str:
        """Answer a turn."""
        return f" That were {len(text)}. "


def measured(
    sampler: Sampler, learner: Learner, problems: list[Problem], params: SamplingParams, step: int
) -> tuple[float, float, dict[str, int]]:
    """Seconds of CPU for sampling and for the update in a step, and its tokens after the prompts: sampled, and written."""
    began = time.process_time()
    rollouts: list[Rollout] = sample_rollouts(sampler, problems, params, MEMBERS, seed=step)
    sampled = time.process_time()
    for i, rollout in enumerate(rollouts):
        rollout.rewards, rollout.advantage, rollout.group = {"reward": float(i % 2)}, i % 2 - 0.5, i // MEMBERS
    learner.update(rollouts)
    ended = time.process_time()
    written = sum(rollout.completion.observed for rollout in rollouts)
    return sampled - began, ended - sampled, {"sampled": sum(rollout.length for rollout in rollouts), "written": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start_threads(1)
    questions = word_problems(1, 4, validation=False)
    problems = [Problem(str(i), next(questions).question, "1") for i in range(GROUPS)]
    score = lambda rollouts: ScoredBatch([{"reward": 0.0}] * len(rollouts), [False] * len(rollouts))  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        model, tokenizer = load_model(Path(folder)), load_tokenizer(Path(folder))
    sizes = {"rollout_batch_size": 64, "train_batch_size": 64, "group_size": MEMBERS, "gradient_accumulation_steps": 1}
    config = GrpoConfig(**sizes, sampling_max_tokens=TURNS * TOKENS, learning_rate=1e-5)
    learner = Learner(model, config, tokenizer.pad_token_id, LearnerSettings(max_tokens_per_microbatch=BUDGET))
    engine, environment = TransformersEngine(model, tokenizer), Environment("turns:Echo", max_turns=TURNS)
    longest = TURNS * TOKENS
    ways = {
        "one turn": (Format("{question}\n"), SamplingParams(min_tokens=longest, max_tokens=longest)),
        "three turns": (
            Format("{question}\n", stop=ANY, environment=environment),
            SamplingParams(min_tokens=TOKENS - 1, max_tokens=longest, stop=ANY),
        ),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    tokens: dict[str, dict[str, int]] = {}
    for step in range(options.steps + 2):
        for name, (format, params) in ways.items():
            *taken, tokens[name] = measured(Sampler(engine, tokenizer, format, score), learner, problems, params, step)
            if step >= 2:
                times[name].append((taken[0], taken[1]))
    parts = {
        name: {part: statistics.median(pair[i] for pair in each) for i, part in enumerate(("sampling", "update"))}
        for name, each in times.items()
    }
    whole = {name: statistics.median(map(sum, each)) for name, each in times.items()}
    ratio = whole["three turns"] / whole["one turn"]
    found = {"seconds": whole, "parts": parts, "tokens": tokens, "ratio": ratio, "steps": options.steps}
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
