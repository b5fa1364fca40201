"""The parts of benchmarks/gpu.py that sample with vLLM."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.checksums import are_equal, checksums_of_policy, checksums_of_vllm
from benchmarks.gpu_parts.tools import (
    Batch,
    Row,
    Rows,
    Setting,
    Skipped,
    make_model,
    median_seconds,
    microbatches,
    require,
    seconds_of,
)
from grpo.common.records import Completion, Problem, Rollout


def vllm(setting: Setting) -> Rows:
    """Measure vLLM: start, speed, seeds, weight updates, sleep, and its difference from the learner."""
    with tempfile.TemporaryDirectory() as folder:
        trial = begin(setting, torch.bfloat16 if setting.on_gpu else torch.float32, Path(folder))
        yield "start", "", trial.start
        yield "sampling, stop strings", "as fast as without", lambda: trial.speed(stop=("</answer>",))
        yield "sampling, no stop strings", "", trial.speed
        yield "seeds", "same 1, other 0", trial.seeds
        yield "weights", "equal checksums", trial.weights
        yield "mismatch", "", trial.mismatch
        yield "ten sleeps", "no growth", trial.sleeps


def vllm_float16(setting: Setting) -> Rows:
    """Measure vLLM and learner in float16: weight updates, and the difference between the two."""
    with tempfile.TemporaryDirectory() as folder:
        trial = begin(setting, torch.float16, Path(folder))
        yield "start", "", trial.start
        yield "weights", "equal checksums", trial.weights
        yield "mismatch", "", trial.mismatch


def begin(setting: Setting, dtype: torch.dtype, folder: Path) -> Trial:
    """Make a model with random weights, and save it as a checkpoint in the folder."""
    require("vllm", "tokenizers")
    from grpo.models.checkpoint import save_checkpoint

    model = make_model(setting.scale, setting.device, dtype)
    save_checkpoint(folder, model, make_tokenizer(model.config.vocab_size))
    return Trial(setting, folder, model, dtype)


@dataclass
class Trial:
    """A vLLM engine and its policy; each method measures a row."""

    setting: Setting
    folder: Path
    model: Any
    dtype: torch.dtype
    engine: Any = field(default=None, init=False)

    def start(self) -> Row:
        """Seconds until the engine is ready to sample."""
        from grpo.rollout.vllm_engine import VllmEngine, VllmSettings

        precision, device, on_gpu = str(self.dtype).removeprefix("torch."), self.setting.device, self.setting.on_gpu

        def start() -> None:
            self.engine = VllmEngine(self.folder, self.model, VllmSettings(precision, device, 0.5, 512, on_gpu))

        return {"seconds": self._seconds(start)}

    def speed(self, stop: tuple[str, ...] = ()) -> Row:
        """Tokens per second; with stop strings vLLM detokenizes each response while it grows."""
        prompts, n, tokens = self.setting.scale.sampled
        # Waking and putting the weights in is part of each call, and of one for a single token almost all.
        short = median_seconds(self.setting, lambda: self._sampled(1, 0, stop))
        long = median_seconds(self.setting, lambda: self._sampled(tokens, 0, stop))
        made = prompts * n * (tokens - 1)
        return {"tokens_per_s": made / max(long - short, 1e-9), "seconds": long, "seconds_to_first_token": short}

    def seeds(self) -> Row:
        """Shares of equal responses with the same seed, and with another seed."""
        *_, tokens = self.setting.scale.sampled
        ids = [[completion.token_ids for completion in self._sampled(tokens, seed)] for seed in (1, 1, 2)]
        return {
            "same_seed": sum(a == b for a, b in zip(ids[0], ids[1], strict=True)) / len(ids[0]),
            "other_seed": sum(a == b for a, b in zip(ids[0], ids[2], strict=True)) / len(ids[0]),
            "different_in_a_group": len(set(ids[0])) / len(ids[0]),
        }

    def weights(self) -> Row:
        """Update the weights, and compare checksums."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        putting = self._seconds(lambda: (self._started().synchronize(self.model, 1), self._sampled(1, 0)))
        with self._started().turns():  # awake, so that there are weights to look at
            self._sampled(1, 0)
            theirs = checksums_of_vllm(self._started()._llm)
        return {"equal": are_equal(theirs, checksums_of_policy(self.model, theirs)), "seconds_with_a_token": putting}

    def mismatch(self) -> Row:
        """Difference between the engine's and the learner's log-probabilities, per token."""
        *_, n, tokens = self.setting.scale.sampled
        completions = self._sampled(tokens, 3)
        owners = [prompt for prompt in self._prompts() for _ in range(n)]
        batch = [Rollout(Problem("", "", ""), p, c) for p, c in zip(owners, completions, strict=True)]
        apart = []
        with torch.no_grad():
            for micro in microbatches(self.model, batch, self.setting.scale.budget, self.setting.scale.padded):
                for i, row, keep in zip(micro.members, micro.log_probs, micro.mask, strict=True):
                    apart.append((row[keep].cpu() - torch.tensor(batch[i].completion.log_probs)).abs())
        every = torch.cat(apart)
        return {"mean": every.mean().item(), "max": every.max().item(), "above_0.1": (every > 0.1).float().mean().item()}

    def sleeps(self) -> Row:
        """Let the engine sleep and wake ten times, and check whether memory grows."""
        if not self.setting.on_gpu:
            raise Skipped("vLLM can only sleep on a GPU")
        used, times = [], []
        for cycle in range(10):
            times.append(self._seconds(lambda cycle=cycle: self._sampled(1, cycle)))
            free, total = torch.cuda.mem_get_info()
            used.append((total - free) / 2**20)
        return {"growth_mb": used[-1] - used[1], "asleep_mb": used[-1], "seconds_median": statistics.median(times)}

    def _started(self) -> Any:
        if self.engine is None:
            raise Skipped("vLLM did not start")
        return self.engine

    def _seconds(self, work: Callable[[], Any]) -> float:
        return seconds_of(self.setting.device, work)

    def _prompts(self) -> list[tuple[int, ...]]:
        prompts, *_ = self.setting.scale.sampled
        batch = Batch(prompts, 1, self.setting.scale.update.prompt_tokens, 1)
        return [rollout.prompt_ids for rollout in batch.made(self.model.config.vocab_size)]

    def _sampled(self, length: int, seed: int, stop: tuple[str, ...] = ()) -> list[Completion]:
        from grpo.rollout.engine import SamplingParams

        _, n, _ = self.setting.scale.sampled
        params = SamplingParams(min_tokens=length, max_tokens=length, stop=stop)
        groups = self._started().generate(self._prompts(), params, n, seed)
        return [completion for group in groups for completion in group]


def make_tokenizer(size: int) -> Any:
    """Make a tokenizer with as many tokens as the model has logits, so that any sample can be decoded."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from grpo.models.tokenizer import CONFIG, END_OF_TEXT, TOKENIZER, Tokenizer

    words = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"w{i}" for i in range(size))][:size]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    config = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    return Tokenizer({TOKENIZER: backend.to_str().encode(), CONFIG: json.dumps(config).encode()})
