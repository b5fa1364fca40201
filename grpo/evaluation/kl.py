"""The ``kl`` stage: KL of a run's kept checkpoints to the model that it started from, beside their validation reward.

Each checkpoint samples a response to each validation problem, as the evaluations of a run do, always with the same seed. Then
both models compute the log-probs of these tokens, at the same temperature: the reverse KL(checkpoint || start). The responses
of the start, sampled once, give the forward KL(start || checkpoint), which grows where a checkpoint no longer writes what the
start wrote. With ``evaluation.top_p`` below 1 the tokens come from a narrower distribution than the model's, and the estimates
are biased. With ``evaluation.old_task`` each checkpoint also answers problems of that task, which no run trains on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from grpo.common.errors import UserError
from grpo.common.files import read_json, write_json, write_jsonl
from grpo.common.metrics import name_of_kept
from grpo.common.process import start_threads
from grpo.common.records import Problem, Rollout, read_problems
from grpo.evaluation.evaluate import evaluate, evaluation_sampling
from grpo.evaluation.evaluator import stage_run
from grpo.learner.losses import estimate_kl
from grpo.learner.microbatches import padded_microbatches, split_by_length, texts_of
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.results.intervals import Scores, mean_of, mean_of_any, t_interval
from grpo.rollout.make_engine import make_engine
from grpo.rollout.sampling import Sampler
from grpo.study import paths
from grpo.study.schema import TOKENS_ON_CPU, Study
from grpo.tasks.rewards import score_by_task
from grpo.tasks.task import find_format

REWARDS = ("answer_reward", "old_task_reward")
# The estimates of one response, and their columns: its KL, and the tokens that this is over.
ESTIMATES = {
    "per_sequence": ("sampled", "tokens"),
    "per_sequence_low_variance": ("low_variance", "tokens"),
    "forward_per_sequence": ("forward", "forward_tokens"),
}


def measure_kl(study: Study, experiment: str) -> dict[str, Any]:
    """Measure the kept checkpoints of all runs of an experiment (:func:`summary`), and write data/kl and reports/kl.

    Raises UserError: no run keeps a checkpoint, or one is missing or damaged.
    """
    entry, evaluation, task = study.experiments[experiment], study.evaluation, study.experiments[experiment].task
    start_threads(study.threads)
    problems = read_problems(paths.validation(task))[: evaluation.problems]
    starts: dict[tuple[Path, str], StartingModel] = {}
    prompts: dict[str, str] = {}  # of each run
    records: list[dict[str, Any]] = []
    for name in (paths.run_name(experiment, arm, seed) for arm in entry.arms for seed in study.seeds_of(experiment)):
        kept = list(kept_checkpoints(name))
        if not kept:
            continue
        prompt, start = kept[0][1]["prompt"], Path(kept[0][1]["start"])
        if (start, prompt) not in starts:
            starts.clear()  # one at a time, as each has an engine
            starts[start, prompt] = StartingModel(study.for_task(task), task, start, problems, prompt)
        measure, prompts[name] = starts[start, prompt], prompt
        for step, responses in [(0, measure.start), *((about["step"], measure(folder)) for folder, about in kept)]:
            records += [{"run": name, "step": step, **response} for response in responses]
    if not records:
        raise UserError(f"experiments.{experiment}: its runs keep no checkpoints to measure. Give an arm `keep_steps`.")
    sampling = {"problems": len(problems), **evaluation.model_dump(include={"temperature", "top_p", "max_tokens"})}
    found = {"experiment": experiment, **sampling, "arms": summary(records)}
    write_jsonl(paths.KL / f"{experiment}.jsonl", records)
    write_json(paths.KL_REPORTS / f"{experiment}.json", found)
    for name, prompt in prompts.items():
        with stage_run(study, "kl", name, {"prompt": prompt}, task) as mlflow:
            for one in found["arms"][name.split("/")[1]]:
                values = one["by_run"].get(name, {})
                mlflow.log({name_of_kept(key): value for key, value in values.items()}, one["step"])
    return found


def kept_checkpoints(run: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders and metadata of a run's checkpoints step-N, first to last. A run that ended early has fewer."""
    for one in sorted(checkpoints_of(run).glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))):
        yield one, metadata_of(one, run)


def checkpoints_of(run: str) -> Path:
    """The folder with a run's checkpoints, or those of the run whose results it took over."""
    folder, made_by = paths.CHECKPOINTS / run, paths.stage_of_run(run)
    if (taken_over := folder / "metadata.json").exists():
        folder = paths.CHECKPOINTS / read_json(taken_over, made_by, keys=("same_as",))["same_as"]
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Run `dvc repro {made_by}` to make it.")
    return folder


def metadata_of(checkpoint: Path, run: str) -> dict[str, Any]:
    """The metadata of a run's checkpoint: its step, its prompt and the model that the run started from."""
    return read_json(checkpoint / "metadata.json", paths.stage_of_run(run), keys=("step", "prompt", "start"))


class StartingModel:
    """The model that runs started from, and an engine that samples from it and from their checkpoints, all on one device."""

    def __init__(self, study: Study, task: str, folder: Path, problems: Sequence[Problem], prompt: str):
        learner = study.learner.model_copy(update={"device": study.engine.device, "fully_shard": False})
        study = study.model_copy(update={"learner": learner})
        self.evaluation, self.max_tokens = study.evaluation, learner.max_tokens_per_microbatch or TOKENS_ON_CPU
        self.load = partial(load_model, dtype=learner.dtype, device=learner.device)
        self.model, tokenizer, source = self.load(folder), load_tokenizer(folder), study.task(task)
        engine = make_engine(study, folder, self.model, tokenizer)
        format = find_format(source, prompt)
        self.sampling, self.problems = evaluation_sampling(self.evaluation, format), problems
        self.sampler = Sampler(engine, tokenizer, format, partial(score_by_task, source, prompt))
        self.sampler.require_context_length(problems, self.sampling.max_tokens, "evaluation.max_tokens", f"tasks.{task}")
        self.old_sampler, self.old_problems = None, []
        if old := self.evaluation.old_task:
            self.old_problems = read_problems(paths.validation(old.task))[: self.evaluation.problems]
            score = partial(score_by_task, study.task(old.task), old.prompt)
            self.old_sampler = Sampler(engine, tokenizer, find_format(study.task(old.task), old.prompt), score)
            self.old_sampler.require_context_length(
                self.old_problems, self.sampling.max_tokens, "evaluation.max_tokens", f"tasks.{old.task}"
            )

    @cached_property
    def start(self) -> list[dict[str, Any]]:
        """The model itself, as :meth:`__call__` measures a checkpoint."""
        return self._measured(self.model, self._own[0]) + self._of_the_old_task(self.model)

    @cached_property
    def _own(self) -> tuple[list[Rollout], list[torch.Tensor]]:
        """The model's own response to each problem, and the log-probs of its tokens."""
        rollouts = [group[0] for group in self._sample(self.model)]
        return rollouts, self._log_probs(self.model, rollouts)

    def sample(self, checkpoint: Path | None, n: int) -> list[list[Rollout]]:
        """Sample ``n`` responses to each problem from a checkpoint; None: from the model itself."""
        return self._sample(self.model if checkpoint is None else self.load(checkpoint), n, progress=True)

    def _sample(self, policy: Any, n: int = 1, progress: bool = False) -> list[list[Rollout]]:
        self.sampler.engine.synchronize(policy, self.sampler.engine.policy_version + 1)
        return evaluate(self.sampler, self.problems, self.sampling, self.evaluation.seed, n, progress)

    def __call__(self, checkpoint: Path) -> list[dict[str, Any]]:
        """Sample and measure a checkpoint's response to each problem.

        Returns:
            for each its ``problem``, ``tokens``, ``answer_reward``, and two estimates of the KL summed over its tokens
            (nats; :func:`grpo.learner.losses.estimate_kl`): ``sampled`` and ``low_variance``; of the start's own response to
            the problem its ``forward_tokens`` and ``forward``, the log-prob by the start minus that by the checkpoint. Then for
            each problem of the old task its ``problem`` and ``old_task_reward``.
        """
        policy = self.load(checkpoint)
        return self._measured(policy, [group[0] for group in self._sample(policy)]) + self._of_the_old_task(policy)

    def _of_the_old_task(self, policy: Any) -> list[dict[str, Any]]:
        """The answer reward of a response to each problem of the old task, without one an empty list."""
        if self.old_sampler is None:
            return []
        self.old_sampler.engine.synchronize(policy, self.old_sampler.engine.policy_version + 1)
        sampling = evaluation_sampling(self.evaluation, self.old_sampler.format)
        groups = evaluate(self.old_sampler, self.old_problems, sampling, self.evaluation.seed)
        return [{"problem": one.problem.id, "old_task_reward": one.rewards["answer_reward"]} for (one,) in groups]

    def _measured(self, policy: Any, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        own, own_by_start = self._own
        by_policy, by_start = (self._log_probs(model, rollouts) for model in (policy, self.model))
        of_each, found = zip(rollouts, by_policy, by_start, own_by_start, self._log_probs(policy, own), strict=True), []
        for rollout, of_policy, of_start, own_of_start, own_of_policy in of_each:
            estimates = estimate_kl([of_policy], [of_start])
            estimates["forward_per_sequence"] = estimate_kl([own_of_start], [own_of_policy])["per_sequence"]
            about = {"problem": rollout.problem.id, "tokens": rollout.length, "answer_reward": rollout.rewards["answer_reward"]}
            about |= {column: estimates[name] for name, (column, _) in ESTIMATES.items()}
            found.append(about | {"forward_tokens": len(own_of_start)})
        return found

    @torch.no_grad()
    def _log_probs(self, model: Any, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """Log-probs (length,) of each rollout's sampled tokens."""
        model.eval()
        texts = texts_of(rollouts)
        found = [torch.empty(0)] * len(rollouts)
        parts = split_by_length(texts.prompts, texts.responses, self.max_tokens)
        padding, temperature = 0, self.evaluation.temperature  # padding is masked, so any token will do
        for micro in padded_microbatches(model, texts, parts, padding, temperature):
            lengths = [rollouts[i].length for i in micro.members]
            for i, log_probs in zip(micro.members, torch.split(micro.flat(micro.log_probs).cpu(), lengths), strict=True):
                found[i] = log_probs
        return found


def summary(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Summarise the responses of all runs by arm and step.

    Returns:
        for each arm a list of steps, each with ``step``; as ``value``, ``low`` and ``high`` the means over runs of
        ``answer_reward``, ``old_task_reward`` (if measured) and of the estimates that ``estimate_kl`` gives, with 95% intervals
        over runs and problems (where one run is all, over problems); and ``by_run``, these means of each run that reached the
        step.
    """
    arms: dict[str, list[dict[str, Any]]] = {}
    frame = pd.DataFrame(records)
    for _, cell in frame.groupby([frame["run"].str.split("/").str[1], "step"], sort=False):
        tables = _tables(cell)
        means = {name: _mean(name, table) for name, table in tables.items()}
        runs = enumerate(sorted(cell["run"].unique()))
        by_run = {run: {name: float(table[i].mean()) for name, table in tables.items()} for i, run in runs}
        arm, step = cell["run"].iloc[0].split("/")[1], int(cell["step"].iloc[0])
        arms.setdefault(arm, []).append({"step": step, **means, "by_run": by_run})
    return arms


def _tables(cell: pd.DataFrame) -> dict[str, Scores]:
    """Tables (runs, problems) of a step, whose means over problems are the numbers of each run."""

    def table(column: str) -> Scores:
        measured = cell.dropna(subset=[column])  # a problem of the old task has its reward only
        return measured.pivot(index="run", columns="problem", values=column).to_numpy(float)

    found = {name: table(name) for name in REWARDS if name in cell}
    for name, columns in ESTIMATES.items():
        sums, tokens = map(table, columns)
        rate = sums.sum(axis=1, keepdims=True) / tokens.sum(axis=1, keepdims=True)
        # A ratio of two sums: the residuals over the mean length have its variance (Cochran 1977, Sampling Techniques, 6.4).
        per_token = rate + (sums - rate * tokens) / tokens.mean(axis=1, keepdims=True)
        found |= {name.replace("sequence", "token"): per_token, name: sums}
    return found


def _mean(name: str, scores: Scores) -> dict[str, float]:
    value = float(scores.mean())
    if name in REWARDS:
        found = mean_of(scores, fixed=len(scores) == 1)
        low, high = found.low, found.high
    elif len(scores) > 1:
        found = mean_of_any(scores)
        low, high = found.low, found.high
    else:
        ends = t_interval(scores[0])
        low, high = ends["low"], ends["high"]
    # The second estimate is never negative.
    return {"value": value, "low": max(0.0, low) if name.endswith("low_variance") else low, "high": high}
