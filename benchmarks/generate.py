"""Measure sampling of a rollout batch with this project's transformers engine and with ``model.generate()``.

Run ``python benchmarks/generate.py``. Both use the same model and prompts and take turns; the result is the median. With
``--early-stops`` sequences end at random, as in training; otherwise all have the full length.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from grpo.common.cpu import fix_cpu_kernels, share_cpu_fairly, start_threads

fix_cpu_kernels()
share_cpu_fairly()
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from step import add_shape, make_model, make_prompts  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from grpo.models.checkpoint import load_model, load_tokenizer  # noqa: E402
from grpo.rollout.engine import SamplingParams  # noqa: E402
from grpo.rollout.transformers_engine import TransformersEngine  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--early-stops", type=float, default=0.0, help="approximate probability that a token ends its sequence")
    parser.add_argument("--repeats", type=int, default=7)
    settings = parser.parse_args()
    start_threads(settings.threads)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        tokenizer, model = load_tokenizer(Path(name)), load_model(Path(name))
        theirs = AutoModelForCausalLM.from_pretrained(name)
        padding = PreTrainedTokenizerFast.from_pretrained(name, padding_side="left")
    if settings.early_stops:
        for each in (model, theirs):
            each.lm_head.register_forward_hook(lambda module, inputs, logits: add_to_end(logits, settings.early_stops))
    texts = make_prompts(tokenizer, settings.prompts, settings.prompt_tokens)
    prompts = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    least = 0 if settings.early_stops else settings.new_tokens
    sampling = SamplingParams(1.0, 1.0, least, settings.new_tokens)
    engine = TransformersEngine(model, tokenizer)
    padded = padding.pad({"input_ids": [list(ids) for ids in prompts for _ in range(settings.group)]}, return_tensors="pt")

    def ours(seed: int) -> int:
        groups = engine.generate(prompts, sampling, n=settings.group, seed=seed)
        return sum(len(completion.token_ids) for group in groups for completion in group)

    def plain(seed: int) -> int:
        torch.manual_seed(seed)
        limits = {"max_new_tokens": settings.new_tokens, "min_new_tokens": least}
        with torch.inference_mode():
            out = theirs.generate(**padded, **limits, do_sample=True, top_k=0, pad_token_id=0)[
                :, padded["input_ids"].shape[1] :
            ]
        return int((out != 0).sum())

    times: dict[str, list[float]] = {"engine": [], "generate()": []}
    tokens = dict.fromkeys(times, 0)
    for repeat in range(settings.repeats + 1):
        for way, run in (("engine", ours), ("generate()", plain)):
            start = time.perf_counter()
            made = run(repeat)
            if repeat:
                times[way].append(time.perf_counter() - start)
                tokens[way] += made
    medians = {way: statistics.median(values) for way, values in times.items()}
    for way, seconds in medians.items():
        print(f"{way:12} {seconds:.3f} s, {tokens[way] / settings.repeats:.0f} tokens")
    print(f"ratio {medians['generate()'] / medians['engine']:.2f}")


def add_to_end(logits: torch.Tensor, chance: float) -> torch.Tensor:
    """Set the end-of-text logit so that it is sampled with about this probability."""
    others = torch.logsumexp(logits[..., 1:], dim=-1)
    logits[..., 0] = others + torch.logit(torch.tensor(chance))
    return logits


if __name__ == "__main__":
    main()
