"""How a batch is cut into padded microbatches; that the gradient does not depend on it is in test_gradients.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_parts import tiny_model

from grpo.learner.learner import Learner
from grpo.learner.microbatches import neighbours, of_like_length, whole_texts
from grpo.study.methods import GrpoConfig
from grpo.study.settings import LearnerSettings


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=20),
    budget=st.integers(1, 80),
)
def test_every_response_is_padded_once_and_microbatches_keep_to_the_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    prompts, responses = [(1,) * p for p, _ in sizes], [(2,) * n for _, n in sizes]
    parts = of_like_length(prompts, responses, budget)
    assert sorted(i for part in parts for i in part) == [i for i, (_, n) in enumerate(sizes) if n]
    inputs = [[sum(sizes[i]) - 1 for i in part] for part in parts]
    assert all(len(part) * max(part) <= budget or len(part) == 1 for part in inputs)
    assert (flat := [n for part in inputs for n in part]) == sorted(flat, reverse=True)
    assert all((len(part) + 1) * max(part) > budget for part in inputs[:-1])  # no room is left


def test_microbatches_by_hand() -> None:
    prompts, responses = [(1,) * 4] * 6, [(2,) * n for n in (3, 9, 1, 0, 4, 3)]
    assert of_like_length(prompts, responses, 15) == [[1], [4, 0], [5, 2]]  # of 12, 7 and 6, 6 and 4 tokens
    assert neighbours(5, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("kind", "packing", "packs"), [("qwen2", True, True), ("qwen2", False, False), ("mistral", True, False)]
)
def test_a_study_says_how_and_a_model_that_cannot_share_prompts_keeps_to_the_budget(
    kind: str, packing: bool, packs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of 5 tokens and responses of 6: four times ten tokens, or seven responses behind one prompt."""
    config = GrpoConfig(rollout_batch_size=8, train_batch_size=8, group_size=8, gradient_accumulation_steps=1)
    settings = LearnerSettings(max_tokens_per_microbatch=40, packing=packing)
    learner = Learner(tiny_model(kind), config, 0, settings)
    found = learner._microbatches(learner.model, whole_texts([(1, 2, 3, 4, 5)] * 8, [(7, 8, 9, 7, 8, i) for i in range(8)]))
    assert learner.packs == packs
    assert [len(micro.members) for micro in found] == ([7, 1] if packs else [4, 4])
    why = (
        "learner: padded microbatches of 40 tokens, not packed rows: NotImplementedError: its attention takes sliding_window\n"
    )
    assert capsys.readouterr().out == (why if packing and not packs else "")
