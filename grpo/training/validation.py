"""Evaluation of the policy on the fixed validation problems, during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from grpo.common.records import Problem, Rollout
from grpo.evaluation.evaluate import (
    Sampler,
    evaluate,
    evaluation_sampling,
    lengths_by_outcome,
    log_generations,
    summarize,
)
from grpo.rollout.engine import SamplingParams
from grpo.study.methods import SamplingConfig
from grpo.study.settings import Evaluation
from grpo.tasks.task import Format
from grpo.training.context import RunSetup

FURTHER_METRICS = ("answer_reward", "format_reward", "response_length")  # of each further set
GENERATIONS = 64  # validation rollouts whose token entropy is measured at each evaluation


@dataclass(frozen=True)
class Validated:
    """One evaluation.

    Attributes:
        rollouts: one for each problem.
        generations: of the first GENERATIONS the records that are shown (:func:`grpo.evaluation.evaluate.log_generations`).
    """

    rollouts: list[Rollout]
    generations: list[dict[str, Any]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class FurtherSet:
    """A further evaluation set.

    Attributes:
        sampler: puts and scores the problems as their own task does.
        every: it is evaluated where the step is a multiple of it, and at the last step.
    """

    problems: Sequence[Problem]
    sampler: Sampler
    every: int


class Validation:
    """Evaluates a run's policy.

    The sampling seed is the study's, not the run's: all arms are measured with the same problems and the same draws.

    Args:
        sampler, learner: which hold the policy.
        problems: the validation set; the first ``settings.problems`` are the ones that count.
        also: further sets, by name.
    """

    def __init__(
        self,
        setup: RunSetup[Any],
        settings: Evaluation,
        problems: Sequence[Problem],
        sampler: Sampler,
        learner: Any,
        also: Mapping[str, FurtherSet] = MappingProxyType({}),
    ):
        self.setup, self.settings, self.sampler, self.learner, self.also = setup, settings, sampler, learner, also
        self.all_problems, self.problems = problems, problems[: settings.problems]

    def __call__(self, step: int, last: bool = False) -> Validated:
        """The policy after ``step`` steps, which may be known to be the run's last."""
        engine, learner = self.sampler.engine, self.learner
        if engine.policy_version != step:  # supervised fine-tuning has no other use for the engine
            engine.synchronize(learner.model, step)
        rollouts = self._sample(self.problems, self.sampler)
        looked_at = rollouts[:GENERATIONS]
        generations, summary = log_generations(
            self.sampler.tokenizer.batch_decode([r.prompt_ids for r in looked_at]),
            [r.completion.text for r in looked_at],
            [r.problem.ground_truth for r in looked_at],
            [r.rewards for r in looked_at],
            learner.token_entropies(looked_at),
            [len(r.completion.token_ids) for r in looked_at],
        )
        metrics = {
            **summarize(rollouts),
            "token_entropy": summary["token_entropy"],
            **lengths_by_outcome(rollouts),
            **self.setup.task.measures(rollouts),
            **self._on_further_sets(step, last or step == self.setup.config.n_steps),
        }
        return Validated(rollouts, generations, metrics)

    def on_all_problems(self) -> dict[str, float]:
        """The answer reward on the whole validation set, which the leaderboard's rules ask for, and its size."""
        answer_reward = summarize(self._sample(self.all_problems, self.sampler))["answer_reward"]
        return {"full/answer_reward": answer_reward, "full/problems": len(self.all_problems)}

    def _on_further_sets(self, step: int, last: bool) -> dict[str, float]:
        """Means over each further set; NaN where it is not to be evaluated now."""
        found: dict[str, float] = {}
        for name, one in self.also.items():
            due = last or step % one.every == 0
            means = summarize(self._sample(one.problems, one.sampler)) if due else {}
            found |= {f"also/{name}/{key}": means.get(key, math.nan) for key in FURTHER_METRICS}
        return found

    def sampling(self, format: Format) -> SamplingParams:
        """How responses are sampled. One that is too long in training is too long here."""
        config, sampling = self.setup.config, evaluation_sampling(self.settings, format)
        if isinstance(config, SamplingConfig):
            return replace(sampling, max_tokens=min(sampling.max_tokens, config.sampling_max_tokens))
        return sampling

    def _sample(self, problems: Sequence[Problem], sampler: Sampler) -> list[Rollout]:
        groups = evaluate(sampler, problems, self.sampling(sampler.format), self.settings.seed)
        return [rollout for (rollout,) in groups]
