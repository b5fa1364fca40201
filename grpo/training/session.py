"""Training one run: puts model, engine, learner and validation together, and writes what comes out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo import paths
from grpo.cpu import start_threads
from grpo.effective import EffectiveRun
from grpo.evaluation.evaluate import evaluate, evaluation_sampling, log_generations, summarize
from grpo.evaluation.statistics import wilson_interval
from grpo.files import write_json, write_text
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.records import Problem
from grpo.rewards import REWARD_FNS
from grpo.rollout.engine import Engine
from grpo.rollout.make import make_engine
from grpo.study import Study
from grpo.tracking import MlflowRun, RunLog, now
from grpo.training.grpo import train_grpo
from grpo.training.learner import Learner

SAMPLES = 8  # validation rollouts kept at the first, the middle and the last evaluation


def train(
    study: Study,
    run: EffectiveRun,
    problems: tuple[list[Problem], list[Problem]],
    folder: Path,
    checkpoint: Path,
    mlflow: MlflowRun,
) -> dict[str, Any]:
    """Train one run, and write its results and its checkpoint.

    Args:
        problems: training and validation problems.
        folder: receives history.csv, validation.csv, metrics.json and rollouts.jsonl.
        checkpoint: receives the trained model in Hugging Face format.

    Returns:
        the wall-clock figures.
    """
    started, start = now(), time.perf_counter()
    start_threads(study.threads)
    tokenizer = load_tokenizer(paths.MODEL)
    model = load_model(paths.MODEL, study.learner.dtype, study.learner.device)
    if study.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    training_problems, validation_problems = problems
    engine = make_engine(study, model, tokenizer)
    learner = Learner(model, run.config, tokenizer.pad_token_id)
    log = RunLog(folder, mlflow)
    validate = Validation(study, run, validation_problems[: study.evaluation.problems], engine, learner, tokenizer, log)
    train_grpo(
        run.config, run.seed, training_problems, tokenizer, engine, learner, REWARD_FNS[run.config.prompt], validate, log
    )
    validate.bar.close()
    log.close()
    write_json(folder / "metrics.json", final_metrics(log.validations, len(validate.problems)))
    write_text(folder / "rollouts.jsonl", "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in validate.samples))
    save_checkpoint(checkpoint, model, tokenizer)
    return {
        "started": started,
        "finished": now(),
        "total_s": time.perf_counter() - start,
        "phases": log.phase_totals,
        "threads": study.threads,
        "device": study.learner.device,
        "steps": log.times,
    }


class Validation:
    """Evaluates the policy on the fixed validation problems, before the first step, every few steps, and after the last.

    The sampling seed is the study's, not the run's: all arms are measured with the same problems and the same draws.
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
    ):
        n, every = run.config.n_grpo_steps, study.evaluation.every
        self.steps = sorted({*range(0, n + 1, every), n})
        self.sampled_steps = {self.steps[0], self.steps[len(self.steps) // 2], self.steps[-1]}
        self.study, self.prompt = study, run.config.prompt
        self.updates_per_step = run.config.updates_per_rollout_batch
        self.problems, self.engine, self.learner, self.tokenizer, self.log = problems, engine, learner, tokenizer, log
        self.samples: list[dict[str, Any]] = []
        self.bar = tqdm(total=n, desc=run.name, unit="step", mininterval=1.0)

    def __call__(self, step: int) -> None:
        """Evaluate, if ``step`` is one of the evaluation steps."""
        self.bar.update(step - self.bar.n)
        if step not in self.steps:
            return
        evaluation = self.study.evaluation
        sampling = evaluation_sampling(evaluation, self.prompt)
        groups = evaluate(self.engine, self.tokenizer, self.problems, self.prompt, sampling, evaluation.seed)
        rollouts = [rollout for (rollout,) in groups]
        metrics = summarize(rollouts)
        self.log.validation(step, step * self.updates_per_step, metrics)
        self.bar.set_postfix_str(f"validation answer reward {metrics['answer_reward']:.3f}")
        if step in self.sampled_steps:
            shown = rollouts[:SAMPLES]
            records, _ = log_generations(
                self.tokenizer.batch_decode([r.prompt_ids for r in shown]),
                [r.completion.text for r in shown],
                [r.problem.ground_truth for r in shown],
                [r.rewards for r in shown],
                self.learner.token_entropies(shown),
                [len(r.completion.token_ids) for r in shown],
            )
            self.samples += [
                {"step": step, "problem": r.problem.id, **record} for r, record in zip(shown, records, strict=True)
            ]


def final_metrics(validations: list[dict[str, float]], n_problems: int) -> dict[str, float]:
    """First, last and best validation of a run; the last with its 95% Wilson interval."""
    last = validations[-1]
    best = max(validations, key=lambda row: row["val/answer_reward"])
    low, high = wilson_interval(last["val/answer_reward"] * n_problems, n_problems)
    return {
        **{key: value for key, value in last.items() if key.startswith("val/")},
        "val/answer_reward_low": low,
        "val/answer_reward_high": high,
        "first/answer_reward": validations[0]["val/answer_reward"],
        "best/answer_reward": best["val/answer_reward"],
        "best/step": best["step"],
        "steps": last["step"],
        "validation_problems": n_problems,
    }
