"""The user's own losses, advantages and rewards by import path: inputs, checks of outputs, settings, and exceptions in them."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import ADVANTAGES, REWARDS, config, learner_of, off_policy, rollouts
from model_parts import own_model
from training_parts import scored, setup_of

from grpo.common import imports
from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem
from grpo.learner.advantages import own_advantages
from grpo.learner.losses import LOSSES, bind_loss, find_loss
from grpo.learner.microbatches import batch_tensors
from grpo.study.compose import merge
from grpo.study.config import LOSS_TYPES, GrpoConfig, apply_overrides
from grpo.tasks.rewards import apply_reward
from grpo.tasks.task import ScoredBatch, Task, make_task
from grpo.training.own_code import require_own_code
from grpo.training.step import set_advantages

MODULE = """
import asyncio
import numpy as np
import torch

def scaled(inputs, scale=1.0):
    ratio = inputs.ratio
    return -scale * ratio * inputs.advantages, {"surprise": -inputs.log_probs, "clipped": ratio > 1.0}

def without_metrics(inputs):
    return -inputs.ratio * inputs.advantages

def without_gradient(inputs):
    return (-inputs.ratio * inputs.advantages).detach(), {}

def measures_the_loss(inputs):
    return -inputs.ratio * inputs.advantages, {"loss": inputs.ratio}

def centred(rewards, lengths, times=1.0):
    rewards -= rewards.mean(dim=1, keepdim=True)
    return times * rewards

of_length = lambda rewards, lengths: (lengths.mean(dim=1, keepdim=True) - lengths).float()
flat = lambda rewards, lengths: rewards.flatten()
divided = lambda rewards, lengths: (rewards - rewards.mean(1, True)) / rewards.std(1, keepdim=True)
a_list = lambda rewards, lengths: rewards.tolist()
among_counted = lambda rewards, lengths: rewards - rewards.nanmean(dim=1, keepdim=True)

seen = {}

def reward(prompts, completions, **columns):
    seen.update(columns, prompts=prompts, completions=completions)
    return [2, -0.5, 1e3]

def spoils(prompts, completions, completion_ids, answer_reward, **columns):
    completions[:], answer_reward[:] = ["?"] * 3, [9.0] * 3
    completion_ids[0].append(7)
    prompts.reverse()
    kept[:] = [1.0, 2.0, 3.0]
    return kept

def keeps(completion_ids, **columns):
    kept[:] = [float(len(ids)) for ids in completion_ids]
    return kept

kept = []
where_it_applies = lambda prompts, **columns: [None, 0.5, 1.0]
async def waits(prompts, **columns):
    order.append("waits")
    await asyncio.wait_for(done.wait(), 5)
    return [float(len(order))] * 3

async def is_waited_for(prompts, **columns):
    order.append("is waited for")
    done.set()
    return [10.0, None, 30.0]

async def too_few_in_the_end(prompts, **columns):
    return [0.0]

def scalars(prompts, **columns):
    return [torch.tensor(0.5), None, np.float32(0.25)]

async def keeps_a_client(prompts, **columns):
    kept.append(asyncio.get_running_loop())
    return [float(kept[0] is kept[-1])] * 3

async def fails(prompts, **columns):
    raise asyncio.CancelledError

order, done = [], asyncio.Event()
nowhere_else = lambda prompts, **columns: [None, None, None]
too_few = lambda prompts, **columns: [0.0]
texts = lambda prompts, **columns: ["1.0", 1.0, 1.0]
unbounded = lambda prompts, **columns: [1.0, 1.0, float("inf")]
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own."""
    sys.modules.pop("of_my_own", None)
    (tmp_path / "of_my_own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("budget", [None, 24])
def test_a_loss_of_ones_own_is_what_the_learner_descends(model: Any, budget: int | None) -> None:
    """-2 rho A is `grpo_no_clip` with twice the loss; its metrics are averaged over the batch's response tokens."""
    found = {}
    for loss_type, options in (("grpo_no_clip", {}), ("of_my_own:scaled", {"scale": 2.0})):
        learner = learner_of(model, budget, loss_type=loss_type, loss_options=options)
        old = off_policy(learner, rollouts())
        now = torch.cat(learner.log_probs(rollouts()))
        found[loss_type] = learner.update(scored(rollouts(), REWARDS, ADVANTAGES, old))
    plain, own = found["grpo_no_clip"], found["of_my_own:scaled"]
    assert own["loss"] == pytest.approx(2 * plain["loss"], rel=1e-5)
    assert own["gradient_norm"] == pytest.approx(2 * plain["gradient_norm"], rel=1e-5)
    assert list(own) == [*plain, "surprise"]
    assert own["surprise"] == pytest.approx(-now.mean().item(), rel=1e-5)
    assert own["clip_fraction"] == pytest.approx((now > torch.cat(old)).float().mean().item())
    same = set(plain) - {"loss", "gradient_norm", "clip_fraction"}
    assert {key: own[key] for key in same} == {key: plain[key] for key in same}


def advantage(name: str, **options: Any) -> None:
    require_own_code(config(advantage=f"of_my_own:{name}", advantage_options=options), Task())


def loss(name: str, **options: Any) -> None:
    learner_of(own_model(), loss_type=name, loss_options=options)


NONE: dict[str, Callable[[], object]] = {  # by the message what is called
    r"'ppo' \(known: no_baseline, reinforce_with_baseline, grpo_clip, grpo_no_clip, gspo, cispo\)": lambda: bind_loss(
        "ppo", {}
    ),
    "has nothing named 'nowhere'": lambda: loss("of_my_own:nowhere"),
    "of_my_own:scaled: got an unexpected keyword argument 'scael'": lambda: loss("of_my_own:scaled", scael=1.0),
    "of_my_own:without_metrics must return each token's loss": lambda: loss("of_my_own:without_metrics"),
    "of_my_own:without_gradient must return each token's loss": lambda: loss("of_my_own:without_gradient"),
    # A name of history.csv.
    "measures_the_loss measures loss, as the learner does": lambda: loss("of_my_own:measures_the_loss"),
    "has nothing named 'not_there'": lambda: advantage("not_there"),
    "advantage: of_my_own:centred: got an unexpected keyword argument 'tmies'": lambda: advantage("centred", tmies=2.0),
    "of_my_own:flat must return a finite number for each reward, a tensor of the shape of `rewards`": lambda: advantage("flat"),
    "of_my_own:divided must return a finite number": lambda: advantage("divided"),
    "of_my_own:a_list must return": lambda: advantage("a_list"),
    "of_my_own:too_few returned .*Return 3 finite numbers": lambda: applied("too_few"),
    "of_my_own:too_few_in_the_end returned .*Return 3 finite numbers": lambda: applied("too_few_in_the_end"),
    "of_my_own:texts returned .*'1.0'": lambda: applied("texts"),
    "of_my_own:unbounded returned .*inf": lambda: applied("unbounded"),
}


@pytest.mark.parametrize("message", NONE)
def test_what_is_no_loss_advantage_or_reward_is_refused_with_its_name(message: str) -> None:
    with pytest.raises(UserError, match=message):
        NONE[message]()


SCORES = [1.0, 0.0, 0.5, 0.5, 2.0, 2.0]


def advantages_of(name: str | None, lengths: tuple[int, ...] = (5, 3, 2, 2, 4, 4), **options: Any) -> tuple[list[float], float]:
    """The advantages of three groups of two, and the share of groups without signal."""
    own = {} if name is None else {"advantage": f"of_my_own:{name}", "advantage_options": options}
    settings = config(rollout_batch_size=6, train_batch_size=6, group_size=2, use_std_normalization=False, **own)
    batch = rollouts(lengths)
    for one, reward in zip(batch, SCORES, strict=True):
        one.rewards = {"reward": reward, "format_reward": 1.0, "answer_reward": 0.0}
    metrics = set_advantages(setup_of(settings), batch)
    assert metrics["train/reward"] == 1.0  # a function may change its tensors
    return [one.advantage for one in batch], metrics["train/zero_signal_fraction"]


def test_an_advantage_of_ones_own_takes_the_place_of_the_groups_mean() -> None:
    assert advantages_of(None) == advantages_of("centred") == ([0.5, -0.5, 0, 0, 0, 0], 2 / 3)
    assert advantages_of("centred", times=4.0) == ([2.0, -2.0, 0, 0, 0, 0], 2 / 3)
    # Lengths of 5 and 3, 2 and 2, 4 and 4; then a group of equal rewards has a signal.
    assert advantages_of("of_length") == ([-1.0, 1.0, 0, 0, 0, 0], 2 / 3)
    assert advantages_of("of_length", (1, 1, 2, 2, 3, 6)) == ([0, 0, 0, 0, 1.5, -1.5], 2 / 3)
    abstains, lengths = torch.tensor([[math.nan, 1.0]]), torch.tensor([[1.0, 3.0]])
    rewards = torch.tensor([[1.0, 0.0]])
    assert own_advantages("of_my_own:centred", {}, rewards, lengths).tolist() == [0.5, -0.5]
    assert rewards.tolist() == [[1.0, 0.0]]  # the function has changed a copy
    assert own_advantages("of_my_own:of_length", {}, abstains, lengths).tolist() == [0.0, -1.0]  # whatever is returned for it
    abstains = torch.tensor([[math.nan, 1.0, 0.0]])
    assert own_advantages("of_my_own:among_counted", {}, abstains, torch.ones(1, 3)).tolist() == [0.0, 0.5, -0.5]


def test_a_reward_that_was_not_given_is_0_to_a_loss() -> None:
    """As it is, it would make the loss of `no_baseline` not finite."""
    batch = rollouts((2, 3))
    for one, reward in zip(batch, (math.nan, 1.0), strict=True):
        one.rewards = {"reward": reward}
    assert batch_tensors(batch, torch.ones(2), "cpu")["raw_rewards"].tolist() == [[0.0], [1.0]]


def test_a_study_may_write_a_loss_as_the_handouts_do_and_one_of_its_own_needs_no_groups() -> None:
    """It may take raw rewards, as `no_baseline` does."""
    assert tuple(LOSSES) == LOSS_TYPES and all(find_loss(name) is LOSSES[name] for name in LOSS_TYPES)
    for written, loss in (("GRPO-Clip", "grpo_clip"), ("GRPO-No-Clip", "grpo_no_clip")):
        assert apply_overrides(GrpoConfig(), {"loss_type": written}, "arm") == GrpoConfig(loss_type=loss)
    GrpoConfig(group_size=1, loss_type="of_my_own:scaled")
    GrpoConfig(group_size=1, loss_type="grpo_clip", advantage="of_my_own:of_length")
    GrpoConfig(group_size=1, loss_type="no_baseline")


def test_another_loss_advantage_or_reward_does_not_inherit_from_the_former() -> None:
    base, own = GrpoConfig(loss_type="of_my_own:scaled", loss_options={"scale": 2.0}), {"loss_type": "of_my_own:scaled"}
    kept, other = {"scale": 2.0}, {"loss_options": {"scale": 3.0}}
    for values, options in (({"loss_type": "grpo_clip"}, {}), (own, kept), (other, {"scale": 3.0}), ({"cliprange": 0.1}, kept)):
        assert apply_overrides(base, values, "arm").loss_options == options
    base = GrpoConfig(advantage="of_my_own:centred", advantage_options={"times": 2.0})
    assert apply_overrides(base, {"advantage": None}, "arm") == GrpoConfig()
    assert apply_overrides(base, {"cliprange": 0.1}, "arm").advantage_options == {"times": 2.0}
    with pytest.raises(UserError, match="advantage_options: without advantage"):
        apply_overrides(base, {"advantage": None, "advantage_options": {"times": 2.0}}, "arm")
    base, another = GrpoConfig(reward={"answer_reward": 1.0, "of_my_own:reward": 0.5}), {"reward": {"format_reward": 1.0}}
    assert apply_overrides(base, another, "arm").reward == {"format_reward": 1.0}
    assert merge({"reward": {"answer_reward": 1.0}}, another) == another


PROBLEMS = [Problem(f"p/{i}", f"{i} + 1?", str(i + 1), level=i, subject="sums") for i in range(3)]
COMPLETIONS = [Completion((i, i + 5), f"says {i}", (0.0, 0.0), "stop") for i in range(3)]
SCORED = ScoredBatch([{"format_reward": 1.0, "answer_reward": a, "reward": a} for a in (1.0, 0.25, 0.0)], [False, False, True])
PROMPTS = ["A", "B", "C"]


def applied(name: str | dict[str, float]) -> ScoredBatch:
    reward = f"of_my_own:{name}" if isinstance(name, str) else name
    return apply_reward(reward, PROMPTS, COMPLETIONS, PROBLEMS, SCORED)


def test_a_reward_is_given_all_there_is_and_takes_the_place_of_the_tasks() -> None:
    found = applied("reward")
    assert [r["reward"] for r in found.rewards] == [2.0, -0.5, 1000.0]
    assert all(type(r["reward"]) is float for r in found.rewards)
    assert [(r["format_reward"], r["answer_reward"]) for r in found.rewards] == [(1.0, 1.0), (1.0, 0.25), (1.0, 0.0)]
    assert found.out_of_time == SCORED.out_of_time
    assert SCORED.rewards[0]["reward"] == 1.0  # is left as it was
    of_completions = {"completions": ["says 0", "says 1", "says 2"], "completion_ids": [[0, 5], [1, 6], [2, 7]]}
    columns = {"question": ["0 + 1?", "1 + 1?", "2 + 1?"], "ground_truth": ["1", "2", "3"], "level": [0, 1, 2]}
    rewards = {"subject": ["sums"] * 3, "format_reward": [1.0] * 3, "answer_reward": [1.0, 0.25, 0.0]}
    assert sys.modules["of_my_own"].seen == {"prompts": PROMPTS} | of_completions | columns | rewards


def test_several_rewards_are_a_weighted_sum_of_those_that_apply() -> None:
    """Of (2, -0.5, 1000), (-, 0.5, 1) and the task's answer (1, 0.25, 0)."""
    found = applied({"of_my_own:reward": 0.5, "of_my_own:where_it_applies": -2.0, "answer_reward": 4})
    assert [r["reward"] for r in found.rewards] == [0.5 * 2 + 4, 0.5 * -0.5 - 2 * 0.5 + 4 * 0.25, 500.0 - 2.0]
    assert [r["answer_reward"] for r in found.rewards] == [1.0, 0.25, 0.0]
    for alone in ("where_it_applies", {"of_my_own:where_it_applies": 0.5, "of_my_own:nowhere_else": 1.0}):
        first, *others = [r["reward"] for r in applied(alone).rewards]
        assert math.isnan(first) and others == ([0.5, 1.0] if isinstance(alone, str) else [0.25, 0.5])
    assert [r["reward"] for r in applied({"answer_reward": 2.0}).rewards] == [2.0, 0.5, 0.0]  # a reward of 0 is one
    first, abstains, last = [r["reward"] for r in applied("scalars").rewards]  # of torch and numpy
    assert (first, last) == (0.5, 0.25) and type(first) is type(last) is float and math.isnan(abstains)


def test_asynchronous_rewards_run_at_the_same_time_in_an_event_loop_of_all_batches() -> None:
    """The first waits for the second. A client is bound to the loop in which it was made."""
    names = {"of_my_own:waits": 1.0, "answer_reward": 100.0, "of_my_own:is_waited_for": 1.0}
    assert [r["reward"] for r in applied(names).rewards] == [2 + 100 + 10.0, 2 + 25.0, 2 + 0 + 30.0]
    assert [[r["reward"] for r in applied("keeps_a_client").rewards] for _ in range(2)] == [[1.0] * 3] * 2
    with pytest.raises(UserError, match=r"reward: of_my_own:fails: .*CancelledError"):
        applied("fails")


def test_what_a_reward_does_to_its_lists_no_other_sees() -> None:
    """Nor what it does to the list that it has returned."""
    found = applied({"of_my_own:spoils": 1.0, "of_my_own:keeps": 10.0, "answer_reward": 100.0, "of_my_own:reward": 0.0})
    assert [r["reward"] for r in found.rewards] == [1 + 20 + 100.0, 2 + 20 + 25.0, 3 + 20 + 0.0]
    seen = sys.modules["of_my_own"].seen
    assert (seen["prompts"], seen["completion_ids"]) == (PROMPTS, [[0, 5], [1, 6], [2, 7]])


CODE = """\
import json
from grpo.tasks import Format, Task
def reward(completions, **columns): return [{}["level"] for one in completions]
async def later(completions, **columns): return json.loads("no")
def advantage(rewards, lengths): return rewards @ lengths
def loss(inputs): return 1 / 0
def full(completions, **columns): raise MemoryError
def ends(completions, **columns): raise SystemExit(0)
class Fails(Task):
    formats = {"plain": Format("{question}")}
    def problems(self, split): return []
    def verify(self, answers, problems): return [answers[9]]
class Refuses(Task):
    def __init__(self): open("rows.txt")
"""


@pytest.fixture
def folder(tmp_path: Path) -> None:
    for name, code in (("fails_here", CODE), ("fails_at_once", "import json\n1 / 0\n"), ("no_python", "x = 1\ny = = 2\n")):
        (tmp_path / f"{name}.py").write_text(code)
    imports.search_in(tmp_path)


def reward(name: str) -> ScoredBatch:
    return apply_reward(f"fails_here:{name}", PROMPTS, COMPLETIONS, PROBLEMS, SCORED)


def task(name: str) -> Task:
    return make_task({"use": f"fails_here:{name}"}, "tasks.main")


CASES: dict[str, tuple[str, Callable[[], object]]] = {  # by the message's end its beginning, and what is called
    "fails_here.py:3: KeyError: 'level'": ("reward: fails_here:reward: ", lambda: reward("reward")),
    "fails_here.py:4: JSONDecodeError: ": ("reward: fails_here:later: ", lambda: reward("later")),
    "fails_here.py:8 ends the program (exit code 0)": ("reward: fails_here:ends: ", lambda: reward("ends")),
    ".py:5: RuntimeError: ": (
        "advantage: fails_here:advantage: ",
        lambda: own_advantages("fails_here:advantage", {}, torch.ones(2, 3), torch.ones(2, 3)),
    ),
    "fails_here.py:6: ZeroDivisionError: ": ("loss_type: fails_here:loss: ", lambda: bind_loss("fails_here:loss", {})),
    "fails_here.py:12: IndexError: ": ("", lambda: task("Fails").score("plain", PROBLEMS[:1], ["2"])),
    "fails_here.py:14: FileNotFoundError: ": ("tasks.main: ", lambda: task("Refuses")),
    "fails_at_once.py:2: ZeroDivisionError: ": ("fails_at_once:x: ", lambda: import_object("fails_at_once:x")),
    "no_python.py:2: SyntaxError: ": ("no_python:x: ", lambda: import_object("no_python:x")),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("place", CASES)
def test_an_exception_is_told_by_its_place(place: str) -> None:
    """Exhausted memory is no mistake of the code."""
    begins, call = CASES[place]
    with pytest.raises(UserError) as told:
        call()
    message = str(told.value)
    assert message.startswith(begins) and place in message and "\n" not in message
    with pytest.raises(MemoryError):
        reward("full")
