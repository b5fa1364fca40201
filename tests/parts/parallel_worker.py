"""What test_processes computes with whole weights: in one process when imported, in several under torchrun when run."""

import sys
from pathlib import Path
from typing import Any

import torch
from learner_parts import config, flat, last_gradients, rollouts_of
from model_parts import SMALLER, own_model
from training_parts import scored

from grpo.common.world import ALONE, World, init_world
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.study.settings import LearnerSettings

LENGTHS = [[5, 1, 9, 3], [2, 2, 0, 1], [12, 7, 1, 4]]
VOCABULARY = 50
BATCH = {"rollout_batch_size": 12, "train_batch_size": 12, "gradient_accumulation_steps": 4, "learning_rate": 1e-2}


def make_model() -> Any:
    return own_model(vocab_size=VOCABULARY, **SMALLER)


def compute(world: World = ALONE) -> dict[str, Any]:
    """What the learner's methods give, with the work shared over ``world``."""
    rollouts = rollouts_of(LENGTHS, [7, 1, 4], VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    rewards, advantages = torch.rand(12, generator=generator), torch.randn(12, generator=generator)
    found: dict[str, Any] = {"metrics": {}, "gradients": {}}
    for budget, packing in ((None, True), (20, False), (20, True)):
        cases = (
            ("grpo_clip", "masked_mean"),
            ("reinforce_with_baseline", "microbatch_longest"),
            ("gspo", "token_mean"),  # with KL and entropy in the loss
        )
        for loss, normalization in cases:
            model = make_model()
            learner = make_learner(model, budget, packing, loss, normalization, world)
            gradients = last_gradients(learner)
            current = learner.log_probs(rollouts)
            old = [lp - 0.3 - 0.01 * place for place, lp in enumerate(current)]  # each process has its own extremes
            if loss == "gspo":
                found["reference"] = learner.reference_log_probs(rollouts)
            for place, rollout in enumerate(rollouts):
                rollout.reference_log_probs = found["reference"][place] - 0.2 if loss == "gspo" else None
            case = f"{loss}, {normalization}, {budget}{' packed' if packing else ''}"
            found["metrics"][case] = learner.update(scored(rollouts, rewards, advantages, old))
            found["gradients"][case] = flat(gradients)
            found["metrics"][f"sft {case}"] = learner.sft_update(texts_of(rollouts), normalize_constant=7.0)
            found["gradients"][f"sft {case}"] = flat(gradients)
            found["log_probs"] = learner.log_probs(rollouts)
            found["entropies"] = learner.token_entropies(rollouts)
            found["rows_of_one"] = sum(1 for _ in learner._microbatches(model, texts_of(rollouts)))
            found["weights"] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found


def make_learner(model: Any, budget: int | None, packing: bool, loss: str, normalization: str, world: World) -> Learner:
    settings = config(
        **BATCH,
        loss_type=loss,
        length_normalization=normalization,
        kl_coefficient=0.3 if loss == "gspo" else 0.0,
        entropy_coefficient=0.1 if loss == "gspo" else 0.0,
    )
    return Learner(model, settings, 0, LearnerSettings(max_tokens_per_microbatch=budget, packing=packing), world=world)


if __name__ == "__main__":
    this_world = init_world("cpu")
    torch.save(compute(this_world), Path(sys.argv[1]) / f"{this_world.rank}.pt")
    this_world.destroy()
