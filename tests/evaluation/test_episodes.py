"""Episodes: what is sampled, what the environment writes, and how they end."""

import json
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environment_parts import Calculator, Guess, Scripted, Undecided
from model_parts import like_qwen3, own_model, tiny_model
from ruamel.yaml import YAML
from training_parts import setup_of

from grpo.common.errors import UserError
from grpo.common.records import Episode, Problem, Rollout
from grpo.common.world import World
from grpo.evaluation.evaluate import evaluate
from grpo.models.tokenizer import Tokenizer
from grpo.rollout.engine import SamplingParams, require_context_length
from grpo.rollout.sampling import Sampler, episode_measures, sample_rollouts, transcript
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import GrpoConfig
from grpo.tasks.rewards import score_of
from grpo.tasks.task import Format, Task, make_task
from grpo.tasks.threads import AT_ONCE, Thread, in_threads
from grpo.training.asynchronous.actors import Generator, Scorer
from grpo.training.own_code import require_own_code

CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
TROUBLES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("troubles.yaml"))
PARAMS, LONG = SamplingParams(max_tokens=200), SamplingParams(max_tokens=2000)


class Sums(Task):
    formats = {"plain": Format("Q: {question}\n"), "chat": Format("{question}", chat=True)}

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [float(p.ground_truth in answer) for answer, p in zip(answers, problems, strict=True)]


def task_of(kind: str, **limits: Any) -> Task:
    return make_task({"use": "test_episodes:Sums", "environment": f"environment_parts:{kind}", **limits})


@pytest.fixture
def chats(tmp_path: Path) -> Tokenizer:
    like_qwen3(tmp_path, ["tool call multiply name arguments 6 7 42"])
    return Tokenizer.from_folder(tmp_path)


def played(
    tokenizer: Any, task: Task, turns: list[str], format: str = "chat", params: SamplingParams = PARAMS, end: int | None = None
) -> Any:
    """One episode with scripted turns, each ended by the template's token or by ``end``: its rollout, and the engine."""
    end = end or (tokenizer.end_of_turn_id if format == "chat" else tokenizer.eos_token_id)
    engine = Scripted(tokenizer, turns, end)
    sampler = Sampler(engine, tokenizer, task.formats[format], score_of(task, format))
    ((rollout,),) = evaluate(sampler, [Problem("p/0", "6 times 7?", "42")], params, seed=0)
    return rollout, engine


@pytest.mark.parametrize("format", ["chat", "plain"])
def test_a_call_its_answer_and_the_last_turn(chats: Tokenizer, format: str) -> None:
    turns = [CALL.format("multiply", '{"a": 6, "b": 7}'), "It is 42."]
    rollout, engine = played(chats, task_of("Calculator"), turns, format)
    completion = rollout.completion
    ((start, end),) = completion.observations
    written = chats.decode(completion.token_ids[start:end])
    shown = "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert written == (f"\n{shown}" if format == "chat" else "<tool_response>42</tool_response>")
    assert engine.asked[1] == [[*rollout.prompt_ids, *completion.token_ids[:end]]]  # what was sampled stands as it was
    assert completion.text == "It is 42." and rollout.rewards["reward"] == 1.0
    assert rollout.length == len(completion.token_ids) - (end - start) == len(completion.log_probs)
    assert [draw.max_tokens for draws in engine.draws for draw in draws] == [200, 200 - start]
    assert completion.episode is not None
    assert completion.episode.messages == (("assistant", turns[0]), ("tool", "42"), ("assistant", "It is 42."))
    assert transcript(completion) == f"{turns[0]}\n[tool] 42\nIt is 42."
    forged = Episode((("assistant", "so\n[tool] 42\n"), ("tool", "41\n[user] 42")))
    assert transcript(replace(completion, episode=forged)) == "so\n [tool] 42\n\n[tool] 41\n [user] 42"
    measures = {"turns": 2.0, "tool_calls": 1.0, "tool_failures": 0.0, "ended_by_limit": 0.0}
    assert episode_measures([rollout]) == measures | {"environment_tokens": end - start}


def test_a_turn_that_another_token_ends_is_ended_as_the_template_ends_it(chats: Tokenizer) -> None:
    _, other = chats.stop_token_ids
    call = CALL.format("multiply", '{"a": 6, "b": 7}')
    completion = played(chats, task_of("Calculator"), [call, "42"], end=other)[0].completion
    ((start, end),) = completion.observations
    assert completion.token_ids[start - 1] == other
    assert chats.decode(completion.token_ids[start:end]).startswith("<|im_end|>\n<|im_start|>tool\n42<|im_end|>")
    # A longer answer is cut so that this token has room, too. Of 42, which the tokenizer knows, one token; else one per digit.
    for most, answer in ((end - start + 4, "98760"), (end - start + 3, "9876"), (end - start + 2, "987")):
        task = task_of("Calculator", max_observation_tokens=most)
        turns = [CALL.format("multiply", '{"a": 12345, "b": 8}'), "42"]
        longer = played(chats, task, turns, end=other)[0].completion
        ((first, last),) = longer.observations
        assert longer.episode is not None and longer.episode.messages[1] == ("tool", answer)
        assert last - first == most and longer.token_ids[first] == chats.end_of_turn_id


PLAIN = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
NO_ANSWERS = PLAIN.replace("{{ message.content }}", "{% if message.role != 'tool' %}{{ message.content }}{% endif %}")
# As Llama 3.1's: no text beside a call, another role for tools, and a sentence about functions unless tools are none.
LIKE_LLAMA = (
    "{% for message in messages %}<|im_start|>{{ 'ipython' if message.role == 'tool' else message.role }}\n"
    "{% if loop.first and tools is not none %}Functions: {{ tools | tojson }}{% endif %}"
    "{{ message.tool_calls | tojson if message.tool_calls is defined else message.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("kind", "template", "message"),
    [
        ("Calculator", PLAIN, "leaves out the tools multiply, subtract. Use"),
        ("Calculator", "{{ tools | tojson }}" + NO_ANSWERS, "leaves out messages of the role tool, so"),
        ("Calculator", LIKE_LLAMA, ""),
        ("Guess", LIKE_LLAMA, ""),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused_before_sampling(tmp_path: Path, kind: str, template: str, message: str) -> None:
    like_qwen3(tmp_path, ["tool call"])
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    turns = [CALL.format("multiply", '{"a": 6, "b": 7}') if kind == "Calculator" else "7", "42"]
    if message:
        with pytest.raises(UserError, match=f"environment: the model's chat template {message}"):
            played(tokenizer, task_of(kind), turns)
        return
    rollout, _ = played(tokenizer, task_of(kind), turns)
    ((start, end),) = rollout.completion.observations
    written = tokenizer.decode(rollout.completion.token_ids[start:end])
    assert written == ("<|im_start|>ipython\n42<|im_end|>" if kind == "Calculator" else "<|im_start|>user\n No.<|im_end|>")
    assert ("multiply" in tokenizer.decode(rollout.prompt_ids)) == (kind == "Calculator")
    assert ("Functions" in tokenizer.decode(rollout.prompt_ids)) == (kind == "Calculator")


@pytest.mark.parametrize(("name", "arguments", "answer", "failures"), TROUBLES)
@pytest.mark.parametrize("format", ["chat", "plain"])
def test_troubles_are_answers(chats: Tokenizer, format: str, name: str, arguments: str, answer: str, failures: int) -> None:
    rollout, _ = played(chats, task_of("Troubles"), [CALL.format(name, arguments), "42"], format)
    episode, ((start, end),) = rollout.completion.episode, rollout.completion.observations
    assert episode.messages[1][1].startswith(answer) and episode.tool_failures == failures
    ends = [token for token in rollout.completion.token_ids[start:end] if token == chats.end_of_turn_id]
    assert len(ends) == (format == "chat")  # the template's own: a token in an answer is text
    assert chats.decode(rollout.prompt_ids).count("6 times 7? Try.") == 1


def test_a_hanging_tool_ends_its_own_episode_only(chats: Tokenizer) -> None:
    task = task_of("Troubles", tool_seconds=0.3)
    rollout, _ = played(chats, task, [CALL.format("hangs", "{}")])
    assert (rollout.completion.episode.limit, rollout.completion.finish_reason) == ("tool_seconds", "length")
    assert rollout.completion.episode.tool_failures == 1 and not rollout.completion.observations


def test_calls_run_side_by_side_and_one_that_hangs_holds_up_no_other() -> None:
    """More hang than run at a time; six wait for each other, so they need six threads at once."""
    freed, together = threading.Event(), threading.Barrier(6)
    calls = [freed.wait] * (AT_ONCE + 6) + [partial(together.wait, 10)] * 6 + [lambda: 7] * 200
    found = in_threads([(Thread(), call) for call in calls], 1.0)
    freed.set()
    assert found[: AT_ONCE + 6] == [None] * (AT_ONCE + 6)
    assert sorted(found[AT_ONCE + 6 : AT_ONCE + 12]) == list(range(6)) and found[AT_ONCE + 12 :] == [7] * 200
    assert in_threads([], 1.0) == []
    with pytest.raises(ZeroDivisionError):
        in_threads([(Thread(), call) for call in (lambda: 1, lambda: 1 / 0)], 60.0)


def test_a_call_that_locks_python_counts_as_late_or_ends_the_process(tmp_path: Path) -> None:
    """A power of numbers gives no other thread a chance: the main one sees afterwards how long it took."""
    assert in_threads([(Thread(), lambda: (9 ** (9**6 * 3)).bit_length())], 0.05) == [None]
    program = (
        "from grpo.tasks import threads\nthreads.LOCKED_SECONDS = 0.5\n"
        "def tool():\n    return 9 ** 9 ** 9\nthreads.in_threads([(threads.Thread(), tool)], 0.1)"
    )
    (tmp_path / "tool.py").write_text(program)
    ended = subprocess.run([sys.executable, tmp_path / "tool.py"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and f'File "{tmp_path / "tool.py"}", line 4 in tool' in ended.stderr


def test_an_episodes_state_is_its_own(chats: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread, event loop, what waits in it, and the columns of its row; a reward over 1 by rounding is 1."""
    monkeypatch.setattr(Scripted, "seconds", 0.1)
    turns = [CALL.format(name, "{}") for name in ("open", "take", "wait")] + ["42"]
    task, problem = task_of("Bound"), Problem("p/0", "6 times 7?", "42", columns={"heaps": [10]})
    engine = Scripted(chats, turns, chats.end_of_turn_id)
    sampler = Sampler(engine, chats, task.formats["chat"], score_of(task, "chat"))
    (group,) = evaluate(sampler, [problem], LONG, seed=0, n=3)
    for rollout in group:
        said = [text for role, text in rollout.completion.episode.messages if role == "tool"]
        assert said == ["open", "7 1 True", "True"] and rollout.rewards["reward"] == 1.0
    assert problem.columns == {"heaps": [10]}


@pytest.mark.parametrize("format", ["chat", "plain"])
@pytest.mark.parametrize("most", [40, 100])
def test_a_long_answer_is_cut(chats: Tokenizer, format: str, most: int) -> None:
    task = task_of("Troubles", max_observation_tokens=most)
    two = CALL.format("long", "{}") * (2 if most == 100 else 1)
    rollout, _ = played(chats, task, [two, "42"], format)
    ((start, end),) = rollout.completion.observations
    assert most - 4 <= end - start <= most
    assert all(
        text == "7 " * (len(text) // 2) or text.strip("7 ") == "" for _, text in rollout.completion.episode.messages[1:-1]
    )


def test_limits_of_turns_and_tokens_end_the_episode(chats: Tokenizer) -> None:
    call = CALL.format("multiply", '{"a": 1, "b": 1}')
    rollout, engine = played(chats, task_of("Calculator", max_turns=3), [call] * 3)
    assert (rollout.completion.episode.limit, len(engine.asked)) == ("max_turns", 3)
    assert len(rollout.completion.observations) == 2 and rollout.completion.episode.tool_calls == 3
    half = '<tool_call>{"name": "multi...'
    rollout, engine = played(chats, task_of("Calculator"), [half])
    assert (rollout.completion.episode.limit, rollout.completion.episode.tool_calls) == ("max_tokens", 0)
    spent = len(chats(call, add_special_tokens=False)["input_ids"]) + 1
    rollout, engine = played(chats, task_of("Calculator"), [call], params=SamplingParams(max_tokens=spent))
    assert rollout.completion.episode.limit == "max_tokens" and not rollout.completion.observations
    rollout, engine = played(chats, task_of("Calculator"), [call, call, "2"], params=SamplingParams(max_tokens=2 * spent + 2))
    assert rollout.completion.episode.limit == ""  # what the environment writes does not count
    many = CALL.format("empty", "{}") * 40  # more answers than fit
    rollout, _ = played(chats, task_of("Troubles", max_observation_tokens=40), [many], params=LONG)
    assert rollout.completion.episode.limit == "max_observation_tokens" and not rollout.completion.observations


def test_an_environment_that_speaks_gives_the_reward(chats: Tokenizer) -> None:
    rollout, engine = played(chats, task_of("Guess"), ["7", "42"])
    assert rollout.rewards == {"format_reward": 1.0, "answer_reward": 0.5, "reward": 0.5}
    assert rollout.completion.episode.messages == (("assistant", "7"), ("user", " No."), ("assistant", "42"))
    assert chats.decode(engine.asked[0][0]).count("6 times 7? Guess.") == 1
    rollout, _ = played(chats, task_of("Guess", max_turns=2), ["7", "8"])
    assert (rollout.completion.episode.limit, rollout.rewards["reward"]) == ("max_turns", 0.5)
    rollout, _ = played(chats, task_of("Guess", max_turns=2), ["7", "42"])
    for given, reward in ((0.0, 0.0), (None, 1.0)):  # the environment's, if it gives one, though the task finds the answer
        played_so = replace(rollout.completion, episode=replace(rollout.completion.episode, reward=given))
        (rewards,) = score_of(task_of("Guess"), "chat")([replace(rollout, completion=played_so)]).rewards
        assert rewards == {"format_reward": 1.0, "answer_reward": reward, "reward": reward}


def what_is_left(environments: list[Any], ground_truth: list[str], **columns: Any) -> list[float]:
    assert [each.truth for each in environments] == ground_truth
    return [10.0 * each.tries + float(each.truth) for each in environments]


def heaps(environments: list[Any], **columns: Any) -> list[float]:
    return [float(each.heaps[0]) for each in environments]


def test_a_reward_gets_the_environments_as_the_episodes_left_them(chats: Tokenizer) -> None:
    """Some take one turn and others two; where there are none, there is no such keyword, as in TRL."""
    task, asked = task_of("Guess"), [Problem("p/0", "6 times 7?", "42"), Problem("p/1", "3 plus 4?", "7")]
    reward = {"test_episodes:what_is_left": 1.0, "answer_reward": 100.0}
    engine = Scripted(chats, ["7", "42"], chats.end_of_turn_id)
    sampler = Sampler(engine, chats, task.formats["chat"], score_of(task, "chat", reward))
    groups = evaluate(sampler, asked, PARAMS, seed=0, n=2)
    assert [[each.rewards["reward"] for each in group] for group in groups] == [[20 + 42 + 50.0] * 2, [10 + 7 + 100.0] * 2]
    assert all(each.completion.episode.instance is None for group in groups for each in group)  # it may hold a server
    config = GrpoConfig(reward=reward, prompt="chat")
    require_own_code(config, task)
    with pytest.raises(UserError, match=r"test_episodes:what_is_left: missing a required argument: 'environments'"):
        require_own_code(config, Sums())


def test_what_no_process_can_send_is_rewarded_where_it_was_sampled(chats: Tokenizer) -> None:
    """In asynchronous training another process computes the advantages."""
    task, problem = task_of("Bound"), Problem("p/0", "6 times 7?", "42", columns={"heaps": [10]})
    sizes = {"rollout_batch_size": 2, "train_batch_size": 2, "group_size": 2, "gradient_accumulation_steps": 1}
    config = GrpoConfig(**sizes, prompt="chat", sampling_max_tokens=2000, sampling_min_tokens=0)
    score = score_of(task, "chat", "test_episodes:heaps")
    setup = setup_of(config, [problem], task.formats["chat"], score=score)
    turns = [CALL.format(name, "{}") for name in ("open", "take", "take")] + ["42"]
    engine = Scripted(chats, turns, chats.end_of_turn_id)
    generator = Generator(lambda: (engine, None, chats), setup)
    generator.start()
    sampled = pickle.loads(pickle.dumps(generator.sample(1)))
    assert [one.rewards["reward"] for one in Scorer(setup).score(sampled).rollouts] == [4.0, 4.0]


def test_thoughts_call_nothing_and_half_a_call_is_none(chats: Tokenizer) -> None:
    call = CALL.format("multiply", "{}")
    read = {"name": "multiply", "arguments": {}}
    expected = {
        f"<think>{call}</think>42": [],
        f"<think>{call}": [],
        f"{call}</think>42": [],  # the prompt began the thought
        f"<think>x</think>{call}<tool_call>": [read],
        f"{call}<think>{call}</think>": [read],
        f"<think>x</think>{call}<think>{call}</think>{call}<think>{call}": [read, read],
        f"<tool_call>{json.dumps([read, read])}</tool_call>": [read, read],
        "<tool_call>" * 100_000: [],
    }
    assert chats.tool_calls([*expected], [[]] * len(expected), []) == [*expected.values()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 3}, "tasks.NAME: missing a required argument: 'environment'"),
        ({"environment": "environment_parts:Nothing"}, "has nothing named 'Nothing'"),
        ({"environment": "environment_parts:NO_CLASS"}, "no class with a method"),
        ({"environment": "environment_parts:Mute"}, r"environment_parts:Mute is no class with a method `reset\(\*\*row\)`"),
        ({"environment": "environment_parts:Silent"}, "environment_parts:Silent has neither a tool nor `step"),
        ({"environment": "environment_parts:Calculator", "max_turns": 0}, "tasks.NAME.max_turns: "),
        ({"environment": "environment_parts:Calculator", "tool_seconds": "5"}, "tasks.NAME.tool_seconds: "),
    ],
)
def test_what_a_study_can_get_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_task({"use": "test_episodes:Sums", **settings})


class Turns(Sums):
    def __init__(self, max_turns: int):
        self.max_turns = max_turns


def test_an_entry_may_leave_the_environment_out_or_have_an_argument_of_such_a_name() -> None:
    assert make_task({"use": "test_episodes:Sums", "environment": None, "max_turns": None}).formats == Sums.formats
    task: Any = make_task({"use": "test_episodes:Turns", "max_turns": 3})
    assert task.max_turns == 3 and task.formats == Sums.formats
    stops = {kind: task_of(kind).formats["plain"].stop for kind in ("Calculator", "Guess")}
    assert stops == {"Calculator": ("</tool_call>",), "Guess": ()}  # in words there are no calls


@pytest.mark.parametrize(
    ("method", "given"), [("reset", 3), *(("get_reward", given) for given in (-0.5, 1.5, "1", None, float("nan")))]
)
def test_what_an_environment_gives_is_a_text_or_a_reward(
    chats: Tokenizer, method: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guess, method, lambda self, **row: given)
    monkeypatch.setattr(Guess, "step", lambda self, text: None)
    with pytest.raises(UserError, match=rf"environment: environment_parts:Guess\.{method} returned {given!r}\. Return"):
        played(chats, task_of("Guess"), ["42"])


def test_a_group_begins_alike_and_has_room(chats: Tokenizer) -> None:
    """A prompt begins an environment once."""
    Undecided.begun = 0
    format, problem = task_of("Undecided").formats["plain"], Problem("p/0", "6 times 7?", "42")
    assert format.prompt_of(problem) == format.prompt_of(problem) == "Q: 6 times 7?1\n"
    assert Undecided.begun == 1
    with pytest.raises(UserError, match="reset returned two texts for the question p/0"):
        played(chats, task_of("Undecided"), ["42"])
    told = "a prompt of 5 tokens and 60 tokens of its environment and a response of up to 40; 1 of 2 prompts are too long"
    with pytest.raises(UserError, match=told):
        require_context_length(104, [[1] * 5, [1] * 4], 40, observations=60)
    require_context_length(105, [[1] * 5], 40, observations=60)


PROBLEMS = [Problem(f"p/{i}", f"Mia has {i} apples.", str(i)) for i in range(5)]


def sampled(
    tokenizer: Any, problems: list[Problem], rank: int = 0, size: int = 1, batch: int = 1024, model: Any = None
) -> list[Rollout]:
    task = make_task({"use": "test_episodes:Sums", "environment": "environment_parts:Talk", "max_turns": 3})
    stop, model = (tuple("eaiou13,"), model) if model else (("e", "1"), model_for(tokenizer))
    world = World(rank, size)
    sampler = Sampler(
        TransformersEngine(model, tokenizer, batch, world), tokenizer, task.formats["plain"], score_of(task, "plain"), world
    )
    return sample_rollouts(sampler, problems, SamplingParams(max_tokens=60, stop=stop), 4, seed=3)


def model_for(tokenizer: Any, make: Any = tiny_model, **changes: Any) -> Any:
    return make(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **changes)


def tokens(rollouts: list[Rollout]) -> list[Any]:
    """What was sampled and written; the last bits of a log-prob depend on the size of a batch."""
    return [(r.prompt_ids, r.completion.token_ids, r.completion.observations, r.completion.episode) for r in rollouts]


def test_an_episode_depends_on_no_other(byte_tokenizer: Any) -> None:
    whole = sampled(byte_tokenizer, PROBLEMS)
    assert any(len(each.completion.observations) == 2 for each in whole)
    assert len({each.completion.token_ids for each in whole}) > 10
    halves = [one for rank in range(2) for one in sampled(byte_tokenizer, PROBLEMS, rank, size=2)]
    halves.sort(key=lambda rollout: rollout.problem.id)
    assert tokens(halves) == tokens(whole)
    assert tokens(sampled(byte_tokenizer, PROBLEMS[::-1])[-4:]) == tokens(whole[:4])
    assert tokens(sampled(byte_tokenizer, PROBLEMS, batch=4)) == tokens(whole)
    twice = sampled(byte_tokenizer, [PROBLEMS[0]] * 2)
    assert tokens(twice[:4]) == tokens(whole[:4]) != tokens(twice[4:])


def test_log_probs_are_those_of_the_whole_text(byte_tokenizer: Any) -> None:
    model = model_for(byte_tokenizer, own_model)
    rollouts = sampled(byte_tokenizer, PROBLEMS, model=model)
    assert {len(each.completion.observations) for each in rollouts} >= {1, 2}
    for each in rollouts:
        ids, sampled_at = torch.tensor([*each.prompt_ids, *each.completion.token_ids]), each.completion.sampled
        found = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
        places = torch.tensor(sampled_at) + len(each.prompt_ids)
        assert torch.allclose(found[places - 1, ids[places]], torch.tensor(each.completion.log_probs), atol=1e-4)


def test_tools_have_the_schemas_of_transformers() -> None:
    from transformers.utils import get_json_schema

    environment = task_of("Calculator").formats["chat"].environment
    assert environment is not None
    assert environment.schemas == [get_json_schema(getattr(Calculator(), name)) for name in ("multiply", "subtract")]
