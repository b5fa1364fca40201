"""Monitor of a run: it evaluates the policy, records what it finds, and decides whether the run ends between two steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from grpo.common.errors import UserError
from grpo.common.files import write_jsonl
from grpo.common.records import Problem, Rollout
from grpo.evaluation.evaluate import evaluate, evaluation_sampling, lengths_by_outcome, log_generations, summarize
from grpo.learner.losses import mismatch
from grpo.results.intervals import interval_of_mean
from grpo.rollout.engine import SamplingParams
from grpo.rollout.sampling import Sampler, episode_measures, transcript
from grpo.study.config import Divergence, EvaluationSteps, RewardName, SamplingConfig
from grpo.study.schema import Study
from grpo.tracking.run_log import RunLog
from grpo.training.step import RunSetup, Updates

GENERATIONS = 64  # rollouts of an evaluation whose token entropy is measured
SAMPLES = 8  # validation rollouts recorded at the first, the middle and the last evaluation
COMPARED = 64  # rollouts, evenly spaced: with several processes each engine's are among them
# Largest mean difference of log-probs at temperature 1 (nats a token) that rounding explains. Between vLLM and the learner 1e-6
# was measured in float32, .015 in bfloat16; a mixture of experts may round to another expert. Other weights give 1 or more.
ROUNDING = {"float32": 0.05, "float16": 0.3, "bfloat16": 0.3}
STILL_LEARNT = 0.5  # with this share of its best reward, a run of short or low-entropy responses has not collapsed
RISEN = 0.1  # a best reward so far above the start is no chance of 100 problems


class Evaluated(NamedTuple):
    """Rollouts, one for each problem; records of the first GENERATIONS of them (:func:`log_generations`); and metrics."""

    rollouts: list[Rollout]
    generations: list[dict[str, Any]]
    metrics: dict[str, float]


class Monitor:
    """The run's monitor, called before the first step and after each step.

    It evaluates the policy before the first step, every ``evaluation.every`` steps, and after the last, then on more problems.
    The sampling seed is the same in all runs of a study, so all arms get the same problems and the same random numbers.

    Args:
        name: the run's, for the progress bar.
        problems: the whole validation set; an evaluation uses its first ``evaluation.problems``, the last one its first
            ``evaluation.last_problems``.
        sampler, learner: hold the policy, in the sampler's engine and the learner's model.
        keep: saves a checkpoint, given its kind (``best`` or ``step-N``) and metadata.

    Attributes:
        updates: optimizer steps so far.
        outcomes, samples: lines of outcomes.jsonl and rollouts.jsonl.
        entropies: see :func:`divergence`.
        skipped, skipped_in_all: optimizer steps without a finite gradient: the latest in a row, and all.
        diverged_step, diverged_reason, time_limit_step: when and why the run ended early.
    """

    STATE = (
        *("updates", "outcomes", "samples", "entropies", "skipped", "skipped_in_all"),
        *("diverged_step", "diverged_reason", "time_limit_step"),
    )

    def __init__(
        self,
        study: Study,
        name: str,
        setup: RunSetup[Any],
        problems: Sequence[Problem],
        sampler: Sampler,
        learner: Any,
        log: RunLog,
        keep: Callable[[str, dict[str, Any]], None],
    ):
        self.study, self.setup, self.problems, self.sampler, self.learner = study, setup, problems, sampler, learner
        self.log, self.keep, self.config, self.world = log, keep, setup.config, sampler.world
        self.steps = EvaluationSteps(self.config, study.evaluation.every)
        self.metric, self.column = study.metric, f"val/{study.metric}"  # by which runs are compared
        self.updates = self.skipped = self.skipped_in_all = 0
        self.outcomes: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.entropies: list[float] = []
        self.diverged_step: int | None = None
        self.diverged_reason = ""
        self.time_limit_step: int | None = None
        hidden = {"disable": True} if self.world.rank else {}
        self.bar = tqdm(total=self.config.n_steps, desc=name, unit="step", mininterval=1.0, **hidden)

    def __call__(self, step: int, updates: Updates) -> bool:
        """Evaluate the policy if ``step`` is an evaluation step or the run ends here.

        ``updates``: metrics of the step's optimizer steps. Returns whether the run ends here: at its last step, at its time
        limit, or because it has diverged. Raises UserError if the engine does not sample with the learner's weights.
        """
        self.bar.update(step - self.bar.n)
        self.count(updates)
        last, evaluated, seen = step == self.config.n_steps, None, list(self.log.validations)
        if step in self.steps:
            evaluated = self.evaluate(step, last)
            seen.append({f"val/{key}": value for key, value in evaluated.metrics.items()})
            if step:
                self.entropies.append(updates[-1]["token_entropy"] if updates else math.nan)
        early = self.ends_early(step, seen) and not last
        if early := self.world.of_rank_0(early):  # clocks may differ between processes
            evaluated = self.evaluate(step, last=True)
        if evaluated is not None:
            self._record(step, evaluated, keep_samples=step in (0, self.steps.middle) or last or early)
        if step in self.config.keep_steps:
            self.keep(f"step-{step}", {"step": step, "update": self.updates})
        return last or early

    # ------------------------------------------------------------------------------------------------------- evaluate

    @property
    def last_problems(self) -> Sequence[Problem]:
        return self.problems[: self.study.evaluation.last_problems]

    def evaluate(self, step: int, last: bool = False) -> Evaluated:
        """Evaluate the policy after ``step`` steps; set ``last`` if the run ends at this step."""
        engine, learner = self.sampler.engine, self.learner
        if engine.policy_version != step:  # in supervised fine-tuning only evaluation uses the engine
            engine.synchronize(learner.model, step)
        rollouts = self._sample(self.last_problems if last else self.problems[: self.study.evaluation.problems])
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
        return Evaluated(rollouts, generations, metrics)

    def sampling(self) -> SamplingParams:
        """Sampling parameters of an evaluation; its responses are never longer than in training."""
        sampling = evaluation_sampling(self.study.evaluation, self.setup.format)
        if isinstance(self.config, SamplingConfig):
            return replace(sampling, max_tokens=min(sampling.max_tokens, self.config.sampling_max_tokens))
        return sampling

    def _sample(self, problems: Sequence[Problem]) -> list[Rollout]:
        groups = evaluate(self.sampler, problems, self.sampling(), self.study.evaluation.seed)
        return [rollout for (rollout,) in groups]

    # --------------------------------------------------------------------------------------------------------- record

    def _record(self, step: int, evaluated: Evaluated, keep_samples: bool) -> None:
        log, rollouts = self.log, evaluated.rollouts
        if step == 0:
            require_agreement(self.study, self.learner, rollouts)
        reward, rewards = evaluated.metrics[self.metric], [r.rewards[self.metric] for r in rollouts]
        best = max((row[self.column] for row in log.validations[1:]), default=-math.inf)
        log.validation(step, self.updates, evaluated.metrics)
        if any(map(math.isnan, rewards)):
            raise UserError(
                "evaluation.metric: runs are compared problem by problem, and the reward function gives some validation "
                "responses no reward (None). Set it to answer_reward."
            )
        self.outcomes.append({"step": step, self.metric: rewards})
        if step and reward > best:
            self.keep("best", {"step": step, "update": self.updates, self.metric: reward})
        if keep_samples:
            for rollout, record in zip(rollouts[:SAMPLES], evaluated.generations[:SAMPLES], strict=True):
                episode = rollout.completion.episode
                turns = {"messages": [list(message) for message in episode.messages]} if episode else {}
                self.samples.append({"step": step, "problem": rollout.problem.id, **record, **turns})
        shown = dict.fromkeys((self.metric, "answer_reward"))  # an own reward may rise while fewer answers are right
        texts = [f"{metric.replace('_', ' ')} {evaluated.metrics[metric]:.3f}" for metric in shown]
        self.bar.set_postfix_str(f"validation {', '.join(texts)}")

    def final_metrics(self) -> dict[str, Any]:
        """First, last and best evaluation, the last with its 95% interval over the problems, and how the run ended.

        A run with a time limit is a leaderboard entry, whose rules require the whole validation set (``full/...``).
        """
        validations, metric, outcomes = self.log.validations, self.metric, self.outcomes[-1][self.metric]
        last = validations[-1]
        best = max(validations[1:] or validations, key=lambda row: row[self.column])  # of trained weights, as the checkpoint
        low, high = interval_of_mean(outcomes)
        metrics = {
            **{key: None if math.isnan(value) else value for key, value in last.items() if key.startswith("val/")},
            f"{self.column}_low": low,
            f"{self.column}_high": high,
            f"first/{metric}": validations[0][self.column],
            f"best/{metric}": best[self.column],
            "best/step": best["step"],
            "steps": last["step"],
            "validation_problems": len(outcomes),
            "skipped_updates": self.skipped_in_all,
            **{name: getattr(self, name) for name in ("diverged_step", "diverged_reason", "time_limit_step")},
        }
        if self.config.wall_clock_limit_s is not None:
            answer_reward = summarize(self._sample(self.problems))["answer_reward"]
            metrics |= {"full/answer_reward": answer_reward, "full/problems": len(self.problems)}
        return metrics

    def warn_without_signal(self) -> None:
        """Warn if no group of the whole run had unequal rewards, so that no gradient came from a reward."""
        shares = [row["train/zero_signal_fraction"] for row in self.log.history if "train/zero_signal_fraction" in row]
        if shares and min(shares) == 1:
            tqdm.write(
                "warning: the responses to each question had equal rewards in all steps, so nothing was learnt from them. Read "
                "rollouts.jsonl, what the responses look like, and `grpo evaluate`'s examples, what the task reads in them."
            )

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def write(self, folder: Path) -> None:
        """Write rollouts.jsonl (samples) and outcomes.jsonl (the reward of each problem at each evaluation)."""
        write_jsonl(folder / "rollouts.jsonl", self.samples)
        write_jsonl(folder / "outcomes.jsonl", self.outcomes)

    # --------------------------------------------------------------------------------------------------------- decide

    def count(self, updates: Updates) -> None:
        """Count the optimizer steps of one step, and those that were skipped."""
        self.updates += len(updates)
        for update in updates:
            # In float16 an overflow halves the loss scale. Only at a scale of 1 or less is it a fault of the run.
            scaled = update.get("loss_scale", 1.0) > 1.0 and math.isfinite(update["loss"])
            self.skipped = self.skipped + 1 if update["skipped_update"] and not scaled else 0
            self.skipped_in_all += int(update["skipped_update"])

    def ends_early(self, step: int, seen: Sequence[dict[str, float]]) -> bool:
        """Whether the run has diverged or has reached its time limit after this step; ``seen`` are all evaluations so far."""
        limit, rules = self.config.wall_clock_limit_s, self.study.divergence
        in_between = 0 < step < self.config.n_steps  # a limit exceeded in the last step has cut nothing short
        if limit is not None and in_between and self.log.elapsed_s > limit:
            self.time_limit_step = step
        if rules is not None and (reason := divergence(rules, seen, self.entropies, self.skipped, self.metric)):
            self.diverged_step, self.diverged_reason = step, reason
            tqdm.write(f"step {step}: diverged, {reason}. The run ends here and is kept (`divergence:` in params.yaml).")
        return self.diverged_step is not None or self.time_limit_step is not None


def divergence(
    rules: Divergence,
    validations: Sequence[dict[str, float]],
    entropies: Sequence[float],
    skipped_in_a_row: int,
    metric: RewardName = "answer_reward",
) -> str | None:
    """Say why a run counts as diverged; None if it does not.

    Args:
        validations: all evaluations so far, the starting policy's first; each with ``val/METRIC`` and ``val/response_length``.
        metric: the reward by which runs are compared. Rules on shares of a reward need a positive one.
        entropies: mean token entropy (nats) of the last update before each evaluation except the first.
        skipped_in_a_row: the latest consecutive optimizer steps without a finite gradient.
    """
    if skipped_in_a_row >= rules.skipped_updates:
        return f"the gradient was not finite in {skipped_in_a_row} optimizer steps in a row"
    start, recent = validations[0], list(validations[1:])[-rules.patience :]
    if len(recent) < rules.patience:
        return None
    column, name = f"val/{metric}", metric.replace("_", " ")
    began, rewards = start[column], [row[column] for row in recent]
    lengths = [row["val/response_length"] for row in recent]
    times = f"in {rules.patience} evaluations in a row"
    if max(rewards) < rules.reward_below_start * began and began > 0:
        return f"{name} {rewards[-1]:.3f}, under its start of {began:.3f} {times}"
    best = max(row[column] for row in validations)
    if rules.stop_when_collapsed and best - began > RISEN and best > 0 and max(rewards) < rules.collapsed_below * best:
        return f"{name} {rewards[-1]:.3f}, under {rules.collapsed_below:g} of its best of {best:.3f} {times}"
    if best > 0 and max(rewards) >= STILL_LEARNT * best:
        return None
    # An expert iteration step without an update has entropy NaN, which compares as False.
    if all(entropy < rules.entropy_below for entropy in entropies[-rules.patience :]):
        return f"token entropy collapsed to {entropies[-1]:.2g} nats {times}, {name} {rewards[-1]:.3f}"
    if max(lengths) < rules.length_below * start["val/response_length"]:
        return f"response length collapsed to {lengths[-1]:.1f} tokens {times}, {name} {rewards[-1]:.3f}"
    return None


def require_agreement(study: Study, learner: Any, rollouts: Sequence[Rollout]) -> None:
    """Refuse a run whose engine and learner disagree about the log-probs of its first validation responses, with a UserError.

    An engine that cannot take a model's weights, or computes its architecture otherwise, may go on without an error, and the
    run would train on another policy's responses. The mean difference must not be far beyond rounding.

    A temperature below 1 enlarges differences of logits. ``top_p`` raises the engine's log-probs by at most -log(top_p), as the
    tokens that it keeps have at least this probability.
    """
    sampling, temperature = study.evaluation, study.evaluation.temperature or 1.0
    compared = rollouts[:: max(1, len(rollouts) // COMPARED)][:COMPARED]
    engine = torch.tensor([one for rollout in compared for one in rollout.completion.log_probs])
    if not engine.numel():
        return  # all of them are empty
    found = mismatch(torch.cat(learner.log_probs(compared, temperature)), engine)["mismatch_mean"].mean().item()
    precisions = [study.learner.dtype] + [study.engine.dtype] * (study.engine.name == "vllm")
    limit = max(ROUNDING[each] for each in precisions) / min(1.0, temperature) - math.log(sampling.top_p)
    if not found <= limit:
        other = "engine.name to transformers" if study.engine.name == "vllm" else "learner.packing to false"
        raise UserError(
            f"before training, engine and learner differ by {found:.3g} nats a token (mean difference of the log-probabilities "
            f"of the first responses; rounding explains at most {limit:.3g}): the engine samples from other weights than the "
            f"learner trains, or one of them does not compute this model as it should. Set {other} in params.yaml."
        )
