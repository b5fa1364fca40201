"""Supervised fine-tuning: which examples are used, and the updates against plain PyTorch."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training_parts
from model_parts import like_llama3, like_qwen3, put
from study_parts import changed, entry
from torch import Tensor
from training_parts import make_project, read_csv, train

from grpo.common.errors import UserError
from grpo.common.records import Example, write_records
from grpo.learner.learner import Learner
from grpo.learner.microbatches import Texts
from grpo.models.checkpoint import load_model
from grpo.models.tokenizer import Tokenizer
from grpo.study import paths
from grpo.study.effective import EffectiveRun, effective_run
from grpo.study.methods import SftConfig
from grpo.study.schema import Study
from grpo.study.settings import LearnerSettings
from grpo.tasks import formats
from grpo.tasks.task import Format
from grpo.tracking.run_log import RunLog
from grpo.training.data import choose_examples, items_of_step
from grpo.training.sft import train_sft

# ----------------------------------------------------------------------------------------------------- which examples

MANY = [Example(f"prompt {i}", f"response {i}", str(i), float(i % 3 == 0)) for i in range(30)]


def test_the_choice_depends_on_the_seed_only_and_a_smaller_one_is_part_of_a_larger_one() -> None:
    """``random.sample`` uses different algorithms for small and for large samples."""
    many = [Example(f"prompt {i}", "", "", 0.0) for i in range(2000)]
    smallest = {frozenset(many[:30])}
    for seed in range(4):
        chosen = [set(choose_examples(many, SftConfig(examples=n), seed)) for n in (30, 300, 450, 1500)]
        assert [len(examples) for examples in chosen] == [30, 300, 450, 1500]
        assert chosen[0] < chosen[1] < chosen[2] < chosen[3] < set(many) == set(choose_examples(many, SftConfig(), seed))
        assert set(choose_examples(many, SftConfig(examples=30), seed)) == chosen[0]
        smallest.add(frozenset(chosen[0]))
    assert len(smallest) == 5  # of each seed another, and not the first ones of the file


def test_filtered_examples_all_earn_the_reward() -> None:
    right = {example for example in MANY if example.reward == 1.0}
    assert set(choose_examples(MANY, SftConfig(filtered=True), 0)) == right
    some = choose_examples(MANY, SftConfig(filtered=True, examples=4), 0)
    assert len(set(some)) == 4 and set(some) < right
    almost = [Example("p", "r", "1", 0.5), *MANY]
    assert set(choose_examples(almost, SftConfig(filtered=True), 0)) == right


@pytest.mark.parametrize(
    ("examples", "config", "message"),
    [
        (MANY, SftConfig(examples=31), r"sft\.examples: 31 examples are asked for, but .* has 30\. Lower it.*sft_dataset"),
        (MANY, SftConfig(examples=11, filtered=True), r"11 examples with reward 1 .* has 10\. Lower it"),
        ([MANY[1]], SftConfig(filtered=True), r"has 0\. Lower it, or use another `sft_dataset:` in params\.yaml"),
    ],
)
def test_more_examples_than_there_are_is_a_users_error(examples: list[Example], config: SftConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_examples(examples, config, 0)
    choose_examples(MANY, SftConfig(examples=30), 0)  # exactly as many is fine
    choose_examples(MANY, SftConfig(examples=10, filtered=True), 0)


# ------------------------------------------------------------------------------------------------------------ updates

PEOPLE = ("Mia", "Tom", "Ana", "Ben")
THINGS = ("apples", "coins", "books")


def story(i: int) -> Example:
    """Prompts and responses of different lengths."""
    prompt = f"{PEOPLE[i % 4]} has {i} {THINGS[i % 3]}." + " How many?" * (i % 3)
    return Example(prompt, f" {i} + 1 = {i + 1}." * (1 + i % 2), str(i + 1), 1.0)


EXAMPLES = [story(i) for i in range(10)]
CONFIG = SftConfig(
    n_sft_steps=6,
    evaluate_every=2,
    learning_rate=1e-3,
    train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=1e9,
    normalize_constant=3.0,
    prompt="r1_zero",
)


NO_ENGINE = SimpleNamespace()  # nothing is sampled


def fine_tuned(
    model: Any,
    tokenizer: Any,
    folder: Path,
    config: SftConfig = CONFIG,
    examples: Sequence[Example] = EXAMPLES,
    seed: int = 3,
    max_tokens: int | None = None,
) -> tuple[Any, list[dict[str, float]], RunLog]:
    """A trained copy of ``model``, its history, and the run's log."""
    model = copy.deepcopy(model)
    learner = Learner(model, config, tokenizer.pad_token_id, LearnerSettings(max_tokens_per_microbatch=max_tokens))
    given = {"data": examples, "engine": NO_ENGINE, "learner": learner, "seed": seed}
    _, log = train(train_sft, config, model, tokenizer, folder, **given)
    return model, read_csv(folder / "history.csv"), log


def by_plain_torch(model: Any, tokenizer: Any) -> tuple[Any, list[float], list[float]]:
    """The same training in plain PyTorch, one sequence at a time with whole logits: model, losses, gradient norms."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for step in range(1, 7):
        optimizer.zero_grad()
        total = torch.zeros(())
        for example in items_of_step(EXAMPLES, 3, step, 4):
            prompt, response = (tokenizer(text)["input_ids"] for text in (example.prompt, f"{example.response}<|endoftext|>"))
            log_probs = torch.log_softmax(model(torch.tensor([[*prompt, *response]])).logits[0], dim=-1)
            of_response = [log_probs[len(prompt) - 1 + t, token] for t, token in enumerate(response)]
            total = total - torch.stack(of_response).sum() / 3.0
        loss = total / 4
        loss.backward()
        norms.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_updates_are_those_of_plain_torch(model: Any, tokenizer: Any, tmp_path: Path, max_tokens: int | None) -> None:
    trained, history, log = fine_tuned(model, tokenizer, tmp_path / "run", max_tokens=max_tokens)
    expected, losses, norms = by_plain_torch(model, tokenizer)
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=1e-4)
    assert [row["gradient_norm"] for row in history] == pytest.approx(norms, rel=1e-4)
    assert (flat(trained) - flat(expected)).norm() < 1e-3 * (flat(expected) - flat(model)).norm()
    assert [(row["step"], row["update"]) for row in history] == [(step, step) for step in range(1, 7)]
    # Mean negative log-likelihood of a token: the loss without its divisors.
    batches = [items_of_step(EXAMPLES, 3, step, 4) for step in range(1, 7)]
    tokens = [sum(len(tokenizer(example.response)["input_ids"]) + 1 for example in batch) for batch in batches]
    expected_nll = [loss * 3.0 * 4 / n for loss, n in zip(losses, tokens, strict=True)]
    assert [row["mean_nll"] for row in history] == pytest.approx(expected_nll, rel=1e-4)
    speeds = [row["tokens_per_s"] * row["training_s"] for row in log.times]
    assert speeds == pytest.approx(tokens)


def flat(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# ------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture
def project(mini_study: Study, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A project folder with base model, problems and examples, and a study of a few steps."""
    make_project(monkeypatch, tmp_path, model, tokenizer)
    write_records(paths.sft_examples("main"), [*EXAMPLES, Example("wrong", " x", "1", 0.0)])
    sizes = {"n_grpo_steps": 1, "rollout_batch_size": 8, "train_batch_size": 8, "group_size": 4}
    arms = {
        "sft_experiment": {"all": {"keep_steps": [1, 2]}, "filtered": {"filtered": True}},
        "grpo_sft_initialization": {"base": {}, "early": {"start_from": "sft_experiment/all/step-2"}},
    }
    return changed(
        mini_study,
        seeds=[0],
        threads=1,
        sft=CONFIG.model_copy(update={"n_sft_steps": 3, "evaluate_every": 2, "prompt": "question_only"}),
        grpo=training_parts.CONFIG.model_copy(update=sizes),
        evaluation={"problems": 4, "max_tokens": 6},
        experiments=mini_study.experiments | {name: entry(name, arms=of) for name, of in arms.items()},
    )


def test_grpo_starts_from_the_weights_that_fine_tuning_kept(project: Study, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from grpo.training.run import train_run

    def train(experiment: str, arm: str) -> EffectiveRun:
        run = effective_run(project, experiment, arm, 0, [])
        train_run(project, run)
        return run

    with pytest.raises(UserError, match=r"sft_experiment/all/0/step-2"):
        train("grpo_sft_initialization", "early")
    run = train("sft_experiment", "all")
    folder = paths.CHECKPOINTS / run.name
    assert sorted(path.name for path in folder.iterdir()) == ["best", "last", "step-1", "step-2"]
    about = json.loads((folder / "step-1/metadata.json").read_text())
    assert {"run": "sft_experiment/all/0", "kind": "step-1", "step": 1, "update": 1}.items() <= about.items()
    one_step, _, _ = fine_tuned(
        model, tokenizer, tmp_path / "one", CONFIG.model_copy(update={"n_sft_steps": 1}),
        choose_examples([*EXAMPLES, Example("wrong", " x", "1", 0.0)], project.sft, 0), seed=0,
        max_tokens=project.learner.max_tokens_per_microbatch,
    )  # fmt: skip
    assert torch.equal(flat(load_model(folder / "step-1")), flat(one_step))
    assert json.loads((paths.RUNS / run.name / "metrics.json").read_text())["examples"] == 11
    filtered = train("sft_experiment", "filtered")
    assert json.loads((paths.RUNS / filtered.name / "metrics.json").read_text())["examples"] == 10

    started = {arm: train("grpo_sft_initialization", arm) for arm in ("base", "early")}
    for arm, source in (("early", str(folder / "step-2")), ("base", "pretrained by the study (data/model/main)")):
        metadata = json.loads((paths.CHECKPOINTS / started[arm].name / "last/metadata.json").read_text())
        assert metadata["started_from"] == source
    # Same weights, same problems, same draws: GRPO begins with what fine-tuning measured after its second step.
    evaluations = {arm: read_csv(paths.RUNS / of.name / "validation.csv") for arm, of in {**started, "sft": run}.items()}
    measured = ("val/token_entropy", "val/response_length", "val/answer_reward")
    assert [evaluations["sft"][1][key] for key in measured] == [evaluations["early"][0][key] for key in measured]
    assert [evaluations["sft"][0][key] for key in measured] == [evaluations["base"][0][key] for key in measured]
    assert [(row["step"], row["update"]) for row in evaluations["sft"]] == [(0, 0), (2, 2), (3, 3)]
    assert evaluations["early"][0]["val/token_entropy"] != evaluations["base"][0]["val/token_entropy"]


@pytest.mark.parametrize("format", [formats.R1_ZERO, formats.CHAT], ids=["r1_zero", "chat"])
def test_prompts_are_put_as_they_are_when_sampling(format: Format, tmp_path: Path) -> None:
    """With the tokenizer's beginning-of-text token, or as a user message; responses are tokenized separately."""
    like_llama3(tmp_path, ["Mia has 3 apples."])
    tokenizer, seen = Tokenizer.from_folder(tmp_path), []

    def update(texts: Texts, constant: float) -> dict[str, float]:
        seen.extend(zip(texts.prompts, texts.responses, strict=True))
        return {"loss": 0.0}

    config = CONFIG.model_copy(update={"n_sft_steps": 1, "train_batch_size": 10})
    learner = SimpleNamespace(sft_update=update, model=SimpleNamespace(config=None))
    train(train_sft, config, None, tokenizer, tmp_path, data=EXAMPLES, engine=NO_ENGINE, learner=learner, format=format)
    expected = {
        (format.encode(tokenizer, e.prompt), tuple(tokenizer(f"{e.response}<|eot_id|>", add_special_tokens=False)["input_ids"]))
        for e in EXAMPLES
    }
    assert set(seen) == expected and len(expected) == 10
    assert all(prompt.count(tokenizer.prompt_ids("")[0]) == 1 for prompt, _ in seen)


# ------------------------------------------------------------------------------------------------- the end of a response


@pytest.mark.parametrize(
    ("format", "response", "end"),
    [
        (formats.QUESTION_ONLY, " It is \\boxed{4}.", ["<|endoftext|>"]),
        (formats.CHAT, "It is \\boxed{4}.", ["<|im_end|>"]),  # a reply in a chat ends a turn, and not the text
        (formats.CHAT, "It is \\boxed{4}.<|im_end|>", []),
        (formats.R1_ZERO, " 4 </think> <answer>4</answer>", []),  # nothing after it would ever be sampled
        (formats.R1_ZERO, " 4 </think> The answer is 4.", ["<|endoftext|>"]),
        (Format("{question}", stop=("\n",)), "4", ["<|endoftext|>"]),
        (Format("{question}"), "", ["<|endoftext|>"]),
    ],
)
def test_the_end_of_a_response_is_part_of_it(format: Format, response: str, end: list[str], tmp_path: Path) -> None:
    """As in the base models of Qwen2.5, one token ends a text, and another one a turn."""
    like_qwen3(tmp_path, ["Mia has 3 apples."])
    put(tmp_path, eos_token="<|endoftext|>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = format.encode_response(tokenizer, response)
    text = tokenizer(response, add_special_tokens=False)["input_ids"]
    assert list(ids) == text + [tokenizer(token)["input_ids"][0] for token in end]
