"""The same environment class gives the same episodes here and in TRL, and their gradients agree to 1e-5."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from environment_parts import Calculator, Scripted
from learner_parts import config, flat, last_gradients
from model_parts import byte_level, tiny_model
from training_parts import setup_of

from grpo.common.records import Completion, Problem, Rollout
from grpo.evaluation.evaluate import Sampler, sample_rollouts, score_of
from grpo.learner.learner import Learner
from grpo.models.tokenizer import Tokenizer
from grpo.rollout.engine import Draw, SamplingParams
from grpo.tasks.task import Format, Task, make_task
from grpo.training.step import set_advantages, train_on

pytestmark = pytest.mark.adapters

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
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


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
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[Draw] = ()
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


def of_trl(folder: Path, model: Any, rewards: list[float]) -> tuple[Any, Any, list[list[list[int]]]]:
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
    task = make_task({"use": "test_trl_episodes:Sums", "environment": "environment_parts:Calculator"})
    engine = ByEpisode(tokenizer, [], tokenizer.end_of_turn_id)
    sampler = Sampler(engine, tokenizer, task.formats["chat"], score_of(task, "chat"))
    problem = Problem("p/0", "6 times 7?", "42")
    rollouts: list[Rollout] = sample_rollouts(sampler, [problem], SamplingParams(max_tokens=600), 4, seed=0)
    rewards = [1.0, 0.0, 0.25, 0.0]

    trainer, batch, asked = of_trl(folder, copy.deepcopy(model), rewards)
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
    train_on(learner.config, learner, rollouts, version=3)
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
