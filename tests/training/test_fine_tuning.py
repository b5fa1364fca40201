"""The loops of SFT and of expert iteration: their losses, batches, collection and what they leave."""

import copy
import json
import math
from collections import Counter
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
from grpo.common.records import Completion, Example, write_records
from grpo.learner.learner import Learner
from grpo.learner.microbatches import Texts
from grpo.models.checkpoint import load_model
from grpo.models.tokenizer import Tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.study import paths
from grpo.study.config import ExpertIterationConfig, LearnerSettings, SftConfig
from grpo.study.effective import EffectiveRun, effective_run
from grpo.study.schema import Study
from grpo.tasks import formats
from grpo.tasks.task import Format
from grpo.training.data import choose_examples, items_of_step
from grpo.training.expert_iteration import train_by_expert_iteration
from grpo.training.sft import train_sft

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


def test_filtered_examples_all_earn_the_reward_and_more_than_there_are_is_a_users_error() -> None:
    right = {example for example in MANY if example.reward == 1.0}
    some = choose_examples(MANY, SftConfig(filtered=True, examples=4), 0)
    assert len(set(some)) == 4 and set(some) < right
    almost = [Example("p", "r", "1", 0.5), *MANY]
    assert set(choose_examples(MANY, SftConfig(filtered=True, examples=10), 0)) == right  # as many as there are
    assert set(choose_examples(almost, SftConfig(filtered=True), 0)) == right
    assert set(choose_examples(MANY, SftConfig(examples=30), 0)) == {*MANY}
    for examples, config, told in (
        (MANY, SftConfig(examples=31), r"sft\.examples: 31 examples are asked for, but .* has 30\. Lower it.*sft_dataset"),
        (MANY, SftConfig(examples=11, filtered=True), r"11 examples with reward 1 .* has 10\. Lower it"),
        ([MANY[1]], SftConfig(filtered=True), r"has 0\. Lower it, or use another `sft_dataset:` in params\.yaml"),
    ):
        with pytest.raises(UserError, match=told):
            choose_examples(examples, config, 0)


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


def fine_tuned(
    model: Any, tokenizer: Any, folder: Path, config: SftConfig, examples: Sequence[Example], seed: int, max_tokens: int | None
) -> Any:
    """A copy of the model that the loop has trained."""
    model = copy.deepcopy(model)
    learner = Learner(model, config, tokenizer.pad_token_id, LearnerSettings(max_tokens_per_microbatch=max_tokens))
    given = {"data": examples, "engine": SimpleNamespace(), "learner": learner, "seed": seed}
    train(train_sft, config, model, tokenizer, folder, **given)
    return model


def flat(model: Any) -> Tensor:
    return torch.cat([parameter.data.flatten() for parameter in model.parameters()])


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
    examples = choose_examples([*EXAMPLES, Example("wrong", " x", "1", 0.0)], project.sft, 0)
    one, budget = CONFIG.model_copy(update={"n_sft_steps": 1}), project.learner.max_tokens_per_microbatch
    one_step = fine_tuned(model, tokenizer, tmp_path / "one", one, examples, 0, budget)
    assert torch.equal(flat(load_model(folder / "step-1")), flat(one_step))
    assert json.loads((paths.RUNS / run.name / "metrics.json").read_text())["examples"] == 11
    filtered = train("sft_experiment", "filtered")
    assert json.loads((paths.RUNS / filtered.name / "metrics.json").read_text())["examples"] == 10

    started = {arm: train("grpo_sft_initialization", arm) for arm in ("base", "early")}
    base = "data/model/main"
    for arm, source, start in (
        ("early", str(folder / "step-2"), (folder / "step-2").as_posix()),
        ("base", f"pretrained by the study ({base})", base),
    ):
        metadata = json.loads((paths.CHECKPOINTS / started[arm].name / "last/metadata.json").read_text())
        assert (metadata["started_from"], metadata["start"]) == (source, start)  # in words, and for `grpo kl`
    # Same weights, same problems, same draws: GRPO begins with what fine-tuning measured after its second step.
    evaluations = {arm: read_csv(paths.RUNS / of.name / "validation.csv") for arm, of in {**started, "sft": run}.items()}
    measured = ("val/token_entropy", "val/response_length", "val/answer_reward")
    assert [evaluations["sft"][1][key] for key in measured] == [evaluations["early"][0][key] for key in measured]
    assert [evaluations["sft"][0][key] for key in measured] == [evaluations["base"][0][key] for key in measured]
    assert [(row["step"], row["update"]) for row in evaluations["sft"]] == [(0, 0), (2, 2), (3, 3)]
    assert evaluations["early"][0]["val/token_entropy"] != evaluations["base"][0]["val/token_entropy"]


@pytest.mark.parametrize("format", [formats.R1_ZERO, formats.CHAT], ids=["r1_zero", "chat"])
def test_prompts_are_put_as_they_are_when_sampling(format: Format, tmp_path: Path) -> None:
    """With the tokenizer's beginning-of-text token, or as a user message; responses are tokenized separately. What an update
    does with them is that of a plain loss (tests/learner/test_gradients.py).
    """
    like_llama3(tmp_path, ["Mia has 3 apples."])
    tokenizer, learner = Tokenizer.from_folder(tmp_path), SpyLearner()
    given = {"data": EXAMPLES, "engine": SimpleNamespace(), "learner": learner, "format": format, "seed": 3}
    _, log = train(train_sft, CONFIG, None, tokenizer, tmp_path, **given)
    expected = [
        [
            (
                format.encode(tokenizer, e.prompt),
                tuple(tokenizer(f"{e.response}<|eot_id|>", add_special_tokens=False)["input_ids"]),
            )
            for e in items_of_step(EXAMPLES, 3, step, 4)
        ]
        for step in range(1, 7)
    ]
    assert learner.batches == expected and learner.constants == {3.0}
    assert all(prompt.count(tokenizer.prompt_ids("")[0]) == 1 for batch in expected for prompt, _ in batch)
    assert [(row["step"], row["update"]) for row in read_csv(tmp_path / "history.csv")] == [(n, n) for n in range(1, 7)]
    tokens = [sum(len(response) for _, response in batch) for batch in expected]
    assert [row["tokens_per_s"] * row["training_s"] for row in log.times] == pytest.approx(tokens)


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


OF_ITERATION = ExpertIterationConfig(
    n_ei_steps=3,
    ei_batch_size=6,
    group_size=4,
    epochs_per_ei_step=2,
    learning_rate=1e-2,
    train_batch_size=5,
    gradient_accumulation_steps=1,
    normalize_constant=7.0,
    sampling_temperature=0.9,
    sampling_top_p=0.8,
    sampling_min_tokens=2,
    sampling_max_tokens=6,
    prompt="question_only",
)

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response, as ids


class ScriptedEngine:
    """The first few completions of a step are right; their ids are unique and differ from those of their text."""

    policy_version = 0

    def __init__(self, right: Sequence[int]):
        self.right = right
        self.asked: list[tuple[SamplingParams, int, int]] = []
        self.correct: list[list[Pair]] = []
        self.versions: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        step = len(self.asked)
        self.asked.append((params, n, seed))
        groups, correct, number = [], [], 0
        for prompt in prompts:
            group = []
            for _ in range(n):
                ids, right = (step, 100 + number, 300 - number), number < self.right[step]
                group.append(Completion(ids, "right" if right else "wrong", (-0.5,) * 3, "stop" if right else "length", step))
                correct += [(tuple(prompt), ids)] if right else []
                number += 1
            groups.append(group)
        self.correct.append(correct)
        return groups

    def synchronize(self, model: Any, policy_version: int) -> None:
        self.versions.append(policy_version)


class SpyLearner:
    model = SimpleNamespace(config=None)

    def __init__(self) -> None:
        self.batches: list[list[Pair]] = []
        self.constants: set[float] = set()

    def sft_update(self, texts: Texts, normalize_constant: float) -> dict[str, float]:
        self.batches.append(list(zip(texts.prompts, texts.responses, strict=True)))
        self.constants.add(normalize_constant)
        numbers = dict.fromkeys(("loss", "gradient_norm", "token_entropy", "mean_nll", "learning_rate"), 1.0)
        return numbers | {"skipped_update": 0.0}

    def loss_scale(self) -> dict[str, float]:
        return {}


def iterate(
    engine: Any, learner: Any, tokenizer: Any, folder: Path, config: ExpertIterationConfig = OF_ITERATION, seed: int = 0,
    validate: Any = lambda step, updates: False,
) -> list[dict[str, float]]:  # fmt: skip
    """Run the loop, and return the history. A right answer in the wrong form has half of the reward."""

    def is_right(text: str, _: str) -> dict[str, float]:
        right = text == "right"
        return {"reward": 1.0 if right else 0.5, "format_reward": float(right), "answer_reward": 1.0}

    given = {"engine": engine, "learner": learner, "seed": seed, "reward": is_right, "validation": validate}
    train(train_by_expert_iteration, config, None, tokenizer, folder, **given)
    return read_csv(folder / "history.csv")


def test_only_correct_rollouts_are_trained_on_with_the_ids_that_were_sampled(tokenizer: Any, tmp_path: Path) -> None:
    """Of 24 rollouts a step 12, 5 and 24 are right; two epochs in batches of five. Half of a reward teaches nothing."""
    engine, learner = ScriptedEngine([12, 5, 24]), SpyLearner()
    history = iterate(engine, learner, tokenizer, tmp_path / "run", OF_ITERATION.model_copy(update={"prompt": "r1_zero"}))
    sizes = [[5, 5, 2] * 2, [5] * 2, [5, 5, 5, 5, 4] * 2]
    assert [len(batch) for batch in learner.batches] == [size for step in sizes for size in step]
    assert [row["step"] for row in history] == [step for step, of in enumerate(sizes, start=1) for _ in of]
    batches = iter(learner.batches)
    for correct, of_step in zip(engine.correct, sizes, strict=True):
        epochs = [[pair for _ in range(len(of_step) // 2) for pair in next(batches)] for _ in range(2)]
        assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(correct)
        assert epochs[0] != epochs[1]  # each time in another order
        assert correct not in epochs  # and in none that follows the questions
    assert learner.constants == {7.0}
    params = SamplingParams(temperature=0.9, top_p=0.8, min_tokens=2, max_tokens=6, stop=("</answer>",))
    assert {asked[:2] for asked in engine.asked} == {(params, 4)}
    assert engine.versions == [1, 2, 3]
    for step, right in zip((1, 2, 3), (12, 5, 24), strict=True):
        rows = [row for row in history if row["step"] == step]
        assert {row["train/correct"] for row in rows} == {right}
        assert {row["train/solved"] for row in rows} == {math.ceil(right / 4) / 6}
        assert {row["train/format_reward"] for row in rows} == {right / 24}
        assert {row["train/reward"] for row in rows} == {0.5 + right / 48}
        assert {row["train/cut_off"] for row in rows} == {1 - right / 24}
        assert {(row["train/answer_reward"], row["train/response_length"]) for row in rows} == {(1.0, 3.0)}
        assert {row["train/grader_timeouts"] for row in rows} == {0.0}


def test_every_step_and_every_run_has_an_order_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    orders, sampled = [], []
    for seed in (0, 1):
        engine, learner = ScriptedEngine([24] * 3), SpyLearner()
        config = OF_ITERATION.model_copy(update={"train_batch_size": 24, "epochs_per_ei_step": 1})
        iterate(engine, learner, tokenizer, tmp_path / str(seed), config, seed)
        orders += [tuple(response[1] for _, response in batch) for batch in learner.batches]  # the second id is the place
        sampled += [seed_of_step for _, _, seed_of_step in engine.asked]
    assert len(orders) == len(set(orders)) == len(set(sampled)) == 6


def test_a_state_is_saved_after_each_step_of_expert_iteration(project: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo.training import expert_iteration
    from grpo.training.run import train_run

    sample = expert_iteration.sample

    def killed_at_step_3(setup: Any, sampler: Any, step: int, n_questions: int) -> Any:
        if step == 3:
            raise MemoryError
        return sample(setup, sampler, step, n_questions)

    monkeypatch.setattr(expert_iteration, "sample", killed_at_step_3)
    name, arms = "expert_iteration_experiment", {"arm": {}}
    study = changed(
        project,
        save_state_every=50,
        expert_iteration=OF_ITERATION.model_copy(update={"sampling_top_p": 1.0}),
        experiments=project.experiments | {name: entry(name, arms=arms)},
    )
    run = effective_run(study, name, "arm", 0, [])
    with pytest.raises(MemoryError):
        train_run(study, run)
    assert [path.name for path in (paths.RUN_STATE / run.name).glob("*/step-*")] == ["step-2"]


def test_a_step_without_a_correct_rollout(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends where validation says so."""
    engine, learner, validated = ScriptedEngine([3, 0, 3]), SpyLearner(), []

    def validate(step: int, updates: list[dict[str, float]]) -> bool:
        validated.append((step, len(updates)))
        return step == 3

    config = OF_ITERATION.model_copy(update={"n_ei_steps": 4})
    history = iterate(engine, learner, tokenizer, tmp_path / "run", config, validate=validate)
    assert [len(batch) for batch in learner.batches] == [3] * 4
    assert validated == [(0, 0), (1, 2), (2, 0), (3, 2)]
    assert [row["step"] for row in history] == [1, 1, 2, 3, 3]
    assert engine.versions == [1, 2, 3]
    nothing = history[2]
    for name in ("loss", "gradient_norm", "token_entropy", "mean_nll"):
        assert math.isnan(nothing[name])
        assert all(row[name] == 1.0 for row in history if row is not nothing)
    assert (nothing["train/correct"], nothing["train/solved"], nothing["skipped_update"]) == (0.0, 0.0, 0.0)
    assert "step 2: none of 24 rollouts has reward 1, so nothing was trained" in capsys.readouterr().out


def test_expert_iteration_raises_the_reward(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    sizes = {"n_ei_steps": 8, "ei_batch_size": 16, "train_batch_size": 32, "sampling_min_tokens": 0}
    train(train_by_expert_iteration, OF_ITERATION.model_copy(update=sizes), model, tokenizer, tmp_path)
    rewards = list({row["step"]: row["train/reward"] for row in read_csv(tmp_path / "history.csv")}.values())
    assert len(rewards) == 8
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.85
