"""Episodes of several turns through Ray's actors and the replay buffer."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import asynchronous_parts as parts
import pytest
import torch
from asynchronous_parts import CONFIG, asynchronous, make_generator, make_learner
from environment_parts import Talk
from model_parts import own_model
from training_parts import problems, train
from transformers import AutoModelForCausalLM

from grpo.learner.learner import Learner
from grpo.models.checkpoint import save_checkpoint
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.methods import GrpoConfig
from grpo.tasks.environment import Environment
from grpo.tasks.task import Format
from grpo.training.grpo import train_grpo

pytestmark = pytest.mark.usefixtures("actors_find_the_parts", "on_the_cluster")
THREE_TURNS = Format("{question}\n", stop=("a", "e"), environment=Environment("environment_parts:Talk", max_turns=3))
SHORT = CONFIG.model_copy(update={"n_grpo_steps": 4, "sampling_max_tokens": 60})


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return own_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


@pytest.fixture
def folder(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", model, tokenizer)
    return tmp_path / "model"


def with_actors(config: GrpoConfig, folder: Path, target: Path) -> dict[str, Any]:
    """Train; the learner's state at the end."""
    make = partial(make_generator, folder), partial(make_learner, folder, config)
    return parts.run(config, *make, target, format=THREE_TURNS)[1]


def test_without_lag_the_weights_are_those_of_the_synchronous_loop(
    folder: Path, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    config, own = SHORT.model_copy(update={"epochs_per_rollout_batch": 2}), copy.deepcopy(model)
    learner, engine = Learner(own, config, tokenizer.pad_token_id), TransformersEngine(own, tokenizer)
    given = {"data": problems(10), "format": THREE_TURNS, "learner": learner, "engine": engine}
    train(train_grpo, config, own, tokenizer, tmp_path / "synchronous", **given)
    found = with_actors(asynchronous(config, max_policy_lag=0), folder, tmp_path / "asynchronous")
    expected = learner.model.state_dict()
    assert all(torch.equal(found["model"][name], value) for name, value in expected.items())
    assert not all(torch.equal(value, model.state_dict()[name]) for name, value in expected.items())


def test_the_buffer_keeps_what_was_sampled_and_what_was_read(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """In the state after step 3: the batch of step 2, sampled with the first weights, which transformers has too."""
    with_actors(asynchronous(SHORT, max_policy_lag=1, replay_capacity=2), folder, tmp_path / "run")
    state = torch.load(tmp_path / "run/state/step-3/state.pt", weights_only=True)
    first = [group for group in state["loop"]["buffer"][0] if group.version == 0]
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert len(first) == SHORT.n_prompts_per_rollout_batch
    seen = set()
    for rollout in (rollout for group in first for rollout in group.rollouts):
        completion, start = rollout.completion, len(rollout.prompt_ids)
        ids = torch.tensor([*rollout.prompt_ids, *completion.token_ids])
        with torch.no_grad():
            each = torch.log_softmax(reference(ids[None]).logits[0, :-1], dim=-1).gather(-1, ids[1:, None])[start - 1 :, 0]
        read = {place for span in completion.observations for place in range(*span)}
        sampled = [place for place in range(len(completion.token_ids)) if place not in read]
        assert torch.allclose(each[sampled], torch.tensor(completion.log_probs), atol=1e-4)
        environment, said = Talk(), [text for role, text in completion.episode.messages if role == "assistant"]
        environment.reset("")
        written = [tokenizer.decode(completion.token_ids[slice(*span)]) for span in completion.observations]
        assert written == [environment.step(text) for text in said[: len(written)]]
        seen.add(len(written))
    assert 2 in seen
