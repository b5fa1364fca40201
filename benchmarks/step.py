r"""Measure the seconds of one GRPO step of this project and of TRL's GRPOTrainer, with the same model, prompts and lengths.

``make bench`` installs TRL in a separate environment and runs this. Both sample with the model in this process, train on their
own rollouts, and take turns, so that a slow minute of the machine affects both. A random reward gives every group a signal. The
first steps of each turn, in which layers are compiled, do not count.

``--gpu`` does the same on a GPU with vLLM, with 32 x 8 responses of at most 1,024 tokens and a model of random weights in the
shape of Qwen2.5-Math-1.5B, whose responses end after ``--mean-tokens`` on average (:mod:`benchmarks.gpu_parts.step`).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from grpo.common.process import fix_cpu_kernels, share_cpu_fairly
from grpo.study.config import LearnerSettings

fix_cpu_kernels()
share_cpu_fairly()

import torch  # noqa: E402

from grpo.common.process import start_threads  # noqa: E402
from grpo.common.records import Problem, Rollout  # noqa: E402
from grpo.learner.advantages import normalize_within_groups  # noqa: E402
from grpo.learner.learner import Learner  # noqa: E402
from grpo.models.checkpoint import compile_layers, load_model, load_tokenizer, save_checkpoint  # noqa: E402
from grpo.models.tokenizer import train_tokenizer  # noqa: E402
from grpo.models.transformer import TransformerConfig, TransformerLM  # noqa: E402
from grpo.rollout.engine import SamplingParams  # noqa: E402
from grpo.rollout.transformers_engine import TransformersEngine  # noqa: E402
from grpo.study.config import GrpoConfig  # noqa: E402
from grpo.tasks.arithmetic import word_problems  # noqa: E402

Times = dict[str, list[float]]
PACKED = "packed (the default)"
WARM_UP = 2
COLUMNS = ("step", "rollout", "learner")
BUDGET = 4096  # tokens of a row, as in the mini study


def make_model(folder: Path, context: int = 512) -> None:
    """Make a random model of 0.85M parameters, which TRL loads as Qwen2, and a tokenizer trained on word problems."""
    problems = word_problems(0, 4, validation=False)
    tokenizer = train_tokenizer((next(problems).question for _ in range(2000)), 512)
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=336,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )
    save_checkpoint(folder, TransformerLM(config), tokenizer)


def make_prompts(tokenizer: Any, n: int, tokens: int) -> list[str]:
    """Join word problems and cut the text to ``tokens`` tokens."""
    problems = word_problems(1, 4, validation=False)
    texts = []
    for _ in range(n):
        ids: list[int] = []
        while len(ids) < tokens:
            ids += tokenizer(next(problems).question + " ", add_special_tokens=False)["input_ids"]
        texts.append(tokenizer.decode(ids[:tokens]))
    return texts


def config_of(settings: argparse.Namespace, learning_rate: float) -> GrpoConfig:
    """The configuration of a step with one update on all rollouts."""
    size = settings.prompts * settings.group
    return GrpoConfig(
        rollout_batch_size=size,
        train_batch_size=size,
        group_size=settings.group,
        gradient_accumulation_steps=1,
        sampling_max_tokens=settings.new_tokens,
        learning_rate=learning_rate,
    )


def ours(folder: Path, settings: argparse.Namespace, turn: int, budget: int | None = None, compiled: bool = False) -> Times:
    """Run one turn of this project's engine and learner, as in ``train_grpo`` without files and evaluation."""
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    if compiled:
        compile_layers(model)
    config = config_of(settings, learning_rate=1e-5)
    learner = Learner(model, config, tokenizer.pad_token_id, LearnerSettings(max_tokens_per_microbatch=budget))
    engine = TransformersEngine(model, tokenizer)
    sampling = SamplingParams(1.0, 1.0, settings.new_tokens, settings.new_tokens)
    return our_steps(engine, learner, sampling, tokenizer, settings, turn)


def our_steps(
    engine: Any, learner: Learner, sampling: SamplingParams, tokenizer: Any, settings: argparse.Namespace, turn: int
) -> Times:
    """Seconds of the steps of an engine and a learner."""
    size = settings.prompts * settings.group
    texts = make_prompts(tokenizer, settings.prompts, settings.prompt_tokens)
    prompts = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    times: Times = {"step": [], "rollout": [], "learner": []}
    for step in range(settings.steps + WARM_UP):
        start = time.perf_counter()
        groups = engine.generate(prompts, sampling, n=settings.group, seed=turn * 1000 + step)
        problem = Problem("benchmark", "", "")
        rollouts = [Rollout(problem, p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        rewards = torch.rand(size)
        advantages = normalize_within_groups(rewards, settings.group, 1e-6, True)
        for rollout, reward, advantage in zip(rollouts, rewards.tolist(), advantages.tolist(), strict=True):
            rollout.rewards, rollout.advantage = {"reward": reward}, advantage
        sampled = time.perf_counter()
        learner.update(rollouts)
        engine.synchronize(learner.model, step + 1)
        end = time.perf_counter()
        times["step"].append(end - start)
        times["rollout"].append(sampled - start)
        times["learner"].append(end - sampled)
    return {key: values[WARM_UP:] for key, values in times.items()}


def trl(folder: Path, settings: argparse.Namespace, more: Mapping[str, Any] = MappingProxyType({})) -> Times:
    """Run one turn of TRL's trainer: no KL term, one update per batch, generation in this process.

    Args:
        more: further arguments of its GRPOConfig, or other values.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = make_prompts(tokenizer, settings.prompts, settings.prompt_tokens)
    size = settings.prompts * settings.group
    times: Times = {"step": [], "rollout": [], "learner": []}
    generation = [0.0]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start, generation[0] = time.perf_counter(), 0.0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - self.start
            times["step"].append(seconds)
            times["rollout"].append(generation[0])
            times["learner"].append(seconds - generation[0])

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            generation[0] += time.perf_counter() - start
            return made

    precision = {"dtype": torch.bfloat16} if more.get("bf16") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **precision)
    own: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 1,
        "generation_kwargs": {"min_new_tokens": settings.new_tokens},
        "use_cpu": True,
        "bf16": False,
    }
    with tempfile.TemporaryDirectory() as out:
        trainer = Timed(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            train_dataset=Dataset.from_dict({"prompt": texts * (settings.steps + WARM_UP)}),
            args=GRPOConfig(
                output_dir=out,
                num_generations=settings.group,
                max_completion_length=settings.new_tokens,
                temperature=1.0,
                beta=0.0,
                loss_type="grpo",
                learning_rate=1e-5,
                max_steps=settings.steps + WARM_UP,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **own | dict(more),
            ),
            callbacks=[Clock()],
        )
        trainer.train()
    return {key: values[WARM_UP:] for key, values in times.items()}


def on_gpu(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure the ways of :mod:`benchmarks.gpu_parts.step`: for each its times, or why there are none."""
    from benchmarks.gpu_parts import step

    def measure(way: str, folder: Path) -> dict[str, Any]:
        if way == step.TRL:
            return dict(trl(folder, settings, step.trl_settings(settings)))
        config = config_of(settings, learning_rate=1e-6)
        engine, learner, sampling = step.our_parts(way, folder, settings, config)
        return dict(our_steps(engine, learner, sampling, load_tokenizer(folder), settings, 0))

    return step.compare(settings, __file__, measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=108)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="number of measured steps per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--without-trl", action="store_true", help="compare packed and padded microbatches only")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, with vLLM: 32 prompts of 150 tokens x 8")
    parser.add_argument("--mean-tokens", type=float, default=500.0, help="with --gpu: mean length of responses without a limit")
    parser.add_argument("--tiny", action="store_true", help="with --gpu: a tiny model on a CPU, without vLLM, to try the code")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # what a process that --gpu starts measures,
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # and the model
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    if "--gpu" in sys.argv and "--tiny" not in sys.argv:
        parser.set_defaults(prompts=32, prompt_tokens=150, new_tokens=1024, steps=2, threads=8)
    settings = parser.parse_args()
    start_threads(settings.threads)
    if settings.gpu:
        times = on_gpu(settings)
        measured = {way: found for way, found in times.items() if "step" in found}
        medians = {way: {key: statistics.median(found[key]) for key in COLUMNS} for way, found in measured.items()}
        if medians:
            report(settings, medians, next(iter(medians)), times)
        return
    ways: dict[str, Any] = {
        PACKED: lambda folder, turn: ours(folder, settings, turn, BUDGET),
        "packed, compiled": lambda folder, turn: ours(folder, settings, turn, BUDGET, compiled=True),
        "padded (the reference)": lambda folder, turn: ours(folder, settings, turn),
    }
    if not settings.without_trl:
        ways["TRL"] = lambda folder, turn: trl(folder, settings)
    measured: dict[str, Times] = {name: {"step": [], "rollout": [], "learner": []} for name in ways}
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        for turn in range(settings.turns):
            for way, run in ways.items():
                for key, values in run(Path(name), turn).items():
                    measured[way][key] += values
    medians = {way: {key: statistics.median(values) for key, values in times.items()} for way, times in measured.items()}
    report(settings, medians, PACKED)


def report(
    settings: argparse.Namespace, medians: dict[str, dict[str, float]], first: str, each: Mapping[str, Any] | None = None
) -> None:
    """Print a table of median seconds, with their ratios to those of the way ``first``, and write the JSON file."""
    base = medians[first]
    print(f"{settings.prompts} prompts of {settings.prompt_tokens} tokens x {settings.group}, {settings.new_tokens} new tokens")
    print(f"{'':24}" + "".join(f"{name + ', s':>12}{'ratio':>8}" for name in COLUMNS))
    for way, times in medians.items():
        cells = [f"{times[name]:>12.3f}{times[name] / base[name]:>8.2f}" for name in COLUMNS]
        print(f"{way:24}" + "".join(cells))
    if settings.out:
        packages = ("torch", "transformers", *(["vllm"] if settings.gpu else []), *([] if settings.without_trl else ["trl"]))
        gpu = torch.cuda.get_device_name() if settings.gpu and torch.cuda.is_available() else ""
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": gpu or f"{platform.processor() or platform.machine()}, {settings.threads} threads",
            "versions": {package: version(package) for package in packages if find_spec(package)},
            "settings": {k: v for k, v in vars(settings).items() if k not in ("out", "way", "model")},
            **({"each": each} if each else {}),
        }
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps({**about, "median_seconds": medians}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
