"""What test_processes computes: in one process when imported; under torchrun in several, each with all weights or a share."""

import copy
import hashlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from learner_parts import config, rollouts_of
from model_parts import SMALLER, own_model, tiny_model
from torch import Tensor
from training_parts import scored

from grpo.common.world import ALONE, World, init_world
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.learner.optimizer import MOMENTS
from grpo.models.sharding import gather, weights_of, whole_model
from grpo.models.tokenizer import train_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import LearnerSettings
from grpo.training.state import copy_to_cpu

UPDATES = 3
LENGTHS = [[5, 1, 9, 3], [2, 2, 0, 1], [12, 7, 1, 4]]
# AdamW's first step divides a gradient by its own size, so where a gradient is near 0 another order of sums can turn a weight's
# step around: with the default epsilon float32's own error of 1e-5 becomes 4e-3 in the next gradient (against float64).
BATCH = {"rollout_batch_size": 12, "train_batch_size": 12, "gradient_accumulation_steps": 4, "learning_rate": 1e-2}
BATCH |= {"adam_epsilon": 1e-3}
TOKENIZER = train_tokenizer(["Mia has 3 apples."], vocab_size=257)
VOCABULARY = 320  # the tokenizer's, and more
LARGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "tie_word_embeddings": False}


def qwen2(**changes: Any) -> Any:
    return tiny_model(vocab_size=VOCABULARY, **SMALLER | changes)


def recomputed() -> Any:
    model = qwen2()
    model.gradient_checkpointing_enable()
    return model


def own(**changes: Any) -> Any:
    return own_model(VOCABULARY, **SMALLER | changes)


GSPO = {"loss_type": "gspo", "length_normalization": "token_mean", "entropy_coefficient": 0.1}
LONGEST = {"loss_type": "reinforce_with_baseline", "length_normalization": "microbatch_longest"}
# By name the model, the budget of a microbatch, and what is set.
CASES: dict[str, tuple[Any, int | None, dict[str, Any]]] = {
    "padded": (qwen2, None, {}),
    "packed": (qwen2, 20, {}),
    "one row": (qwen2, 500, {}),
    "own": (lambda: own(tie_word_embeddings=False), 20, {}),
    "untied": (lambda: qwen2(**LARGE), 20, {}),
    "scaled logits": (lambda: tiny_model("granite", VOCABULARY, **SMALLER, logits_scaling=2.0), None, {}),
    "recomputed": (recomputed, 20, {}),
    "bfloat16": (lambda: qwen2().bfloat16(), 20, {}),
    "float16": (lambda: qwen2().half(), 20, {}),
    "clipped": (qwen2, 20, {"max_grad_norm": 0.1}),
    "GSPO": (own, 20, GSPO),
    "GSPO, padded": (own, None, GSPO),
    "GSPO, padded by budget": (own, 20, GSPO),
    "longest": (own, 20, LONGEST),
    "longest, padded": (own, None, LONGEST),
}


def compute(case: str, world: World = ALONE, shard_on: str | None = None) -> dict[str, Any]:
    """What a learner's methods give in some updates."""
    make_model, budget, changes = CASES[case]
    settings = config(**BATCH, **{"loss_type": "grpo_clip", "kl_coefficient": 0.1} | changes)
    model = make_model()
    engine = TransformersEngine(copy.deepcopy(model), TOKENIZER, world=world)
    sharded = {"device": shard_on, "processes": max(2, world.size), "fully_shard": True} if shard_on else {}
    how = LearnerSettings(max_tokens_per_microbatch=budget, packing="by budget" not in case, **sharded)
    learner = Learner(model, settings, 0, how, world)
    gradients = gradients_of_steps(learner)
    rollouts = rollouts_of(LENGTHS, [7, 1, 4], VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"gradients": gradients}
    found["metrics"] = [learner.sft_update(texts_of(rollouts), normalize_constant=7.0)]
    for rollout, log_probs in zip(rollouts, learner.reference_log_probs(rollouts), strict=True):
        rollout.reference_log_probs = log_probs
    found["first log_probs"], found["entropies"] = torch.cat(learner.log_probs(rollouts)), learner.token_entropies(rollouts)
    with torch.no_grad():  # else a process without a share waits for the backward pass of the others
        found["microbatches"] = sum(1 for _ in learner._microbatches(learner.model, texts_of(rollouts)))
    for _ in range(UPDATES):
        rewards, advantages = torch.rand(12, generator=generator), torch.randn(12, generator=generator)
        # Each process has its own extremes.
        old = [log_probs - 0.3 - 0.01 * place for place, log_probs in enumerate(learner.log_probs(rollouts))]
        found["metrics"].append(learner.update(scored(rollouts, rewards, advantages, old)))
    found["log_probs"] = torch.cat(learner.log_probs(rollouts))
    found["reference"] = torch.cat(learner.reference_log_probs(rollouts))
    found["weights"] = {name: weight.clone() for name, weight in weights_of(learner.model)}
    engine.synchronize(learner.model, policy_version=1)
    groups = engine.generate([[5, 6], [7], [8, 9, 10]], SamplingParams(max_tokens=6), n=2, seed=0)
    found["sampled"] = [one.token_ids for group in world.join(groups) for one in group]
    found["checkpoint"] = saved(whole_model(learner.model, keep=world.rank == 0))
    optimizer = learner.optimizer
    moments = [of_weight[name] for of_weight in optimizer.adamw.state.values() for name in MOMENTS]
    found["bytes"] = sum(map(held, [*optimizer.weights, *moments]))
    found["bytes of the model"] = sum(map(held, learner.model.parameters()))
    found["state"] = copy_to_cpu(learner.state())
    # Another learner goes on from the state as this one does.
    other = Learner(make_model(), settings, 0, how, world)
    other.restore(found["state"])
    for each in (learner, other):
        each.sft_update(texts_of(rollouts))
    after, resumed = (dict(weights_of(each.model)) for each in (learner, other))
    found["resumed"] = all(torch.equal(after[name], weight) for name, weight in resumed.items())
    return found


def saved(model: Any) -> dict[str, str]:
    """By file the SHA-256 of what the model is as a checkpoint."""
    if model is None:
        return {}
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def gradients_of_steps(learner: Learner) -> list[Tensor]:
    """Of each step that follows the gradients, clipped, in one vector."""
    seen: list[Tensor] = []
    take_step = learner.optimizer.adamw.step

    def keep_and_take_step() -> None:
        seen.append(torch.cat([gather(gradient).flatten() for gradient in learner.optimizer.gradients()]))
        take_step()

    learner.optimizer.adamw.step = keep_and_take_step
    return seen


def held(tensor: Any) -> int:
    """Bytes of it in this process."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    size: int = local.numel() * local.element_size()
    return size


if __name__ == "__main__":
    this_world = init_world("cpu")
    place, what, *cases = sys.argv[1:]
    ways = {"both": (None, "cpu"), "all weights": (None,), "shares": ("cpu",)}[what]
    done = {case: {way: compute(case, this_world, way) for way in ways} for case in cases}
    torch.save(done, Path(place) / f"{this_world.rank}.pt")
    this_world.destroy()
