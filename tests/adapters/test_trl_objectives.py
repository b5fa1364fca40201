"""Objectives and episodes against TRL's GRPOTrainer."""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environment_parts import Calculator, Scripted
from learner_parts import PROBLEM, config, flat, last_gradients
from model_parts import byte_level, tiny_model
from ruamel.yaml import YAML
from torch import Tensor
from torch.testing import assert_close
from training_parts import setup_of

from grpo.common.records import Completion, Problem, Rollout
from grpo.learner.advantages import normalize_within_groups
from grpo.learner.learner import Learner
from grpo.learner.losses import response_weights
from grpo.learner.microbatches import Microbatch
from grpo.models.tokenizer import Tokenizer
from grpo.rollout.engine import CompletionSpec, SamplingParams
from grpo.rollout.sampling import Sampler, sample_rollouts
from grpo.study.config import OBJECTIVES
from grpo.tasks.rewards import score_of, soft_overlong_punishment
from grpo.tasks.task import Format, Task, make_task
from grpo.training.step import set_advantages, update_policy

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
    tokens = int(LENGTHS.sum())
    sizes = tokens, 4
    names = ("loss", "tokens", "token_entropy", "clip_fraction", "ratio_mean", "mismatch_mean", "mismatch_above", "mismatch_kl")
    totals = {n: torch.zeros((), dtype=torch.float64) for n in (*names, "importance_mean", "importance_capped", "kl_loss")}
    learner._backward(
        batch, sizes, micro, totals, {n: torch.zeros(()).double() for n in ("ratio_min", "ratio_max", "mismatch_max")}
    )
    assert logits.grad is not None
    return totals["loss"], logits.grad, (totals["clip_fraction"] / totals["tokens"]).item()


def of_trl(loss_type: str, level: str = "token", old: Tensor = OLD, **settings: Any) -> tuple[Tensor, Tensor, float | None]:
    """The same by ``GRPOTrainer._compute_loss``, where only the forward pass is replaced."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logits = LOGITS.clone().requires_grad_()
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {name: settings.pop(name) for name in args.keys() & settings.keys()}
    same = {name: lambda x, *_, **__: x for name in ("gather", "reduce", "gather_for_metrics", "pad_across_processes")}
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, **same)
    values = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "top_entropy_quantile": 1.0,
        "use_vllm": "importance_sampling_ratio" in settings,
    }
    ratio = settings.pop("importance_sampling_ratio", None)
    values |= settings
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *a, **k: (*computed(logits), None),
        get_high_entropy_mask=lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given),
        aux_loss_enabled=False,
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


TABLES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("objectives.yaml"))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **TABLES["objectives"],
    "truncated importance sampling": (
        {"loss_type": "grpo_clip", "importance_cap": 1.2, "kl_coefficient": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "importance_sampling_ratio": torch.exp(OLD - ENGINE).clamp(max=1.2)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_trls(model: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    here, there = CASES[case]
    (loss, gradient, clipped), (expected, of_expected, region) = ours(model, **here), of_trl(**there)
    assert of_expected.norm() > 0.01
    print(f"{case}: {(gradient - of_expected).norm() / of_expected.norm():.1e} of the gradient's norm")
    assert (gradient - of_expected).norm() < 1e-6 * of_expected.norm()
    assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert_close(gradient, of_expected, rtol=1e-6, atol=1e-6)
    plain = of_trl("grpo")[1]
    assert case == "GRPO" or (gradient - plain).norm() > 1e-3  # each setting counts
    assert (clipped > 0) == (there["loss_type"] != "sapo")
    if here["loss_type"] == "grpo_clip":  # with GSPO's ratio TRL counts responses
        assert clipped == pytest.approx(region, rel=1e-6)


GENERATED = [
    [int(token) for token in torch.randint(2, 500, (n,), generator=GENERATOR)] for n in (5, 2, 9, 3, 12, 7, 2, 4, 11, 16, 3, 8)
]
BATCH_REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5]  # of three groups
BATCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = TABLES["batches"]


def trainer_of(
    kind: str, model: Any, tokenizer: Any, folder: Path, rewards: list[float | None], **settings: Any
) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer of this kind (GRPO or RLOO) and a batch of its data: three groups of four responses, with these rewards."""
    import trl
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(folder / "tokenizer")
    alone = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "beta": 0.0}
    sizes = {"num_generations": 4, "per_device_train_batch_size": 12, "max_completion_length": 16}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=lambda completions, **_: rewards,
        args=getattr(trl, f"{kind}Config")(output_dir=str(folder), **alone | sizes | settings),
        train_dataset=Dataset.from_dict({"prompt": ["How many are 1 and 2?", "And 4?", "And 3 and 2?"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
    )
    return trainer, next(iter(trainer.get_train_dataloader()))


def gradient_of(trainer: Any, sampled: Any) -> dict[str, Tensor]:
    trainer.compute_loss(trainer.model, sampled).backward()
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


ABSTAINING = [1.0, None, 0.25, 1.0, None, None, 1.0, 0.0, None, None, None, None]  # of the second group the mean is 0.5


@pytest.mark.parametrize("rewards", [BATCH_REWARDS, ABSTAINING], ids=["rewards", "some None"])
@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_is_trained_on_as_by_trls_trainer(model: Any, tokenizer: Any, tmp_path: Path, case: str, rewards: Any) -> None:
    """From the same responses and rewards the gradient at the weights, through the whole of both trainers."""
    here, there = BATCHES[case]
    ended = [i % 4 != 1 for i in range(12)]
    completions = [[*ids[:-1], tokenizer.eos_token_id if ends else 7] for ids, ends in zip(GENERATED, ended, strict=True)]
    learner = Learner(
        copy.deepcopy(model),
        config(loss_type="grpo_clip", rollout_batch_size=12, train_batch_size=12, advantage_eps=1e-4, **here),
        tokenizer.pad_token_id,
    )
    prompts = [tuple(range(3, 8 + i // 4)) for i in range(12)]
    rollouts = [
        Rollout(PROBLEM, prompt, Completion(tuple(ids), "", (0.0,) * len(ids), "stop" if ends else "length"))
        for prompt, ids, ends in zip(prompts, completions, ended, strict=True)
    ]
    for rollout, log_probs, reward in zip(rollouts, learner.log_probs(rollouts), rewards, strict=True):
        apart = torch.tensor([0.06 * (token % 9 - 4) for token in rollout.completion.token_ids])
        rollout.completion = replace(rollout.completion, log_probs=tuple((log_probs + apart).tolist()))
        rollout.rewards = {"reward": math.nan if reward is None else reward, "format_reward": 1.0, "answer_reward": 0.0}
    settings = {"loss_type": "grpo", "vllm_importance_sampling_clip_max": 1.2} | there
    trainer, questions = trainer_of("GRPO", model, tokenizer, tmp_path, rewards, **settings)
    trainer.use_vllm = "importance_mode" in here
    texts, of_engine = [""] * 12, [r.completion.log_probs for r in rollouts] if trainer.use_vllm else None
    trainer._generate = lambda _: (prompts, completions, None, texts, of_engine, {}, None, None)
    sampled = trainer._prepare_inputs(questions)
    expected = flat(gradient_of(trainer, sampled))

    set_advantages(setup_of(learner.config), rollouts)
    assert_close(torch.tensor([r.advantage for r in rollouts]), sampled["advantages"], rtol=1e-5, atol=1e-5)
    gradients = last_gradients(learner)
    update_policy(learner.config, learner, rollouts, version=0)
    print(f"{case}: {(flat(gradients) - expected).norm() / expected.norm():.1e} of the gradient's norm")
    assert (flat(gradients) - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 0.01


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9], ids=["clipped", "not clipped"])
def test_three_steps_of_both_trainers_give_the_same_weights(
    model: Any, tokenizer: Any, tmp_path: Path, max_grad_norm: float
) -> None:
    """The whole training loop on the same responses: microbatches that are summed, the clipped norm, and AdamW."""
    prompts = [tuple(range(3, 8 + i // 4)) for i in range(12)]
    rate = {"learning_rate": 1e-3, "max_grad_norm": max_grad_norm}
    learner = Learner(
        copy.deepcopy(model),
        config(loss_type="reinforce_with_baseline", rollout_batch_size=12, train_batch_size=12, advantage_eps=1e-4, **rate),
        tokenizer.pad_token_id,
    )
    start = flat(dict(copy.deepcopy(model).named_parameters())).detach()
    rollouts = [
        Rollout(PROBLEM, prompt, Completion(tuple(ids), "", (0.0,) * len(ids), "length"), rewards)
        for prompt, ids, value in zip(prompts, GENERATED, BATCH_REWARDS, strict=True)
        for rewards in [{"reward": value, "format_reward": 1.0, "answer_reward": 0.0}]
    ]
    set_advantages(setup_of(learner.config), rollouts)
    norms = [learner.update(rollouts)["gradient_norm"] for _ in range(3)]
    assert (min(norms) > 0.05) and max(norms) < 1e9
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 3}
    quiet = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    schedule = {"lr_scheduler_type": "constant", "adam_beta2": 0.95, "loss_type": "grpo"}
    trainer, _ = trainer_of("GRPO", model, tokenizer, tmp_path, BATCH_REWARDS, **sizes, **quiet, **schedule, **rate)
    trainer._generate = lambda _: (prompts, GENERATED, None, [""] * 12, None, {}, None, None)
    trainer.train()
    expected = flat(dict(trainer.model.named_parameters())).detach() - start
    moved = flat(dict(learner.model.named_parameters())).detach() - start
    print(f"{(moved - expected).norm() / expected.norm():.1e} of the way")
    assert (moved - expected).norm() < 1e-3 * expected.norm() and expected.norm() > 0.01


def test_rloo_on_policy_is_trls(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Advantages, and the gradient at the weights, of responses that TRL's trainer sampled.

    Where old and new policy are one, its ratio of a whole response has the gradient of the response's log-probability. Ours
    divides the sum over a response by ``sampling_max_tokens``, a constant.
    """
    settings = config(**OBJECTIVES["rloo"], rollout_batch_size=12, train_batch_size=12)
    learner = Learner(copy.deepcopy(model), settings, tokenizer.pad_token_id)
    trainer, questions = trainer_of("RLOO", model, tokenizer, tmp_path, BATCH_REWARDS)
    sampled = trainer._prepare_inputs(questions)

    rewards = torch.tensor(BATCH_REWARDS)
    advantages = normalize_within_groups(rewards, 4, 1e-6, settings.use_std_normalization, "leave_one_out")
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
        for prompt, ids, reward, advantage in zip(*sides, BATCH_REWARDS, advantages.tolist(), strict=True)
    ]
    gradients = last_gradients(learner)
    learner.update(rollouts)
    expected = gradient_of(trainer, sampled)
    assert gradients.keys() == expected.keys() and flat(expected).norm() > 0.01
    assert_close(flat(gradients), flat(expected) / 16, rtol=1e-6, atol=1e-6)


def test_overlong_punishment_is_trls() -> None:
    from trl.rewards import get_soft_overlong_punishment

    expected = get_soft_overlong_punishment(max_completion_len=16, soft_punish_cache=5)([[0] * n for n in range(20)])
    assert [soft_overlong_punishment(n, max_tokens=16, buffer=5) for n in range(20)] == pytest.approx(expected, abs=1e-6)


# A chat of Qwen's kind: tools in the system message, calls as JSON in tags, answers of tools as messages of the user.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE_TEMPLATE = TABLES["response_template"]


def call(name: str, a: int, b: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}\n</tool_call>"


# Of each episode the policy's turns.
TURNS = [
    [f"So {call('multiply', 6, 7)}", "It is 42."],
    [call("multiply", 6, 7) + call("subtract", 9, 5), call("multiply", 4, 4), "16"],
    ["I think 41."],
    [call("subtract", 1, 2), "done"],
]


class Sums(Task):
    formats = {"chat": Format("{question}", chat=True)}

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [float(p.ground_truth in answer) for answer, p in zip(answers, problems, strict=True)]


class ByEpisode(Scripted):
    """Says each episode's own turns, those of the unfinished episodes in their order."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[CompletionSpec] = ()
    ) -> list[list[Completion]]:
        texts = [turns[len(self.asked)] for turns in TURNS if len(turns) > len(self.asked)]
        self.asked.append([list(prompt) for prompt in prompts])
        said = [Scripted(self.tokenizer, [text], self.end).generate([[]], params, 1, seed)[0][0] for text in texts]
        return [said[i : i + n] for i in range(0, len(said), n)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = byte_level(["tool call name arguments"], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    values = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def trl_episodes(folder: Path, model: Any, rewards: list[float]) -> tuple[Any, Any, list[list[list[int]]]]:
    """TRL's trainer with scripted turns, its batch, and the ids that each turn was asked with."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.response_template = RESPONSE_TEMPLATE
    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "beta": 0.0}
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 600, "loss_type": "grpo"}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: rewards,
        args=GRPOConfig(output_dir=str(folder / "out"), **sizes | settings),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "6 times 7?"}], "ground_truth": "42"}]),
        processing_class=tokenizer,
        environment_factory=Calculator,
    )
    asked: list[list[list[int]]] = []

    def turn(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        texts = [turns[len(asked)] for turns in TURNS if len(turns) > len(asked)]
        asked.append([list(ids) for ids in prompt_ids])
        said = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
        return said, None

    trainer._generate_single_turn = turn
    return trainer, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))), asked


def test_ids_after_each_turn_and_gradients_are_trls(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    task = make_task({"use": "test_trl_objectives:Sums", "environment": "environment_parts:Calculator"})
    engine = ByEpisode(tokenizer, [], tokenizer.end_of_turn_id)
    sampler = Sampler(engine, tokenizer, task.formats["chat"], score_of(task, "chat"))
    problem = Problem("p/0", "6 times 7?", "42")
    rollouts: list[Rollout] = sample_rollouts(sampler, [problem], SamplingParams(max_tokens=600), 4, seed=0)
    rewards = [1.0, 0.0, 0.25, 0.0]

    trainer, batch, asked = trl_episodes(folder, copy.deepcopy(model), rewards)
    assert [ids for turn in engine.asked[1:] for ids in turn] == [ids for turn in asked[1:] for ids in turn]
    assert asked[0] == [list(rollouts[0].prompt_ids)] * len(asked[0])
    for i, rollout in enumerate(rollouts):
        mask = batch["completion_mask"][i].bool()
        assert batch["completion_ids"][i][mask].tolist() == list(rollout.completion.token_ids)
        assert batch["tool_mask"][i][mask].nonzero()[:, 0].tolist() == list(rollout.completion.sampled)
        rollout.rewards = {"reward": rewards[i], "format_reward": 1.0, "answer_reward": 0.0}

    trainer.compute_loss(trainer.model, batch).backward()
    expected = flat({name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None})
    sizes = {"rollout_batch_size": 4, "train_batch_size": 4, "group_size": 4, "sampling_max_tokens": 600}
    learner = Learner(model, config(loss_type="grpo_clip", advantage_eps=1e-4, **sizes), tokenizer.pad_token_id)
    set_advantages(setup_of(learner.config), rollouts)
    gradients = last_gradients(learner)
    update_policy(learner.config, learner, rollouts, version=3)
    print(f"episodes: {(flat(gradients) - expected).norm() / expected.norm():.1e} of the gradient's norm")
    assert (flat(gradients) - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 1e-3


def test_the_tokenizers_own_form_of_calls_is_read(folder: Path) -> None:
    plain = Tokenizer.from_folder(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"response_template": RESPONSE_TEMPLATE}))
    own = Tokenizer.from_folder(folder)
    texts = [turn for turns in TURNS for turn in turns]
    before: list[list[int]] = [[]] * len(texts)
    assert own.tool_calls(texts, before, []) == plain.tool_calls(texts, before, [])
    assert own.tool_calls(['<tool_call>{"name": "mul'], [[]], []) == [[]]
