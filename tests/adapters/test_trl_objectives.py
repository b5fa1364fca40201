"""Losses and gradients are those of TRL's trainers on the same tensors, to 1e-6."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_parts import PROBLEM, config, flat, last_gradients
from torch import Tensor
from torch.testing import assert_close

from grpo.common.metrics import TRL_NAMES, mlflow_names
from grpo.common.records import Completion, Rollout
from grpo.learner.advantages import normalize_within_groups
from grpo.learner.learner import Learner
from grpo.learner.masking import response_weights
from grpo.learner.microbatches import Microbatch
from grpo.learner.mismatch import importance_weights
from grpo.study.methods import OBJECTIVES
from grpo.tasks.rewards import soft_overlong_punishment

pytestmark = pytest.mark.adapters

LENGTHS = torch.tensor([6, 2, 4, 1])
MASK = torch.arange(6) < LENGTHS[:, None]
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(4, 6, 9, generator=GENERATOR).double(), torch.randint(9, (4, 6), generator=GENERATOR)
ADVANTAGES = torch.tensor([1.5, -0.5, 0.75, -1.0]).double()


def computed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (4, 6)."""
    distribution = logits.log_softmax(-1)
    return distribution.gather(-1, LABELS[..., None])[..., 0], -(distribution.exp() * distribution).sum(-1)


NOW = computed(LOGITS)[0]
OLD, ENGINE, REFERENCE = (NOW + torch.empty(4, 6).uniform_(-0.5, 0.5, generator=GENERATOR).double() for _ in range(3))


def ours(model: Any, old: Tensor = OLD, **settings: Any) -> tuple[Tensor, Tensor, float]:
    """The learner's loss of the batch, its gradient at the logits, and its share of clipped tokens."""
    values = {"rollout_batch_size": 4, "train_batch_size": 4, "group_size": 2, "sampling_max_tokens": 8}
    learner = Learner(model, config(**values | settings), 0)
    logits = LOGITS.clone().requires_grad_()
    log_probs, entropy = (torch.where(MASK, x, 0.0) for x in computed(logits))
    micro = Microbatch([0, 1, 2, 3], log_probs, MASK, entropy, MASK.flatten().nonzero()[:, 0])
    weights = response_weights(LENGTHS, learner.config.length_normalization, 4, 4, 8)
    batch = {
        "old_log_probs": old,
        "engine_log_probs": ENGINE,
        "reference_log_probs": REFERENCE,
        "advantages": ADVANTAGES[:, None],
        "raw_rewards": ADVANTAGES[:, None],
        "groups": torch.tensor([[0], [0], [1], [1]]),
        "weights": weights[:, None].double(),
    }
    names = ("loss", "tokens", "token_entropy", "clip_fraction", "ratio_mean", "mismatch_mean", "mismatch_above", "mismatch_kl")
    totals = {n: torch.zeros((), dtype=torch.float64) for n in (*names, "importance_mean", "importance_capped", "kl_loss")}
    learner._backward(
        batch,
        (int(LENGTHS.sum()), 4),
        micro,
        totals,
        {n: torch.zeros(()).double() for n in ("ratio_min", "ratio_max", "mismatch_max")},
    )
    assert logits.grad is not None
    return totals["loss"], logits.grad, (totals["clip_fraction"] / totals["tokens"]).item()


def of_trl(loss_type: str, level: str = "token", old: Tensor = OLD, **settings: Any) -> tuple[Tensor, Tensor, float | None]:
    """The same by ``GRPOTrainer._compute_loss``, where only the forward pass is replaced."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logits = LOGITS.clone().requires_grad_()
    corrected = settings.pop("use_bias_correction_kl", False)
    args = {"delta": None, "use_bias_correction_kl": corrected, "steps_per_generation": 1}
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
    )
    values = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "use_vllm": "importance_sampling_ratio" in settings,
    }
    ratio = settings.pop("importance_sampling_ratio", None)
    values |= settings
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *a, **k: (*computed(logits), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        max_completion_length=8,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=values["entropy_coef"] != 0.0,
        args=SimpleNamespace(**args),
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **values,
    )
    inputs = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": LABELS,
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": old,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": LENGTHS.sum(),
        "importance_sampling_ratio": ratio,
    }
    loss = GRPOTrainer._compute_loss(trainer, SimpleNamespace(training=True), inputs)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad, next(iter(trainer._metrics["train"].get("clip_ratio/region_mean", [])), None)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({"loss_type": "grpo_clip"}, {"loss_type": "grpo"}),
    "Dr. GRPO": ({"loss_type": "grpo_clip", "length_normalization": "masked_normalize"}, {"loss_type": "dr_grpo"}),
    "bnpo": ({"loss_type": "grpo_clip", "length_normalization": "token_mean"}, {"loss_type": "bnpo"}),
    "DAPO": (
        {"loss_type": "grpo_clip", "length_normalization": "token_mean", "cliprange_high": 0.28},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "GSPO": (
        {"loss_type": "gspo", "cliprange": 0.05, "cliprange_high": 0.1},
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    "CISPO": (  # TRL's is the largest weight itself
        {"loss_type": "cispo", "length_normalization": "token_mean", "cliprange_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "KL": ({"loss_type": "grpo_clip", "kl_coefficient": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "GSPO with KL": ({"loss_type": "gspo", "kl_coefficient": 0.3}, {"loss_type": "grpo", "level": "sequence", "beta": 0.3}),
    "entropy bonus": ({"loss_type": "grpo_clip", "entropy_coefficient": 0.1}, {"loss_type": "grpo", "entropy_coef": 0.1}),
    "truncated importance sampling": (
        {"loss_type": "grpo_clip", "importance_cap": 1.2, "kl_coefficient": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "importance_sampling_ratio": importance_weights(OLD, ENGINE, 1.2)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_trls(model: Any, case: str) -> None:
    here, there = CASES[case]
    (loss, gradient, clipped), (expected, of_expected, region) = ours(model, **here), of_trl(**there)
    assert of_expected.norm() > 0.01
    assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert_close(gradient, of_expected, rtol=1e-6, atol=1e-6)
    plain = of_trl("grpo")[1]
    assert case == "GRPO" or (gradient - plain).norm() > 1e-3  # each setting counts
    # The share of clipped tokens has TRL's name where it is TRL's number.
    named = "clip_ratio/region_mean" in mlflow_names("clip_fraction", here["loss_type"])
    assert clipped > 0 and named == (clipped == pytest.approx(region, rel=1e-6) if region is not None else False)


def test_on_policy_the_kl_term_of_trls_default_has_the_gradient_of_naive(model: Any) -> None:
    of_naive = ours(model, old=NOW, loss_type="grpo_clip", kl_coefficient=0.3, kl_estimator="naive")[1]
    theirs, without = (of_trl("grpo", old=NOW, beta=0.3, use_bias_correction_kl=corrected)[1] for corrected in (True, False))
    assert_close(of_naive, theirs, rtol=1e-6, atol=1e-6)
    assert (theirs - without).norm() > 1e-3


REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5]  # of three groups of four
RLOO = OBJECTIVES["rloo"]


def test_rloo_on_policy_is_trls(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Advantages, and the gradient at the weights, of responses that TRL's trainer sampled.

    Where old and new policy are one, its ratio of a whole response has the gradient of the response's log-probability. Ours
    divides the sum over a response by ``sampling_max_tokens``, a constant.
    """
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import RLOOConfig, RLOOTrainer

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    learner = Learner(copy.deepcopy(model), config(**RLOO, rollout_batch_size=12, train_batch_size=12), tokenizer.pad_token_id)
    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "beta": 0.0}
    sizes = {"num_generations": 4, "per_device_train_batch_size": 12, "max_completion_length": 16}
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: REWARDS,
        args=RLOOConfig(output_dir=str(tmp_path), **sizes, **settings),
        train_dataset=Dataset.from_dict({"prompt": ["How many are 1 and 2?", "And 4?", "And 3 and 2?"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer"),
    )
    sampled = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    advantages = normalize_within_groups(torch.tensor(REWARDS), 4, 1e-6, learner.config.use_std_normalization, "leave_one_out")
    assert_close(advantages, sampled["advantages"], rtol=1e-6, atol=1e-6)

    sides = [
        [ids[mask.bool()].tolist() for ids, mask in zip(sampled[f"{side}_ids"], sampled[f"{side}_mask"], strict=True)]
        for side in ("prompt", "completion")
    ]
    rollouts = [
        Rollout(
            PROBLEM,
            tuple(prompt),
            Completion(tuple(ids), "", (0.0,) * len(ids), "length"),
            {"reward": reward},
            advantage=advantage,
        )
        for prompt, ids, reward, advantage in zip(*sides, REWARDS, advantages.tolist(), strict=True)
    ]
    gradients = last_gradients(learner)
    learner.update(rollouts)
    trainer.compute_loss(trainer.model, sampled).backward()
    expected = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys() and flat(expected).norm() > 0.01
    assert_close(flat(gradients), flat(expected) / 16, rtol=1e-6, atol=1e-6)


def test_overlong_punishment_is_trls() -> None:
    from trl.rewards import get_soft_overlong_punishment

    expected = get_soft_overlong_punishment(max_completion_len=16, soft_punish_cache=5)([[0] * n for n in range(20)])
    assert [soft_overlong_punishment(n, max_tokens=16, buffer=5) for n in range(20)] == pytest.approx(expected, abs=1e-6)


def test_metrics_have_names_that_trl_logs() -> None:
    from transformers import Trainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    logged = inspect.getsource(GRPOTrainer)
    own = {name.removeprefix("eval_") for name in TRL_NAMES.values()} - {"grad_norm"}
    assert [name for name in sorted(own) if f'"{name}"]' not in logged] == []
    assert 'logs["grad_norm"]' in inspect.getsource(Trainer)
