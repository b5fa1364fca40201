"""Tasksets of the real `verifiers` as a task: what is asked, what is rewarded, what is refused, and a run of a study."""

import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from docs_parts import clone_with_study, run_to_the_report

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.models.checkpoint import save_checkpoint
from grpo.tasks.task import Task, make_task

pytestmark = pytest.mark.adapters
REFUSED = ("Boxed", "SetUp", "Worthless", "Tooled", "Imaged", "Silent", "Answered")
ALL = {"train": {"select": {"limit": 6}}, "validation": {"select": {"skip": 6}}}

MODULE = """
import asyncio

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=3.0)
    async def right(self, trace):
        return vf.verify_boxed_math_answer(trace.last_reply, str(self.data.answer))

    @vf.reward
    async def brief(self, task, trace):
        return float(len(trace.last_reply) < 50)

    @vf.metric
    async def asked(self, trace, runtime):
        raise AssertionError("there is no sandbox")


class SumConfig(vf.TasksetConfig):
    largest: int = 2


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.largest):
            for b in range(self.config.largest):
                yield SumTask(SumData(prompt=f"{a} + {b}?", system_prompt="Box it.", answer=a + b), self.config.task)


class Fair(SumTask):
    @vf.reward
    async def brief(self, task, trace):
        return -5.0


class Slow(SumTask):
    @vf.reward
    async def brief(self, task, trace):
        await asyncio.sleep(60)


class InABox(SumTask):
    @vf.reward
    async def brief(self, trace, runtime):
        return 1.0


class Prepared(SumTask):
    async def setup(self, trace, runtime): ...


class Unrewarded(vf.Task[SumData]): ...


class Tools(SumTask):
    @classmethod
    def toolsets(cls, config):
        return ["a toolset"]


def one(task, **values):
    class One(vf.Taskset[task, vf.TasksetConfig]):
        def load(self):
            for n in range(2):
                yield task(SumData(**{"prompt": str(n), "answer": n} | values), self.config.task)

    return One


Unfair, Late = one(Fair), one(Slow, timeout=vf.TaskTimeout(scoring=0.05))
Boxed, SetUp, Worthless, Tooled, Imaged = one(InABox), one(Prepared), one(Unrewarded), one(Tools), one(SumTask, image="python")
Silent = one(SumTask, prompt=None)
Answered = one(SumTask, prompt=[vf.UserMessage(content="1 + 1?"), vf.AssistantMessage(content="2")])


class Endless(Sums):
    INFINITE = True

__all__ = ["Sums"]
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def task(environment: str = "sums_env:Sums", **settings: Any) -> Task:
    return make_task(
        {"use": "verifiers_task:Verifiers", "environment": environment, "config": {"largest": 3}, **ALL, **settings},
        "tasks.main",
    )


@pytest.mark.parametrize("environment", ["sums_env:Sums", "sums-env", "somebody/sums-env@0.1"])
def test_a_taskset_is_found_split_and_asked(environment: str) -> None:
    found = task(environment)
    assert [problem.id for problem in found.problems("train")] == [f"train/{i}" for i in range(6)]
    assert [problem.id for problem in found.problems("validation")] == [f"validation/{i}" for i in range(6, 9)]
    assert found.problems("train")[5] == Problem("train/5", "Box it.\n\n1 + 2?", "3")


def test_its_rewards_are_weighed_to_one() -> None:
    """Right is worth 3, fewer than 50 characters 1."""
    found = task()
    problem = found.problems("train")[5]
    responses = [
        r"\boxed{3}",
        "It is, as far as I see and after some thought, " + r"\boxed{3.0}",
        "3",
        "No idea, and many words of it, so that it is not brief at all.",
        " ",
    ]
    scored = found.score("plain", [problem] * 5, responses)
    assert [each["reward"] for each in scored.rewards] == [1.0, 0.75, 0.25, 0.0, 0.0]
    assert [each["format_reward"] for each in scored.rewards] == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_a_reward_that_takes_too_long_is_not_waited_for() -> None:
    found = task("sums_env:Late", config={}, train={}, validation={})
    assert math.isnan(found.verify(["1"], found.problems("train")[:1])[0])


def test_rewards_beyond_one_are_told() -> None:
    found = task("sums_env:Unfair", config={}, train={}, validation={})
    with pytest.raises(UserError, match=r"Verifiers\.verify: expected a number from 0 to 1.*-1\.25"):
        found.score("plain", found.problems("train")[:1], ["nothing"])


def test_another_taskset_than_that_of_the_dataset_is_told() -> None:
    with pytest.raises(UserError, match=r"problem train/5 is not what it was .*dvc repro -f -s dataset@"):
        task(config={"largest": 4}).verify(["3"], task().problems("train")[5:])


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        *((f"sums_env:{name}", "not one response to one prompt") for name in REFUSED),
        ("sums_env:SumTask", "sums_env:SumTask: train: .*Correct `environment`"),
        ("sums_env:Endless", r"train: has no end\. Say how many"),
    ],
)
def test_what_is_not_one_response_to_one_prompt_is_refused(environment: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        task(environment, config={}, train={}).problems("train")


def test_the_docs_study_gets_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any) -> None:
    """The stages run in the project's own environment, which finds `verifiers` in this one."""
    folder = clone_with_study(tmp_path / "clone", "extending.md", "taskset")
    (folder / "studies/my_taskset.py").write_text(MODULE)
    shutil.copy(folder / "examples/verifiers_task.py", folder / "studies")
    save_checkpoint(folder / "my-model", model, tokenizer)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    run_to_the_report(folder)
