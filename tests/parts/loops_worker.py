"""What test_several_processes trains: in one process when imported, in several under torchrun when run."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from model_parts import SMALLER, own_model
from training_parts import NoMlflow, context, monitored, problems

from grpo.common.errors import ToBeResumed
from grpo.common.records import Example
from grpo.common.world import World, init_world
from grpo.learner.learner import Learner
from grpo.models.tokenizer import train_tokenizer
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import ExpertIterationConfig, GrpoConfig, LearnerSettings, SftConfig
from grpo.study.schema import load_study
from grpo.tracking.run_log import RunLog
from grpo.training.expert_iteration import train_by_expert_iteration
from grpo.training.grpo import train_grpo
from grpo.training.sft import train_sft
from grpo.training.state import RandomStates, SavedState

STUDY = load_study(Path(__file__).parents[2] / "studies" / "mini.yaml")
TOKENIZER = train_tokenizer(["Mia has 3 apples."], vocab_size=257)
EXAMPLES = [Example(f"Tom has {i} pears", " or" * (1 + i % 3) + f" {i}.", "", 1.0) for i in range(7)]
EACH = {"learning_rate": 1e-3, "prompt": "question_only"}
SAMPLING = EACH | {"group_size": 4, "sampling_max_tokens": 8, "sampling_min_tokens": 1}
# Five questions, which no number of processes divides; two updates an epoch, the second off-policy.
GRPO = GrpoConfig(
    n_grpo_steps=3,
    rollout_batch_size=20,
    train_batch_size=10,
    gradient_accumulation_steps=5,
    epochs_per_rollout_batch=2,
    **SAMPLING,
)
EXPERT = ExpertIterationConfig(
    n_ei_steps=2, ei_batch_size=5, train_batch_size=6, gradient_accumulation_steps=3, epochs_per_ei_step=2, **SAMPLING
)
SFT = SftConfig(n_sft_steps=3, evaluate_every=2, train_batch_size=5, gradient_accumulation_steps=5, **EACH)
CASES: dict[str, Any] = {
    **{loss: (train_grpo, GRPO.model_copy(update={"loss_type": loss})) for loss in ("reinforce_with_baseline", "grpo_clip")},
    "microbatch_longest": (train_grpo, GRPO.model_copy(update={"length_normalization": "microbatch_longest"})),
    "dynamic sampling": (train_grpo, GRPO.model_copy(update={"dynamic_sampling_rounds": 2, "warmup_steps": 3})),
    "expert iteration": (train_by_expert_iteration, EXPERT),
    "sft": (train_sft, SFT),
}
TIMED = GRPO.model_copy(update={"wall_clock_limit_s": 5000.0})


def make_model() -> Any:
    return own_model(
        vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id, **SMALLER
    )


def a_third(response: str, truth: str) -> dict[str, float]:
    """Rewards a third of all responses, and nothing that is soon learnt."""
    right = float(sum(map(ord, response)) % 3 == 0)
    return {"reward": right, "format_reward": 1.0, "answer_reward": right}


def train(
    loop: Callable[[Any], None],
    config: Any,
    world: World,
    folder: Path,
    max_tokens: int | None = None,
    stop_after: int | None = None,
    running_for_s: float = 0.0,
    state: Path | None = None,
) -> dict[str, Any]:
    """Train.

    Args:
        folder: of this process.
        stop_after: this process is told to stop in this step.
        running_for_s: how long it has been running already by its own clock.
        state: all processes' folder of saved states.
    """
    (folder / "checkpoints").mkdir(parents=True)
    model = make_model()
    log = RunLog(folder, NoMlflow(), began=time.perf_counter() - running_for_s)  # type: ignore[arg-type]
    engine = TransformersEngine(model, TOKENIZER, max_batch_size=12, world=world)  # three groups at once
    learner = Learner(model, config, TOKENIZER.pad_token_id, LearnerSettings(max_tokens_per_microbatch=max_tokens), world=world)
    parts: dict[str, Any] = {"learner": learner, "log": log, "random": RandomStates()}
    stopped, checkpoints = False, folder / "checkpoints"
    with SavedState(state or folder / "state", 2, parts, checkpoints, lambda: len(log.times) == stop_after, world) as saved:
        ctx = context(
            config, log, saved, data=EXAMPLES if loop is train_sft else problems(7), engine=engine, learner=learner,
            tokenizer=TOKENIZER, reward=a_third, world=world,
        )  # fmt: skip
        ctx, parts["monitor"] = monitored(ctx, STUDY, problems(5))
        saved.restore()
        engine.synchronize(model, saved.step)
        try:
            loop(ctx)
        except ToBeResumed:
            stopped = True
    return {
        "weights": torch.cat([value.detach().flatten() for value in model.parameters()]),
        "history": log.history,
        "validations": log.validations,
        "stopped": stopped,
        "steps": len(log.times),
        "resumed": saved.step,
    }


def train_all(world: World, folder: Path, budgets: Sequence[int | None] = (None, 40)) -> dict[str, dict[str, Any]]:
    """Each case, padded and packed; a run whose time is up by rank 0's clock, and one by the others'."""
    found = {}
    for name, (loop, config) in CASES.items():
        for max_tokens in budgets:
            found[f"{name}, {max_tokens}"] = train(loop, config, world, folder / name / str(max_tokens), max_tokens)
    for who in (0, 1):
        running_for_s = 9999.0 if min(world.rank, 1) == who else 0.0
        found[f"time of {who}"] = train(train_grpo, TIMED, world, folder / f"time {who}", running_for_s=running_for_s)
    return found


if __name__ == "__main__":
    this_world, (place, what) = init_world("cpu"), sys.argv[1:]
    own = Path(place) / str(this_world.rank)
    done = train_all(this_world, own, (40,) if "packed" in what else (None, 40))
    saved_in = Path(place) / "state"
    if "stop" in what:  # rank 1 is told to stop first, which does not count, then rank 0
        after = 2 if this_world.rank == 0 else 1
        done["stopped"] = train(train_grpo, GRPO, this_world, own / "stopped", stop_after=after, state=saved_in)
    if "resume" in what:
        done["resumed"] = train(train_grpo, GRPO, this_world, own / "resumed", state=saved_in)
    torch.save(done, Path(place) / f"{this_world.rank}.pt")
    this_world.destroy()
