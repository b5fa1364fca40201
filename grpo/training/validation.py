"""Validation during a run: what is measured, the samples that are kept, the best checkpoint, and when the run is over."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.common.files import write_text
from grpo.common.records import Problem, Rollout
from grpo.evaluation.evaluate import evaluate, evaluation_sampling, lengths_by_outcome, log_generations, summarize
from grpo.learner.learner import Learner
from grpo.results.statistics import wilson_interval
from grpo.rollout.engine import Engine
from grpo.study.effective import EffectiveRun
from grpo.study.methods import SamplingConfig, SftConfig, evaluation_steps
from grpo.study.schema import Study
from grpo.tasks.task import Task, find_format
from grpo.tracking.run_log import RunLog
from grpo.training.divergence import divergence

SAMPLES = 8  # validation rollouts kept at the first, the middle and the last evaluation
GENERATIONS = 64  # validation rollouts whose token entropy is measured at each evaluation
REWARD = "val/answer_reward"
_STATE = ("samples", "outcomes", "ended", "_entropies", "_updates", "_skipped", "_skipped_in_all")


class Validation:
    """Evaluates the policy on the fixed validation problems, before the first step, every few steps, and after the last.

    The sampling seed is the study's, not the run's: all arms are measured with the same problems and the same draws.

    Args:
        problems: the validation set; the first ``evaluation.problems`` are the ones that count.
        keep: saves the weights, given the checkpoint's kind (``best``, or ``step-N`` where that is wanted) and metadata.
    """

    def __init__(
        self,
        study: Study,
        run: EffectiveRun,
        task: Task,
        problems: Sequence[Problem],
        engine: Engine,
        learner: Learner,
        tokenizer: Any,
        log: RunLog,
        keep: Callable[[str, dict[str, Any]], None],
    ):
        n = run.config.n_steps
        self.steps = evaluation_steps(run.config, study.evaluation.every)
        self.sampled_steps = {self.steps[0], self.steps[len(self.steps) // 2]}
        self.study, self.config, self.task = study, run.config, task
        self.all_problems, self.problems = problems, problems[: study.evaluation.problems]
        self.engine, self.learner, self.tokenizer, self.log = engine, learner, tokenizer, log
        self.keep = keep
        self.samples: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.ended: dict[str, Any] = {"diverged_step": None, "diverged_reason": "", "time_limit_step": None}
        self._latest: list[Rollout] = []
        self._generations: list[dict[str, Any]] = []
        self._entropies: list[float] = []
        self._updates = self._skipped = self._skipped_in_all = 0
        self.bar = tqdm(total=n, desc=run.name, unit="step", mininterval=1.0)

    def __call__(self, step: int, updates: list[dict[str, float]]) -> bool:
        """Evaluate, if ``step`` is one of the evaluation steps or the run ends here.

        Args:
            updates: metrics of the step's optimizer steps.

        Returns:
            whether the run is over: it was the last step, or it has diverged, or its time is up.
        """
        self.bar.update(step - self.bar.n)
        self._updates += len(updates)
        for update in updates:
            self._skipped = self._skipped + 1 if update["skipped_update"] else 0
            self._skipped_in_all += int(update["skipped_update"])
        if step in self.steps:
            self._evaluate(step, updates)
        ended = self._must_end(step)
        over = ended or step == self.config.n_steps
        if over and self.outcomes[-1]["step"] != step:
            self._evaluate(step, updates)
        if step in self.sampled_steps or over:
            self._keep_samples(step)
        if isinstance(self.config, SftConfig) and step in self.config.keep_steps:
            self.keep(f"step-{step}", {"step": step, "update": self._updates})
        return over

    def _must_end(self, step: int) -> bool:
        limit = self.config.wall_clock_limit_s
        in_between = step < self.config.n_steps  # a limit that is passed in the last step has cut nothing short
        if limit is not None and in_between and self.log.elapsed_s > limit:
            self.ended["time_limit_step"] = step
        if self.study.divergence is not None:
            reason = divergence(self.study.divergence, self.log.validations, self._entropies, self._skipped)
            if reason:
                self.ended |= {"diverged_step": step, "diverged_reason": reason}
                tqdm.write(f"step {step}: diverged, {reason}. The run ends here and is kept (`divergence:` in params.yaml).")
        return self.ended["diverged_step"] is not None or self.ended["time_limit_step"] is not None

    def _evaluate(self, step: int, updates: list[dict[str, float]]) -> None:
        if self.engine.policy_version != step:  # supervised fine-tuning has no other use for the engine
            self.engine.synchronize(self.learner.model, step)
        self._latest = rollouts = self._sample(self.problems)
        metrics = summarize(rollouts) | self._look_at(rollouts) | self.task.measures(rollouts)
        best = max((row[REWARD] for row in self.log.validations[1:]), default=-1.0)
        self.log.validation(step, self._updates, metrics)
        self.outcomes.append({"step": step, "answer_reward": [r.rewards["answer_reward"] for r in rollouts]})
        if step:
            self._entropies.append(updates[-1]["token_entropy"] if updates else math.nan)
            if metrics["answer_reward"] > best:
                self.keep("best", {"step": step, "update": self._updates, "answer_reward": metrics["answer_reward"]})
        self.bar.set_postfix_str(f"validation answer reward {metrics['answer_reward']:.3f}")

    def _sample(self, problems: Sequence[Problem]) -> list[Rollout]:
        evaluation, format = self.study.evaluation, find_format(self.task, self.config.prompt)
        sampling = evaluation_sampling(evaluation, format)
        if isinstance(self.config, SamplingConfig):  # a response that is too long in training is too long here
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.config.sampling_max_tokens))
        score = partial(self.task.score, self.config.prompt)
        groups = evaluate(self.engine, self.tokenizer, problems, format, score, sampling, evaluation.seed)
        return [rollout for (rollout,) in groups]

    def _look_at(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Lengths of correct and of incorrect responses, and the mean token entropy (nats) of the first GENERATIONS."""
        looked_at = rollouts[:GENERATIONS]
        self._generations, summary = log_generations(
            self.tokenizer.batch_decode([r.prompt_ids for r in looked_at]),
            [r.completion.text for r in looked_at],
            [r.problem.ground_truth for r in looked_at],
            [r.rewards for r in looked_at],
            self.learner.token_entropies(looked_at),
            [len(r.completion.token_ids) for r in looked_at],
        )
        return {"token_entropy": summary["token_entropy"], **lengths_by_outcome(rollouts)}

    def _keep_samples(self, step: int) -> None:
        shown = zip(self._latest[:SAMPLES], self._generations[:SAMPLES], strict=True)
        self.samples += [{"step": step, "problem": rollout.problem.id, **record} for rollout, record in shown]

    def final_metrics(self) -> dict[str, Any]:
        """First, last and best validation, the last with its 95% Wilson interval, and how the run ended.

        A run with a time limit is an entry of the leaderboard, whose rules ask for the whole validation set: ``full/…``.
        """
        validations, n = self.log.validations, len(self.problems)
        last = validations[-1]
        best = max(validations, key=lambda row: row[REWARD])
        low, high = wilson_interval(last[REWARD] * n, n)
        metrics = {
            **{key: None if math.isnan(value) else value for key, value in last.items() if key.startswith("val/")},
            "val/answer_reward_low": low,
            "val/answer_reward_high": high,
            "first/answer_reward": validations[0][REWARD],
            "best/answer_reward": best[REWARD],
            "best/step": best["step"],
            "steps": last["step"],
            "validation_problems": n,
            "skipped_updates": self._skipped_in_all,
            **self.ended,
        }
        if self.config.wall_clock_limit_s is None:
            return metrics
        full = summarize(self._sample(self.all_problems))["answer_reward"]
        return metrics | {"full/answer_reward": full, "full/problems": len(self.all_problems)}

    def state(self) -> dict[str, Any]:
        """What it has gathered so far; the evaluations themselves are in the log."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        for name in _STATE:
            setattr(self, name, state[name])

    def write(self, folder: Path) -> None:
        """Write rollouts.jsonl (the samples) and outcomes.jsonl (each evaluation's reward of each problem)."""
        for name, records in (("rollouts", self.samples), ("outcomes", self.outcomes)):
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            write_text(folder / f"{name}.jsonl", lines)
