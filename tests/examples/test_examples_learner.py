"""The examples of a loss, an advantage and a reward of one's own: their numbers by hand, and each in a run from params.yaml to
results."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from study_parts import values_of
from torch.testing import assert_close
from training_parts import make_project, read_csv

from grpo.common.imports import import_object
from grpo.learner.losses import LossInputs
from grpo.study import paths
from grpo.study.schema import load_study
from grpo.study.training_inputs import write_training_inputs

ROOT = Path(__file__).parents[2]
ARM: dict[str, Any] = {
    "learning_rate": 1e-3,
    "rollout_batch_size": 64,
    "train_batch_size": 32,
    "group_size": 16,
    "n_grpo_steps": 4,
    "sampling_max_tokens": 12,
    "sampling_min_tokens": 0,
    "prompt": "question_only",
    "gradient_accumulation_steps": 2,
    "reward": "short_answers:short_answers",
}
Train = Callable[..., None]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples lie in the study's folder."""
    monkeypatch.syspath_prepend(ROOT / "examples")


@pytest.fixture
def train(grpo: Any, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`grpo train` of one arm on a tiny model."""
    with torch.no_grad():  # a random model hardly ever ends a response; now one token in four does
        hidden = model.model(torch.arange(1, 201)[None]).last_hidden_state[0].mean(0)
        model.get_output_embeddings().weight[tokenizer.eos_token_id] += 4.0 * hidden / hidden.square().sum()
    make_project(monkeypatch, tmp_path, model, tokenizer)

    def train_arm(arm: str, **values: Any) -> None:
        study = values_of("smoke")
        study["evaluation"] |= {"every": 2, "problems": 6, "max_tokens": 12}
        study["experiments"]["grpo_learning_rate"]["arms"] = {arm: ARM | values}
        (tmp_path / "params.yaml").write_text(json.dumps(study))
        code, _, error = grpo("train", "grpo_learning_rate", arm, "--seed", "0")
        assert code == 0, error

    return train_arm


def rows(arm: str) -> list[dict[str, float]]:
    return read_csv(paths.RUNS / f"grpo_learning_rate/{arm}/0/history.csv")


def weights(arm: str) -> bytes:
    return (paths.CHECKPOINTS / f"grpo_learning_rate/{arm}/0/last/model.safetensors").read_bytes()


def inputs(ratios: list[float], advantage: float) -> LossInputs:
    old = torch.full((1, len(ratios)), -2.0)
    of_response = torch.tensor([[advantage]])
    return LossInputs(old + torch.tensor([ratios]).log(), old, of_response, of_response, torch.ones_like(old).bool(), 0.2)


def test_the_asymmetric_clip_by_hand() -> None:
    """With eps_low = 0.2 and eps_high = 0.5: what is good may rise to 1.5, what is bad may fall to 0.8."""
    clip_higher = import_object("clip_higher:clip_higher")
    loss, metrics = clip_higher(inputs([1.0, 1.4, 1.6, 0.5], 2.0), clip_high=0.5)
    assert_close(loss, torch.tensor([[-2.0, -2.8, -3.0, -1.0]]))
    assert metrics["clipped"].tolist() == metrics["clipped_above"].tolist() == [[False, False, True, False]]
    loss, metrics = clip_higher(inputs([1.0, 1.4, 1.6, 0.5], -2.0), clip_high=0.5)
    assert_close(loss, torch.tensor([[2.0, 2.8, 3.2, 1.6]]))
    assert metrics["clipped"].tolist() == [[False, False, False, True]] and not metrics["clipped_above"].any()


def test_published_losses_by_hand() -> None:
    """SAPO: at a ratio of 1 half of 4 / tau; sigmoid(2 ln 3) = 0.9. Two-sided: above 4 a ratio counts as 4 if it is bad."""
    sapo, two_sided_clip = (import_object(f"published_losses:{name}") for name in ("sapo", "two_sided_clip"))
    assert_close(sapo(inputs([1.0, 1.0 + math.log(9)], 3.0))[0], torch.tensor([[-6.0, -10.8]]))
    assert_close(sapo(inputs([1.0 + math.log(9) / 2], -3.0), temperature_negative=2.0)[0], torch.tensor([[5.4]]))
    assert_close(two_sided_clip(inputs([3.0, 9.0, 0.5], 1.0), delta=4.0)[0], torch.tensor([[-1.2, -1.2, -0.5]]))
    loss, metrics = two_sided_clip(inputs([3.0, 9.0, 0.5], -2.0), delta=4.0)
    assert_close(loss, torch.tensor([[6.0, 8.0, 1.6]]))
    assert metrics["clipped"].tolist() == [[False, False, True]]


def test_a_study_trains_with_a_loss_of_its_own(train: Train) -> None:
    """With both bounds alike it trains as `grpo_clip`, to the last bit; with a wider upper one otherwise."""
    off_policy = {"epochs_per_rollout_batch": 3, "learning_rate": 1e-2, "n_grpo_steps": 2}
    own = {"loss_type": "clip_higher:clip_higher"}
    train("symmetric", **off_policy, loss_type="grpo_clip")
    train("equal", **off_policy, **own, loss_options={"clip_high": 0.2})
    train("higher", **off_policy, **own, loss_options={"clip_high": 2.0})
    assert weights("equal") == weights("symmetric") != weights("higher")
    assert [{k: v for k, v in row.items() if k != "clipped_above"} for row in rows("equal")] == rows("symmetric")
    equal, higher = ([row["clipped_above"] for row in rows(arm)[:6]] for arm in ("equal", "higher"))  # of the first step
    assert sum(higher) < sum(equal)


def test_a_study_outside_the_repository_trains_with_the_advantage_of_the_docs(train: Train, tmp_path: Path) -> None:
    """With weight 0 it is the reward minus the group's mean."""
    (code,) = re.findall(
        r"^```python\n# studies/my_advantages.py\n(.*?)^```$", (ROOT / "docs/extending.md").read_text(), re.M | re.S
    )
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/my_advantages.py").write_text(code)
    train("ours", use_std_normalization=False, n_grpo_steps=2)
    train("equal", advantage="my_advantages:shorter_first", advantage_options={"weight": 0.0}, n_grpo_steps=2)
    losses = {arm: [row["loss"] for row in rows(arm)] for arm in ("ours", "equal")}
    assert losses["equal"] == pytest.approx(losses["ours"], rel=1e-4)
    write_training_inputs(load_study())
    inputs = json.loads((paths.TRAINING_INPUTS / "grpo_learning_rate.json").read_text())
    assert "my_advantages.py" in inputs["own_code"]


def test_a_study_trains_with_a_reward_of_its_own(train: Train) -> None:
    """All answers of the tiny model are wrong, and it learns not to make them long."""
    short_answers = import_object("short_answers:short_answers")
    lengths, right = [2, 4, 6, 2, 6, 3, 3], [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    found = short_answers(["a"] * 5 + ["b"] * 2, [[7] * n for n in lengths], right, question=["?"] * 7)
    assert found == pytest.approx([1.1, 1.0, 0.9, 0.0, -0.1, 1.0, 0.0])  # a fifth of .5, 0, -.5; 0, -.5; and 0
    train("short")
    history = rows("short")
    assert history[0]["train/reward"] < 0.0 and all(row["train/answer_reward"] == 0.0 for row in history)
    assert history[0]["train/response_length"] > 2 * history[-1]["train/response_length"]
