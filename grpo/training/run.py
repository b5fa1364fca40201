"""One run of an experiment: puts the pieces together, trains, and writes the results."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from grpo import paths
from grpo.effective import EffectiveRun, digest
from grpo.evaluation.evaluate import evaluate, evaluation_sampling, log_generations, summarize
from grpo.evaluation.statistics import wilson_interval
from grpo.files import files_digest, whole_folder, write_json, write_text
from grpo.models.checkpoint import load_model, load_tokenizer, require_checkpoint, save_checkpoint
from grpo.records import Problem, read_problems
from grpo.rewards import REWARD_FNS
from grpo.rollout.engine import Engine, derive_seed
from grpo.rollout.make import make_engine
from grpo.study import Study, read_yaml
from grpo.tracking import MlflowRun, RunLog, now, source_tags
from grpo.training.grpo import train_grpo
from grpo.training.learner import Learner

SAMPLES = 8  # validation rollouts kept at the first, the middle and the last evaluation


def run_identity(study: Study, run: EffectiveRun) -> dict[str, Any]:
    """Everything that a run's results depend on; two runs with equal identities have equal results."""
    return {
        "config": run.config.model_dump(),
        "seed": run.seed,
        "evaluation": study.evaluation.model_dump(exclude={"zero_shot_problems", "zero_shot_prompts"}),
        "engine": study.engine.model_dump(),
        "learner": study.learner.model_dump(),
        "threads": study.threads,
        "model": files_digest(paths.MODEL),
        "train": files_digest(paths.TRAIN),
        "validation": files_digest(paths.VALIDATION),
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
        rollouts = evaluate(
            self.engine,
            self.tokenizer,
            self.problems,
            self.prompt,
            sampling,
            REWARD_FNS[self.prompt],
            derive_seed(evaluation.seed),
        )
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


def train_run(study: Study, run: EffectiveRun, winners: list[dict[str, Any]]) -> None:
    """Train one run, or take over the equal one that an earlier experiment already trained, and write its results.

    Args:
        winners: selection files of the experiments before this one, whose runs may be equal to this one.
    """
    require_checkpoint(paths.MODEL)
    problems = read_problems(paths.TRAIN), read_problems(paths.VALIDATION)
    identity = run_identity(study, run)
    mlflow = _mlflow_run(run, identity)
    twin = _finished_twin(identity, winners)
    try:
        with whole_folder(paths.RUNS / run.name) as folder, whole_folder(paths.CHECKPOINTS / run.name) as checkpoint:
            _write_config(folder / "config.yaml", run, identity, twin)
            if twin:
                timing = _take_over(twin, folder, checkpoint, mlflow)
            else:
                timing = _train(study, run, problems, folder, checkpoint, mlflow)
        for name in ("config.yaml", "metrics.json", "rollouts.jsonl"):
            mlflow.artifact(paths.RUNS / run.name / name)
        mlflow.tag(checkpoint_digest=files_digest(paths.CHECKPOINTS / run.name), same_as=twin or "")
    except BaseException:
        mlflow.finish("FAILED")
        raise
    run_id = mlflow.finish()
    write_json(
        paths.TIMING / f"{run.name}.json",
        {"run": run.name, "mlflow_run_id": run_id, "same_as": twin, **source_tags(), **timing},
    )


def _train(
    study: Study,
    run: EffectiveRun,
    problems: tuple[list[Problem], list[Problem]],
    folder: Path,
    checkpoint: Path,
    mlflow: MlflowRun,
) -> dict[str, Any]:
    """Train, write results and checkpoint, and return the wall-clock figures."""
    started, start = now(), time.perf_counter()
    torch.set_num_threads(study.threads)
    tokenizer = load_tokenizer(paths.MODEL)
    model = load_model(paths.MODEL, study.learner.dtype, study.learner.device)
    if study.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    train, validation = problems
    engine = make_engine(study, model, tokenizer)
    learner = Learner(model, run.config, tokenizer.pad_token_id)
    log = RunLog(folder, mlflow)
    validate = Validation(study, run, validation[: study.evaluation.problems], engine, learner, tokenizer, log)
    train_grpo(run.config, run.seed, train, tokenizer, engine, learner, REWARD_FNS[run.config.prompt], validate, log)
    validate.bar.close()
    log.close()
    write_json(folder / "metrics.json", final_metrics(log.validations, len(validate.problems)))
    write_text(folder / "rollouts.jsonl", "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in validate.samples))
    save_checkpoint(checkpoint, model, tokenizer)
    phases = {key for times in log.times for key in times if key.endswith("_s") and key != "tokens_per_s"}
    return {
        "started": started,
        "finished": now(),
        "total_s": time.perf_counter() - start,
        "phases": {key: sum(times[key] for times in log.times) for key in sorted(phases)},
        "threads": study.threads,
        "device": study.learner.device,
        "steps": log.times,
    }


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


def _mlflow_run(run: EffectiveRun, identity: dict[str, Any]) -> MlflowRun:
    return MlflowRun(
        run.experiment,
        f"{run.arm}-{run.seed}",
        {**run.config.model_dump(), "seed": run.seed},
        {
            "stage": f"{run.experiment}@{run.arm}-{run.seed}",
            "arm": run.arm,
            "identity": digest(identity),
            "dataset_digest": digest([identity["train"], identity["validation"]]),
            "model_digest": identity["model"],
        },
    )


def _write_config(path: Path, run: EffectiveRun, identity: dict[str, Any], twin: str | None) -> None:
    """The effective configuration: each value with where it came from."""
    from ruamel.yaml import YAML

    values = run.config.model_dump()
    content = {
        "run": run.name,
        "same_as": twin,
        "identity": digest(identity),
        "seed": run.seed,
        "config": {key: {"value": value, "from": run.sources[key]} for key, value in values.items()},
        **{key: identity[key] for key in ("evaluation", "engine", "learner", "threads", "model", "train", "validation")},
    }
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)


def _finished_twin(identity: dict[str, Any], winners: list[dict[str, Any]]) -> str | None:
    """The name of a run of an earlier experiment with this identity whose results are at hand."""
    wanted = digest(identity)
    for winner in winners:
        for path in sorted((paths.RUNS / winner["experiment"]).glob("*/config.yaml")):
            config = read_yaml(path)
            if config["identity"] == wanted and (paths.CHECKPOINTS / config["run"]).exists():
                return str(config["run"])
    return None


def _take_over(twin: str, folder: Path, checkpoint: Path, mlflow: MlflowRun) -> dict[str, Any]:
    """Copy an equal run's results, and show its curves in this run's MLflow entry too."""
    print(f"same configuration as {twin}: its results are taken over, nothing is trained twice")
    for source in (paths.RUNS / twin).iterdir():
        if source.name != "config.yaml":
            shutil.copyfile(source, folder / source.name)
    shutil.copytree(paths.CHECKPOINTS / twin, checkpoint, dirs_exist_ok=True)
    for name in ("history.csv", "validation.csv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("update"))
                row.pop("step")
                mlflow.log({key: float(value) for key, value in row.items()}, step=step)
    return {"started": now(), "finished": now(), "total_s": 0.0, "phases": {}, "steps": []}
