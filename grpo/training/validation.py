"""Evaluation of a run's policy on its validation problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo.common.records import Problem, Rollout
from grpo.evaluation.episodes import episode_measures, transcript
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
from grpo.training.step import RunSetup

GENERATIONS = 64  # number of rollouts per evaluation whose token entropy is measured


@dataclass(frozen=True)
class Validated:
    """Result of one evaluation.

    Attributes:
        rollouts: one for each problem.
        generations: records of the first GENERATIONS rollouts (:func:`grpo.evaluation.evaluate.log_generations`).
    """

    rollouts: list[Rollout]
    generations: list[dict[str, Any]]
    metrics: dict[str, float]


class Validation:
    """Evaluation of a run's policy.

    The sampling seed is the same in all runs of a study, so all arms get the same problems and the same random numbers.

    Args:
        sampler, learner: hold the policy, in the sampler's engine and the learner's model.
        problems: the whole validation set; an evaluation uses its first ``settings.problems``, the last one its first
            ``settings.last_problems``.
    """

    def __init__(
        self,
        setup: RunSetup[Any],
        settings: Evaluation,
        problems: Sequence[Problem],
        sampler: Sampler,
        learner: Any,
    ):
        self.setup, self.settings, self.sampler, self.learner = setup, settings, sampler, learner
        self.all_problems, self.problems = problems, problems[: settings.problems]
        self.last_problems = problems[: settings.last_problems]

    def __call__(self, step: int, last: bool = False) -> Validated:
        """Evaluate the policy after ``step`` steps; set ``last`` if the run ends at this step."""
        engine, learner = self.sampler.engine, self.learner
        if engine.policy_version != step:  # in supervised fine-tuning only evaluation uses the engine
            engine.synchronize(learner.model, step)
        rollouts = self._sample(self.last_problems if last else self.problems)
        logged = rollouts[:GENERATIONS]
        generations, summary = log_generations(
            self.sampler.tokenizer.batch_decode([r.prompt_ids for r in logged]),
            [transcript(r.completion) for r in logged],
            [r.problem.ground_truth for r in logged],
            [r.rewards for r in logged],
            learner.token_entropies(logged),
            [r.length for r in logged],
        )
        metrics = {
            **summarize(rollouts),
            "token_entropy": summary["token_entropy"],
            **lengths_by_outcome([r.rewards for r in rollouts], [r.length for r in rollouts]),
            **self.setup.task.measures(rollouts),
            **episode_measures(rollouts),
        }
        return Validated(rollouts, generations, metrics)

    def on_all_problems(self) -> dict[str, float]:
        """Answer reward on the whole validation set, for the leaderboard, and the size of that set."""
        answer_reward = summarize(self._sample(self.all_problems))["answer_reward"]
        return {"full/answer_reward": answer_reward, "full/problems": len(self.all_problems)}

    def sampling(self, format: Format) -> SamplingParams:
        """Sampling parameters of an evaluation; its responses are never longer than in training."""
        config, sampling = self.setup.config, evaluation_sampling(self.settings, format)
        if isinstance(config, SamplingConfig):
            return replace(sampling, max_tokens=min(sampling.max_tokens, config.sampling_max_tokens))
        return sampling

    def _sample(self, problems: Sequence[Problem]) -> list[Rollout]:
        groups = evaluate(self.sampler, problems, self.sampling(self.sampler.format), self.settings.seed)
        return [rollout for (rollout,) in groups]
