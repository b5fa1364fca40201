"""The ``kl`` stage: KL of a run's kept checkpoints to the model that it started from, beside their validation reward.

Each checkpoint samples a response to each validation problem, as the evaluations of a run do, always with the same seed. Then
both models compute the log-probs of these tokens, at the same temperature. With ``evaluation.top_p`` below 1 the tokens come
from a narrower distribution than the policy's, and the estimates are biased.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from grpo.common.cpu import start_threads
from grpo.common.errors import UserError
from grpo.common.files import read_json, write_json, write_text
from grpo.common.records import Problem, Rollout, read_problems
from grpo.evaluation.evaluate import Sampler, evaluate, evaluation_sampling, score_by_task
from grpo.evaluation.evaluator import stage_run
from grpo.learner.kl import estimate_kl
from grpo.learner.learner import token_ids
from grpo.learner.microbatches import Texts, of_like_length, padded_microbatches
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.results.intervals import change_of, mean_of
from grpo.results.statistics import LEVEL
from grpo.rollout.make_engine import Checkpoint, make_engine
from grpo.study import paths
from grpo.study.runs_table import stage_of_run
from grpo.study.schema import TOKENS_ON_CPU, Study
from grpo.tasks.task import find_format

Scores = NDArray[np.float64]
ESTIMATES = {"per_sequence": "sampled", "per_sequence_low_variance": "low_variance"}  # of one response, and their columns


def measure_kl(study: Study, experiment: str) -> dict[str, Any]:
    """Measure the kept checkpoints of all runs of an experiment (:func:`summary`), and write data/kl and reports/kl.

    Raises:
        UserError: no run keeps a checkpoint, or one is missing or damaged.
    """
    task, evaluation = study.experiments[experiment].task, study.evaluation
    start_threads(study.threads)
    problems = read_problems(paths.validation(task))[: evaluation.problems]
    starts: dict[tuple[Path, str], Start] = {}
    records: list[dict[str, Any]] = []
    for name in (paths.run_name(experiment, arm, seed) for arm in study.experiments[experiment].arms for seed in study.seeds_of(experiment)):
        kept = list(kept_checkpoints(name))
        if not kept:
            continue
        prompt, start = kept[0][1]["prompt"], Path(kept[0][1]["start"])
        if (start, prompt) not in starts:
            starts = {(start, prompt): Start(study.for_task(task), task, start, problems, prompt)}  # one at a time
        measure = starts[start, prompt]
        with stage_run(study, "kl", name, {"prompt": prompt}, task) as mlflow:
            for step, responses in [(0, measure.own), *((about["step"], measure(folder)) for folder, about in kept)]:
                records += [{"run": name, "step": step, **response} for response in responses]
                means = of_run(responses)
                reward = means.pop("answer_reward")
                mlflow.log({f"kl/{key}": value for key, value in means.items()} | {"val/answer_reward": reward}, step=step)
    if not records:
        raise UserError(f"experiments.{experiment}: its runs keep no checkpoints to measure. Give an arm `keep_steps`.")
    write_text(paths.KL / f"{experiment}.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    found = {
        "experiment": experiment,
        "problems": len(problems),
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "max_tokens": evaluation.max_tokens,
        "arms": summary(records),
    }
    write_json(paths.KL_REPORTS / f"{experiment}.json", found)
    return found


def kept_checkpoints(run: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders and metadata of a run's checkpoints step-N, first to last.

    Those of a run that was taken over are the original's. A run that ended early has fewer.
    """
    folder, made_by = paths.CHECKPOINTS / run, stage_of_run(run)
    if (taken_over := folder / "metadata.json").exists():
        folder = paths.CHECKPOINTS / read_json(taken_over, made_by, keys=("same_as",))["same_as"]
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Run `dvc repro {made_by}` to make it.")
    for one in sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))):
        yield one, read_json(one / "metadata.json", made_by, keys=("step", "prompt", "start"))


class Start:
    """The model that runs started from, and an engine that samples from it and from their checkpoints, all on one device.

    Attributes:
        own: the model's own responses, as :meth:`__call__` returns them.
    """

    def __init__(self, study: Study, task: str, folder: Path, problems: Sequence[Problem], prompt: str):
        learner = study.learner.model_copy(update={"device": study.engine.device, "fully_shard": False})
        study = study.model_copy(update={"learner": learner})
        self.evaluation, self.max_tokens = study.evaluation, learner.max_tokens_per_microbatch or TOKENS_ON_CPU
        self.load = partial(load_model, dtype=learner.dtype, device=learner.device)
        self.model, tokenizer, source = self.load(folder), load_tokenizer(folder), study.task(task)
        engine = make_engine(study, Checkpoint(folder, self.model, tokenizer))
        format = find_format(source, prompt)
        self.sampling, self.problems = evaluation_sampling(self.evaluation, format), problems
        self.sampler = Sampler(engine, tokenizer, format, partial(score_by_task, source, prompt))
        self.sampler.require_room(problems, self.sampling.max_tokens, "evaluation.max_tokens", f"tasks.{task}")
        self.own = self._measured(self.model)

    def __call__(self, checkpoint: Path) -> list[dict[str, Any]]:
        """Sample and measure a checkpoint's response to each problem.

        Returns:
            for each its ``problem``, ``tokens``, ``answer_reward``, and two estimates of the KL summed over its tokens
            (nats; :func:`grpo.learner.kl.estimate_kl`): ``sampled`` and ``low_variance``.
        """
        policy = self.load(checkpoint)
        self.sampler.engine.synchronize(policy, self.sampler.engine.policy_version + 1)
        return self._measured(policy)

    def _measured(self, policy: Any) -> list[dict[str, Any]]:
        rollouts = [group[0] for group in evaluate(self.sampler, self.problems, self.sampling, self.evaluation.seed)]
        found = []
        for rollout, *log_probs in zip(
            rollouts, self._log_probs(policy, rollouts), self._log_probs(self.model, rollouts), strict=True
        ):
            estimates = estimate_kl(log_probs[:1], log_probs[1:])
            about = {"problem": rollout.problem.id, "tokens": rollout.length, "answer_reward": rollout.rewards["answer_reward"]}
            found.append(about | {column: estimates[name] for name, column in ESTIMATES.items()})
        return found

    @torch.no_grad()
    def _log_probs(self, model: Any, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """Log-probs (response length,) of each rollout's tokens."""
        model.eval()
        prompts, responses = token_ids(rollouts)
        found = [torch.empty(0)] * len(rollouts)
        parts = of_like_length(prompts, responses, self.max_tokens)
        padding, temperature = 0, self.evaluation.temperature  # padding is masked, so any token will do
        for micro in padded_microbatches(model, Texts(prompts, responses), parts, padding, temperature):
            lengths = [len(responses[i]) for i in micro.members]
            for i, log_probs in zip(micro.members, torch.split(micro.flat(micro.log_probs).cpu(), lengths), strict=True):
                found[i] = log_probs
        return found


def of_run(responses: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of a run at a step: ``answer_reward`` and the estimates of KL, named as those of ``estimate_kl``."""
    sums = {key: sum(response[key] for response in responses) for key in ("tokens", "answer_reward", *ESTIMATES.values())}
    found = {"answer_reward": sums["answer_reward"] / len(responses)}
    for name, column in ESTIMATES.items():
        found |= {name.replace("sequence", "token"): sums[column] / sums["tokens"], name: sums[column] / len(responses)}
    return found


def summary(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Summarise the responses of all runs by arm and step.

    Returns:
        for each arm a list of steps with ``step``, ``by_run`` (:func:`of_run` of each run that reached it) and, for each of
        these numbers, ``value``, ``low`` and ``high``: the mean over runs with its 95% interval, over runs and problems; of a
        single run over problems.
    """
    cells: dict[str, dict[int, dict[str, list[dict[str, Any]]]]] = {}
    for record in records:
        steps = cells.setdefault(record["run"].split("/")[1], {})
        steps.setdefault(record["step"], {}).setdefault(record["run"], []).append(record)
    return {arm: [{"step": step} | _of_runs(runs) for step, runs in steps.items()] for arm, steps in cells.items()}


def _of_runs(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def table(column: str) -> Scores:
        return np.array([[float(response[column]) for response in responses] for responses in runs.values()])

    tokens = table("tokens")
    reward = mean_of(table("answer_reward"), fixed=len(runs) == 1)
    found: dict[str, Any] = {"answer_reward": {"value": reward.value, "low": reward.low, "high": reward.high}}
    for name, column in ESTIMATES.items():
        kl = table(column)
        rate = kl.sum(axis=1, keepdims=True) / tokens.sum(axis=1, keepdims=True)
        # A ratio of two sums: the residuals over the mean length have its variance (Cochran 1977, Sampling Techniques, 6.4).
        per_token = rate + (kl - rate * tokens) / tokens.mean(axis=1, keepdims=True)
        found |= {name.replace("sequence", "token"): _interval(per_token), name: _interval(kl)}
    return found | {"by_run": {run: of_run(responses) for run, responses in runs.items()}}


def _interval(scores: Scores) -> dict[str, float]:
    """Mean of a table (runs, problems) with its interval."""
    if len(scores) > 1:
        over_both = change_of(np.zeros_like(scores), scores)
        return {"value": over_both.value, "low": over_both.low, "high": over_both.high}
    value, problems = float(scores.mean()), scores.shape[1]
    half = float(stats.t.ppf((1 + LEVEL) / 2, problems - 1) * stats.sem(scores[0])) if problems > 1 else float("nan")
    return {"value": value, "low": value - half, "high": value + half}
