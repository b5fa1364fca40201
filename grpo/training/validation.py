"""Validation during a run: what is measured, the samples that are kept, the best checkpoint, and when the run is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.effective import EffectiveRun
from grpo.evaluation.evaluate import evaluate, evaluation_sampling, log_generations, summarize
from grpo.evaluation.statistics import wilson_interval
from grpo.files import write_text
from grpo.records import Problem, Rollout
from grpo.rollout.engine import Engine
from grpo.study import Study
from grpo.tracking import RunLog
from grpo.training.divergence import divergence
from grpo.training.learner import Learner

SAMPLES = 8  # validation rollouts kept at the first, the middle and the last evaluation
REWARD = "val/answer_reward"


class Validation:
    """Evaluates the policy on the fixed validation problems, before the first step, every few steps, and after the last.

    The sampling seed is the study's, not the run's: all arms are measured with the same problems and the same draws.

    Args:
        problems: the validation set; the first ``evaluation.problems`` are the ones that count.
        keep_best: called with the metadata of a new best evaluation of the trained policy, to save its weights.
        started: ``time.perf_counter()`` at the start of the run, for its time limit.
    """

    def __init__(
        self,
        study: Study,
        run: EffectiveRun,
        problems: Sequence[Problem],
        engine: Engine,
        learner: Learner,
        tokenizer: Any,
        log: RunLog,
        keep_best: Callable[[dict[str, Any]], None],
        started: float,
    ):
        n, every = run.config.n_grpo_steps, study.evaluation.every
        self.steps = sorted({*range(0, n + 1, every), n})
        self.sampled_steps = {self.steps[0], self.steps[len(self.steps) // 2]}
        self.study, self.config = study, run.config
        self.all_problems, self.problems = problems, problems[: study.evaluation.problems]
        self.engine, self.learner, self.tokenizer, self.log = engine, learner, tokenizer, log
        self.keep_best, self.started = keep_best, started
        self.samples: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.ended: dict[str, Any] = {"diverged_step": None, "diverged_reason": "", "time_limit_step": None}
        self._latest: list[Rollout] = []
        self._entropies: list[float] = []
        self._skipped = 0
        self.bar = tqdm(total=n, desc=run.name, unit="step", mininterval=1.0)

    def __call__(self, step: int, updates: list[dict[str, float]]) -> bool:
        """Evaluate, if ``step`` is one of the evaluation steps or the run ends here.

        Args:
            updates: metrics of the step's optimizer steps.

        Returns:
            whether the run is over: it was the last step, or it has diverged, or its time is up.
        """
        self.bar.update(step - self.bar.n)
        for update in updates:
            self._skipped = self._skipped + 1 if update["skipped_update"] else 0
        if step in self.steps:
            self._evaluate(step, updates)
        ended = self._must_end(step)
        over = ended or step == self.config.n_grpo_steps
        if over and self.outcomes[-1]["step"] != step:
            self._evaluate(step, updates)
        if step in self.sampled_steps or over:
            self._keep_samples(step)
        return over

    def _must_end(self, step: int) -> bool:
        limit = self.config.wall_clock_limit_s
        in_between = step < self.config.n_grpo_steps  # a limit that is passed in the last step has cut nothing short
        if limit is not None and in_between and time.perf_counter() - self.started > limit:
            self.ended["time_limit_step"] = step
        if self.study.divergence is not None:
            reason = divergence(self.study.divergence, self.log.validations, self._entropies, self._skipped)
            if reason:
                self.ended |= {"diverged_step": step, "diverged_reason": reason}
                tqdm.write(f"step {step}: diverged, {reason}. The run ends here and is kept (`divergence:` in params.yaml).")
        return self.ended["diverged_step"] is not None or self.ended["time_limit_step"] is not None

    def _evaluate(self, step: int, updates: list[dict[str, float]]) -> None:
        self._latest = rollouts = self._sample(self.problems)
        metrics = summarize(rollouts)
        update = step * self.config.updates_per_rollout_batch
        best = max((row[REWARD] for row in self.log.validations[1:]), default=-1.0)
        self.log.validation(step, update, metrics)
        self.outcomes.append({"step": step, "answer_reward": [r.rewards["answer_reward"] for r in rollouts]})
        if updates:
            self._entropies.append(updates[-1]["token_entropy"])
            if metrics["answer_reward"] > best:
                self.keep_best({"step": step, "update": update, "answer_reward": metrics["answer_reward"]})
        self.bar.set_postfix_str(f"validation answer reward {metrics['answer_reward']:.3f}")

    def _sample(self, problems: Sequence[Problem]) -> list[Rollout]:
        evaluation = self.study.evaluation
        sampling = evaluation_sampling(evaluation, self.config.prompt)
        groups = evaluate(self.engine, self.tokenizer, problems, self.config.prompt, sampling, evaluation.seed)
        return [rollout for (rollout,) in groups]

    def _keep_samples(self, step: int) -> None:
        shown = self._latest[:SAMPLES]
        records, _ = log_generations(
            self.tokenizer.batch_decode([r.prompt_ids for r in shown]),
            [r.completion.text for r in shown],
            [r.problem.ground_truth for r in shown],
            [r.rewards for r in shown],
            self.learner.token_entropies(shown),
            [len(r.completion.token_ids) for r in shown],
        )
        self.samples += [{"step": step, "problem": r.problem.id, **record} for r, record in zip(shown, records, strict=True)]

    def final_metrics(self) -> dict[str, Any]:
        """First, last and best validation, the last with its 95% Wilson interval, and how the run ended.

        A run with a time limit is an entry of the leaderboard, whose rules ask for the whole validation set: ``full/…``.
        """
        validations, n = self.log.validations, len(self.problems)
        last = validations[-1]
        best = max(validations, key=lambda row: row[REWARD])
        low, high = wilson_interval(last[REWARD] * n, n)
        metrics = {
            **{key: value for key, value in last.items() if key.startswith("val/")},
            "val/answer_reward_low": low,
            "val/answer_reward_high": high,
            "first/answer_reward": validations[0][REWARD],
            "best/answer_reward": best[REWARD],
            "best/step": best["step"],
            "steps": last["step"],
            "validation_problems": n,
            **self.ended,
        }
        if self.config.wall_clock_limit_s is None:
            return metrics
        full = summarize(self._sample(self.all_problems))["answer_reward"]
        return metrics | {"full/answer_reward": full, "full/problems": len(self.all_problems)}

    def write(self, folder: Path) -> None:
        """Write rollouts.jsonl (the samples) and outcomes.jsonl (each evaluation's reward of each problem)."""
        for name, records in (("rollouts", self.samples), ("outcomes", self.outcomes)):
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            write_text(folder / f"{name}.jsonl", lines)
