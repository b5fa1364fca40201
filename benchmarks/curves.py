"""Train SmolLM2 with this project and with TRL's GRPOTrainer, with equal settings, and compare the steps.

``PYTHONPATH=. .venv-adapters/bin/python benchmarks/curves.py data/model/main --out curves`` (after ``make test-trl`` and the
stage ``model`` of smollm2) takes an hour on two quiet cores.

The task is that of the study smollm2. In a step both get the same 8 problems, 8 responses each, and take one update with GRPO's
objective (mean over a response's tokens, then over responses; group mean and standard deviation) and AdamW (betas 0.9, 0.95).
They draw other random numbers. They take turns, each run in a process of its own. The curves are compared by means over five
steps, 320 responses, as one step's reward is noisy.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "studies")]  # the package need not be installed

from grpo.common.process import fix_cpu_kernels, share_cpu_fairly  # noqa: E402

fix_cpu_kernels()
share_cpu_fairly()

from scipy import stats  # noqa: E402
from smollm2_task import Keywords  # noqa: E402

from grpo.common.process import start_threads  # noqa: E402
from grpo.common.records import Problem, Rollout  # noqa: E402

WAYS = ("ours", "TRL")
GROUP, TOKENS, RATE, BETAS = 8, 32, 1e-5, (0.9, 0.95)
WINDOW = 5
Step = dict[str, float]


class Clock:
    """Measures a run's steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.start()

    def start(self) -> None:
        self.began, self.core_began = time.perf_counter(), time.process_time()

    def stop(self, reward: float) -> None:
        seconds, core_s = time.perf_counter() - self.began, time.process_time() - self.core_began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.steps.append({"reward": reward, "seconds": seconds, "core_s": core_s, "peak_gib": peak})


def ours(model: Path, task: Keywords, problems: list[Problem], settings: argparse.Namespace) -> list[Step]:
    """A run of this project's engine and learner."""
    import torch

    from grpo.learner.advantages import normalize_within_groups
    from grpo.learner.learner import Learner
    from grpo.models.checkpoint import load_model, load_tokenizer
    from grpo.rollout.engine import SamplingParams
    from grpo.rollout.transformers_engine import TransformersEngine
    from grpo.study.config import GrpoConfig, LearnerSettings

    tokenizer, policy, chat, size = load_tokenizer(model), load_model(model), task.formats["chat"], settings.prompts * GROUP
    sizes = {"rollout_batch_size": size, "train_batch_size": size, "gradient_accumulation_steps": 1, "group_size": GROUP}
    config = GrpoConfig(**sizes, learning_rate=RATE, sampling_min_tokens=0, sampling_max_tokens=TOKENS)
    learner = Learner(policy, config, tokenizer.pad_token_id, LearnerSettings(max_tokens_per_microbatch=512))
    engine, sampling = TransformersEngine(policy, tokenizer), SamplingParams(1.0, 1.0, 0, TOKENS)
    clock = Clock()
    for step in range(settings.steps):
        clock.start()
        asked = problems[step * settings.prompts :][: settings.prompts]
        prompts = chat.encode_all(tokenizer, [chat.prompt_of(problem) for problem in asked])
        groups = engine.generate(prompts, sampling, n=GROUP, seed=settings.seed * 1000 + step)
        rollouts = [Rollout(p, ids, c) for p, ids, group in zip(asked, prompts, groups, strict=True) for c in group]
        rewards = [task.verify([r.completion.text], [r.problem])[0] for r in rollouts]
        advantages = normalize_within_groups(torch.tensor(rewards), GROUP, config.advantage_eps, True)
        for rollout, reward, advantage in zip(rollouts, rewards, advantages.tolist(), strict=True):
            rollout.rewards, rollout.advantage = {"reward": reward}, advantage
        learner.update(rollouts)
        clock.stop(statistics.mean(rewards))
    return clock.steps


def trl(model: Path, task: Keywords, problems: list[Problem], settings: argparse.Namespace) -> list[Step]:
    """A run of TRL's trainer: batches of 16 on the device, summed to the same batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock, chat, last = Clock(), task.formats["chat"], []

    class Measured(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.start()
            last.clear()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.stop(statistics.mean(last))

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        found = [task.verify([one[0]["content"]], [problems[i]])[0] for one, i in zip(completions, number, strict=True)]
        last.extend(found)
        return found

    size = settings.prompts * GROUP
    on_device = min(16, size)
    asked = [[{"role": "user", "content": chat.prompt_of(problem)}] for problem in problems]
    arguments = GRPOConfig(
        output_dir=str(settings.out / "trl"),
        per_device_train_batch_size=on_device,
        gradient_accumulation_steps=size // on_device,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=1.0,
        max_steps=settings.steps,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=settings.seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa"),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": asked, "number": list(range(len(problems)))}),
        args=arguments,
        callbacks=[Measured()],
    ).train()
    return clock.steps


def compared(runs: dict[str, list[list[Step]]]) -> dict[str, Any]:
    """Differences of rewards (ours less TRL's) with 95% intervals over seeds, and medians of the steps' costs."""
    found: dict[str, Any] = {"reward": {}, "medians": {}}
    n_steps, n = len(runs["ours"][0]), len(runs["ours"])
    for end in range(min(WINDOW, n_steps), n_steps + 1, WINDOW):
        means = {
            way: [statistics.mean(s["reward"] for s in run[max(0, end - WINDOW) : end]) for run in runs[way]] for way in WAYS
        }
        differences = [a - b for a, b in zip(means["ours"], means["TRL"], strict=True)]
        half = stats.t.ppf(0.975, n - 1) * statistics.stdev(differences) / n**0.5 if n > 1 else None
        found["reward"][end] = {**means, "difference": statistics.mean(differences), "half_width": half}
    for key in ("seconds", "core_s", "peak_gib"):
        found["medians"][key] = {way: statistics.median(s[key] for run in runs[way] for s in run) for way in WAYS}
    return found


def draw(runs: dict[str, list[list[Step]]], target: Path) -> None:
    """A thin line for each run: reward over steps."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for way, colour in zip(WAYS, ("tab:blue", "tab:orange"), strict=True):
        for number, run in enumerate(runs[way]):
            axes.plot([s["reward"] for s in run], color=colour, lw=1, label=None if number else way)
    axes.set(xlabel="step", ylabel="mean reward of the step's responses", ylim=(0, 1))
    axes.legend()
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model, as the stage `model` of smollm2 or real writes it")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs.json, compared.json and curves.png")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what a process measures,
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)  # and its seed
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.way:
        start_threads(settings.threads)
        task = Keywords(settings.steps * settings.prompts, 1, settings.seed)
        run = ours if settings.way == "ours" else trl
        found = run(settings.model, task, task.problems("train"), settings)
        (settings.out / f"{settings.way}-{settings.seed}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    runs: dict[str, list[list[Step]]] = {way: [] for way in WAYS}
    for seed in range(settings.seeds):
        for way in WAYS:
            file = settings.out / f"{way}-{seed}.json"
            if not file.exists():  # a stopped comparison goes on
                subprocess.run([sys.executable, *sys.argv, "--way", way, "--seed", str(seed)], check=True)
            runs[way].append(json.loads(file.read_text(encoding="utf-8")))
    (settings.out / "compared.json").write_text(json.dumps(compared(runs), indent=2) + "\n", encoding="utf-8")
    draw(runs, settings.out / "curves.png")
    print((settings.out / "compared.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
