"""Monitor of a run: evaluations, samples, checkpoints, the progress bar, and the early end between two steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.common.records import Rollout
from grpo.learner.mismatch import mismatch
from grpo.results.statistics import interval_of_mean
from grpo.study.schema import Study
from grpo.study.settings import EvaluationSteps
from grpo.tracking.run_log import RunLog
from grpo.training.step import Updates
from grpo.training.stopping import Stopping
from grpo.training.validation import Validated, Validation

SAMPLES = 8  # validation rollouts recorded at the first, the middle and the last evaluation
COMPARED = 64  # rollouts, evenly spaced: with several processes each engine's are among them
# Largest mean difference of log-probs at temperature 1 (nats a token) that rounding explains. Between vLLM and the learner 1e-6
# was measured in float32, .015 in bfloat16; a mixture of experts may round to another expert. Other weights give 1 or more.
ROUNDING = {"float32": 0.05, "float16": 0.3, "bfloat16": 0.3}


class Monitor:
    """The run's monitor, called before the first step and after each step.

    It evaluates the policy before the first step, every ``evaluation.every`` steps, and after the last, then on more problems.

    Args:
        name: the run's, for the progress bar.
        keep: saves a checkpoint, given its kind (``best`` or ``step-N``) and metadata.
    """

    def __init__(
        self,
        study: Study,
        name: str,
        validation: Validation,
        log: RunLog,
        keep: Callable[[str, dict[str, Any]], None],
    ):
        self.study, self.validation, self.log, self.keep = study, validation, log, keep
        self.config, self.world = validation.setup.config, validation.sampler.world
        self.steps = EvaluationSteps(self.config, study.evaluation.every)
        self.sampled_steps = {0, self.steps.middle}
        self.metric, self.column = study.metric, f"val/{study.metric}"  # by which runs are compared
        self.stopping = Stopping(self.metric)
        self.updates = 0
        self.outcomes: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        hidden = {"disable": True} if self.world.rank else {}
        self.bar = tqdm(total=self.config.n_steps, desc=name, unit="step", mininterval=1.0, **hidden)

    def __call__(self, step: int, updates: Updates) -> bool:
        """Evaluate the policy if ``step`` is an evaluation step or the run ends here.

        Args:
            updates: metrics of the step's optimizer steps.

        Returns:
            whether the run ends here: at its last step, at its time limit, or because it has diverged.

        Raises:
            UserError: the engine does not sample with the learner's weights (:func:`require_agreement`).
        """
        config = self.config
        self.bar.update(step - self.bar.n)
        self.updates += len(updates)
        self.stopping.count(updates)
        over, validated, seen = step == config.n_steps, None, list(self.log.validations)
        if step in self.steps:
            validated = self.validation(step, last=over)
            seen.append({f"val/{key}": value for key, value in validated.metrics.items()})
            if step:
                self.stopping.entropies.append(updates[-1]["token_entropy"] if updates else math.nan)
        early = self.stopping.must_end(step, config, self.study.divergence, seen, self.log.elapsed_s) and not over
        if early := self.world.of_rank_0(early):  # clocks may differ between processes
            validated = self.validation(step, last=True)
        if validated is not None:
            self._record(step, validated, keep_samples=step in self.sampled_steps or over or early)
        if step in config.keep_steps:
            self.keep(f"step-{step}", {"step": step, "update": self.updates})
        return over or early

    def _record(self, step: int, validated: Validated, keep_samples: bool) -> None:
        log = self.log
        if step == 0:
            require_agreement(self.study, self.validation.learner, validated.rollouts)
        reward = validated.metrics[self.metric]
        best = max((row[self.column] for row in log.validations[1:]), default=-math.inf)
        log.validation(step, self.updates, validated.metrics)
        if any(math.isnan(r.rewards[self.metric]) for r in validated.rollouts):
            raise UserError(
                "evaluation.metric: runs are compared problem by problem, and the reward function gives some validation "
                "responses no reward (None). Set it to answer_reward."
            )
        self.outcomes.append({"step": step, self.metric: [r.rewards[self.metric] for r in validated.rollouts]})
        if step and reward > best:
            self.keep("best", {"step": step, "update": self.updates, self.metric: reward})
        if keep_samples:
            shown = zip(validated.rollouts[:SAMPLES], validated.generations[:SAMPLES], strict=True)
            for rollout, record in shown:
                episode = rollout.completion.episode
                turns = {"messages": [list(message) for message in episode.messages]} if episode else {}
                self.samples.append({"step": step, "problem": rollout.problem.id, **record, **turns})
        self.bar.set_postfix_str(f"validation {self.metric.replace('_', ' ')} {reward:.3f}")

    def final_metrics(self) -> dict[str, Any]:
        """First, last and best evaluation, the last with its 95% interval over the problems, and how the run ended.

        A run with a time limit is a leaderboard entry, whose rules require the whole validation set (``full/...``).
        """
        validations, metric, outcomes = self.log.validations, self.metric, self.outcomes[-1][self.metric]
        last = validations[-1]
        best = max(validations[1:] or validations, key=lambda row: row[self.column])  # of trained weights, as the checkpoint
        low, high = interval_of_mean(outcomes)
        return {
            **{key: None if math.isnan(value) else value for key, value in last.items() if key.startswith("val/")},
            f"{self.column}_low": low,
            f"{self.column}_high": high,
            f"first/{metric}": validations[0][self.column],
            f"best/{metric}": best[self.column],
            "best/step": best["step"],
            "steps": last["step"],
            "validation_problems": len(outcomes),
            "skipped_updates": self.stopping.skipped_in_all,
            **{name: getattr(self.stopping, name) for name in ("diverged_step", "diverged_reason", "time_limit_step")},
            **(self.validation.on_all_problems() if self.config.wall_clock_limit_s is not None else {}),
        }

    def state(self) -> dict[str, Any]:
        """The counts, outcomes and samples so far; the log holds the evaluations."""
        gathered = {"updates": self.updates, "outcomes": self.outcomes, "samples": self.samples}
        return {**gathered, "stopping": self.stopping.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.updates, self.outcomes, self.samples = state["updates"], state["outcomes"], state["samples"]
        self.stopping.restore(state["stopping"])

    def write(self, folder: Path) -> None:
        """Write rollouts.jsonl (samples) and outcomes.jsonl (the reward of each problem at each evaluation)."""
        for name, records in (("rollouts", self.samples), ("outcomes", self.outcomes)):
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            write_text(folder / f"{name}.jsonl", lines)


def require_agreement(study: Study, learner: Any, rollouts: Sequence[Rollout]) -> None:
    """Compare the engine's log-probs of validation responses with the learner's.

    An engine that cannot take a model's weights, or computes its architecture otherwise, may go on without an error, and the
    run would train on another policy's responses.

    A temperature below 1 enlarges differences of logits. ``top_p`` raises the engine's log-probs by at most -log(top_p), as the
    tokens that it keeps have at least this probability.

    Args:
        learner: a :class:`grpo.learner.learner.Learner`, or a remote one.
        rollouts: sampled by ``study.evaluation`` with the learner's current weights.

    Raises:
        UserError: the mean difference is far beyond rounding, or not a number.
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
