"""All pairs of settings that affect the gradient: each has its effect with each other one, or the pair is refused.

The effect is seen in the weights after the updates on one batch.
"""

import copy
from contextlib import nullcontext, suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import as_rollouts, config
from model_parts import SMALLER, own_model
from pydantic import ValidationError
from ruamel.yaml import YAML
from torch import Tensor

from grpo.common.records import Rollout
from grpo.learner.advantages import normalize_within_groups
from grpo.learner.learner import Learner
from grpo.models.lora import add_adapters
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import GrpoConfig, LearnerSettings
from grpo.training.step import update_policy

BASE = {"loss_type": "grpo_clip", "cliprange": 0.01, "epochs_per_rollout_batch": 2, "sampling_min_tokens": 0}
CHANGED: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(Path(__file__).with_name("settings.yaml"))
SAMPLED_BY = ("group_size", "sampling_temperature", "sampling_top_p", "sampling_min_tokens", "sampling_max_tokens")
RAW_REWARDS = "this loss takes raw rewards"
NO_RATIO = "this loss has no ratio to clip"
ONE_UPDATE = "the policy is the one that sampled, so each ratio is 1 and the gradient that of REINFORCE"
# Where the first setting of a pair changes nothing beside the second, and why that is right.
ANYWHERE = {
    ("advantage_eps", "no_baseline"): RAW_REWARDS,
    ("advantage_eps", "no_std"): "it is added to the standard deviation",
    ("no_std", "no_baseline"): RAW_REWARDS,
    **{("cliprange", loss): NO_RATIO for loss in ("no_baseline", "reinforce", "no_clip")},
}
NO_EFFECT = {
    "synchronous": ANYWHERE | {(name, "one_epoch"): ONE_UPDATE for name in ("cliprange", "no_clip", "reinforce")},
    "asynchronous": ANYWHERE,
}
SAMPLED_FROM = {  # how far the engine's weights are from the learner's, and how many versions they are behind
    "synchronous": (0.005, 0),  # as if it computed in another precision
    "asynchronous": (0.05, 1),
}


class NoWords:
    """A tokenizer for random weights: some tokens end a response."""

    pad_token_id, eos_token_id, stop_token_ids, is_byte_level = 0, 0, tuple(range(12)), False

    def __len__(self) -> int:
        return 128

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)


def changed(mode: str, *names: str) -> GrpoConfig:
    changes = {key: value for name in names for key, value in CHANGED[name].items()}
    return config(**{**BASE, **({"asynchronous": {"max_policy_lag": 1}} if mode == "asynchronous" else {}), **changes})


@cache
def sampled(
    mode: str, rollouts: int, n: int, temperature: float, top_p: float, min_tokens: int, max_tokens: int
) -> list[Rollout]:
    model = own_model(128, **SMALLER)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += SAMPLED_FROM[mode][0] * torch.randn_like(weight)
    prompts = [(9, 8, 7, i) for i in range(rollouts // n)]
    params = SamplingParams(temperature, top_p, min_tokens, max_tokens)
    return as_rollouts(prompts, TransformersEngine(model, NoWords()).generate(prompts, params, n=n, seed=1))


@cache
def trained(mode: str, *names: str) -> Tensor:
    settings = changed(mode, *names)
    model = own_model(128, **SMALLER)
    if settings.lora is not None:
        add_adapters(model, settings.lora, seed=0)
    batch = copy.deepcopy(sampled(mode, settings.rollout_batch_size, *(getattr(settings, name) for name in SAMPLED_BY)))
    made_up = [(sum(r.completion.token_ids) % 7 + len(r.completion.token_ids)) / 10 for r in batch]
    scores = [dict.fromkeys(("reward", "format_reward", "answer_reward"), reward) for reward in made_up]
    eps, by_std = settings.advantage_eps, settings.use_std_normalization
    rewards = torch.tensor([score["reward"] for score in scores], dtype=torch.float64)
    advantages = normalize_within_groups(rewards, settings.group_size, eps, by_std)
    for rollout, score, advantage in zip(batch, scores, advantages.tolist(), strict=True):
        rollout.rewards, rollout.advantage = score, advantage
    learner = Learner(model, settings, 0, LearnerSettings(max_tokens_per_microbatch=400))
    update_policy(settings, learner, batch, version=SAMPLED_FROM[mode][1])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def any_cut_off(mode: str, name: str) -> bool:
    """Whether a response reaches the limit, so that it matters what is done with those that do."""
    settings = changed(mode, "truncated", name)
    batch = sampled(mode, settings.rollout_batch_size, *(getattr(settings, key) for key in SAMPLED_BY))
    return any(rollout.completion.finish_reason == "length" for rollout in batch)


def is_refused(mode: str, *names: str) -> bool:
    with suppress(ValidationError):
        changed(mode, *names)
        return False
    return True


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-6)


# Two values of one setting are no pair.
PAIRS = [(one, other) for one, other in combinations(CHANGED, 2) if not CHANGED[one].keys() & CHANGED[other].keys()]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_no_setting_silently_cancels_another(mode: str) -> None:
    """Exactly the pairs in the tables above are refused, and exactly the settings there have no effect."""
    refused = {pair for pair in PAIRS if is_refused(mode, *pair)}
    # Stale rollouts use the engine's log-probs, unless the loss has no ratio to them.
    no_ratio, narrowed = {"no_baseline", "reinforce", "importance_cap"}, {"top_p", "min_tokens"}
    stale = [pair for pair in PAIRS if mode == "asynchronous" and not {*pair} & no_ratio]
    assert refused == {pair for pair in stale if {*pair} & narrowed}
    without_effect = {
        (one, other)
        for pair in PAIRS
        for one, other in (pair, pair[::-1])
        if pair not in refused and not is_refused(mode, other) and same(trained(mode, *pair), trained(mode, other))
    }
    others = {other for pair in PAIRS if "truncated" in pair and pair not in refused for other in {*pair} - {"truncated"}}
    none_cut_off = {("truncated", name) for name in others if not is_refused(mode, name) and not any_cut_off(mode, name)}
    assert without_effect == {*NO_EFFECT[mode], *none_cut_off}


@pytest.mark.parametrize(
    ("settings", "stale", "message"),
    [
        ({"sampling_top_p": 0.95}, {"max_policy_lag": 1}, r"sampling_top_p \(0.95\) .*set it to 1.0, or set importance_cap"),
        ({"sampling_min_tokens": 4}, {"max_policy_lag": 1}, r"sampling_min_tokens \(4\) .*set it to 0, or set importance_cap"),
        ({"sampling_min_tokens": 4}, {"max_policy_lag": 0, "replay_capacity": 2}, r"sampling_min_tokens \(4\)"),
        ({"sampling_top_p": 0.95}, {"max_policy_lag": 0}, None),  # these are of the current policy
        # With a lag of exactly 2, rollouts of the batch before lag by 3.
        ({}, {"max_policy_lag": 2, "replay_capacity": 2, "replay_max_age": 2}, r"replay_max_age \(2\) .*replay_capacity to 1"),
        ({}, {"max_policy_lag": 2, "replay_capacity": 2, "replay_max_age": 3}, None),
        ({}, {"max_policy_lag": 2, "replay_capacity": 1, "replay_max_age": 2}, None),
    ],
)
def test_unusable_stale_rollouts_are_refused(settings: dict[str, Any], stale: dict[str, int], message: str | None) -> None:
    with pytest.raises(ValidationError, match=message) if message else nullcontext():
        config(**BASE | {"loss_type": "grpo_no_clip"} | settings, asynchronous=stale)
