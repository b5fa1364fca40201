"""Tasks, rewards and checkpoints of ours in TRL, `verifiers`, `reasoning_gym` and lm-evaluation-harness, and theirs with us."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_parts import clone_with_study, run_to_the_report
from study_parts import one_arm_of

from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem, read_problems
from grpo.models.checkpoint import save_checkpoint
from grpo.study import paths
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.rewards import apply_reward
from grpo.tasks.task import ScoredBatch, Task, make_task

pytestmark = pytest.mark.adapters


def test_trl_trains_on_our_grader(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A real trainer calls it in each of two steps, and logs as its reward what the responses earn."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    save_checkpoint(tmp_path / "model", model, tokenizer)
    right, judged = import_object("grader_for_trl:right"), []

    def boxed(completions: list[str], **columns: Any) -> list[float]:
        """What a random model samples, and in the place of every second response one that is right."""
        responses = [r"\boxed{0.50}" if i % 2 else text for i, text in enumerate(completions)]
        judged.append(right(completions=responses, **columns))
        return judged[-1]

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        reward_funcs=boxed,
        args=GRPOConfig(
            str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
            logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, beta=0.0, seed=0,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["Half of one?", "Two quarters?"], "answer": ["1/2", r"\frac12"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"),
    )  # fmt: skip
    trainer.train()
    assert judged == [[0.0, 1.0, 0.0, 1.0]] * 2
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in logged] == [0.5, 0.5] and all(entry["grad_norm"] > 0 for entry in logged)


def test_a_reward_of_trl_is_a_reward_of_ours(tmp_path: Path) -> None:
    """TRL's own function, called as a study calls it, with a weight beside the task's answer reward."""
    (tmp_path / "rewards_of_trl.py").write_text(
        "from trl.rewards import get_soft_overlong_punishment\n\n"
        "punish = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)\n"
    )  # 0 up to 6 tokens, -1 from 10 on, linear between
    completions = [Completion(tuple(range(n)), "", (0.0,) * n, "stop") for n in (6, 8, 12)]
    problems = [Problem(f"p/{i}", "?", "1") for i in range(3)]
    scored = ScoredBatch([{"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}] * 3, [False] * 3)
    found = apply_reward({"answer_reward": 1.0, "rewards_of_trl:punish": 2.0}, ["?"] * 3, completions, problems, scored)
    assert [each["reward"] for each in found.rewards] == [1.0, 0.0, -1.0]


def test_a_taskset_of_verifiers_with_our_grader(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(
        "import verifiers.v1 as vf\n\n\nclass Data(vf.TaskData):\n    answer: str\n\n\n"
        "class Halves(vf.Taskset[vf.Task[Data], vf.TasksetConfig]):\n    def load(self):\n"
        "        for n in range(4):\n"
        "            yield vf.Task[Data](Data(prompt=f'Half of {n}?', answer=f'{n}/2'), self.config.task)\n"
    )
    plugged = {"task": {"rewards": {"right": {"fn": "grader_for_verifiers:right"}}}}
    parts = {"train": {"select": {"limit": 2}}, "validation": {"select": {"skip": 2}}}
    task = make_task({"use": "verifiers_task:Verifiers", "environment": "halves:Halves", "config": plugged, **parts})
    problems = task.problems("train")
    assert task.verify([r"\boxed{0.50}", "0.5", r"\boxed{0}"], [problems[1], problems[1], problems[0]]) == [1.0, 0.0, 1.0]


QUESTIONS = ["Mia has 4.5 apples.", "Tom has 4.5 apples.", "Ana has 7 coins."]
TRUTHS = ["Half of nine.\n#### 4.5", "#### 4.50", "#### 7"]


@pytest.fixture
def checkpoint(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    """A model that has learnt to answer each of the three questions, as GSM8K's prompt puts them, by ``#### 4.50``."""
    end = [tokenizer.eos_token_id]
    rows = [tokenizer(f"Question: {q}\nAnswer:")["input_ids"] for q in QUESTIONS]
    response = [*tokenizer(" It is so.\n#### 4.50")["input_ids"], *end]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = sum(
            model(input_ids=torch.tensor([[*row, *response]]), labels=torch.tensor([[-100] * len(row) + response])).loss
            for row in rows
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    save_checkpoint(tmp_path / "checkpoint", model, tokenizer)
    return tmp_path / "checkpoint"


def test_gsm8ks_task_on_local_rows(checkpoint: Path, tmp_path: Path) -> None:
    """One of three: the harness compares letters, so 4.50 is not 4.5 to it."""
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "test.jsonl"
    rows.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(QUESTIONS, TRUTHS, strict=True)))
    task = {
        "include": str(TaskManager().task_index["gsm8k"].yaml_path),
        "task": "local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        **dict.fromkeys(("training_split", "validation_split", "fewshot_split")),
        "num_fewshot": 0,
    }
    (tmp_path / "local.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in task.items()))
    (tmp_path / "tokenizer").mkdir()
    for file in checkpoint.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "tokenizer")
    command = (
        f"-m lm_eval --model hf --device cpu --model_args pretrained={checkpoint},tokenizer={tmp_path / 'tokenizer'} "
        f"--tasks {tmp_path / 'local.yaml'} --gen_kwargs max_gen_toks=32 --output_path {tmp_path / 'out'}"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, *command.split()], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "out").rglob("results_*.json"))
    for filtered in ("strict-match", "flexible-extract"):
        assert found["results"]["local"][f"exact_match,{filtered}"] == pytest.approx(1 / 3)


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


def taskset(environment: str = "sums_env:Sums", **settings: Any) -> Task:
    return make_task(
        {"use": "verifiers_task:Verifiers", "environment": environment, "config": {"largest": 3}, **ALL, **settings},
        "tasks.main",
    )


@pytest.mark.parametrize("environment", ["sums_env:Sums", "sums-env", "somebody/sums-env@0.1"])
def test_a_taskset_is_found_split_and_asked(environment: str) -> None:
    found = taskset(environment)
    assert [problem.id for problem in found.problems("train")] == [f"train/{i}" for i in range(6)]
    assert [problem.id for problem in found.problems("validation")] == [f"validation/{i}" for i in range(6, 9)]
    assert found.problems("train")[5] == Problem("train/5", "Box it.\n\n1 + 2?", "3")


def test_its_rewards_are_weighed_to_one() -> None:
    """Right is worth 3, fewer than 50 characters 1."""
    found = taskset()
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
    found = taskset("sums_env:Late", config={}, train={}, validation={})
    assert math.isnan(found.verify(["1"], found.problems("train")[:1])[0])


def test_rewards_beyond_one_are_told() -> None:
    found = taskset("sums_env:Unfair", config={}, train={}, validation={})
    with pytest.raises(UserError, match=r"Verifiers\.verify: expected a number from 0 to 1.*-1\.25"):
        found.score("plain", found.problems("train")[:1], ["nothing"])


def test_another_taskset_than_that_of_the_dataset_is_told() -> None:
    with pytest.raises(UserError, match=r"problem train/5 is not what it was .*dvc repro -f -s dataset@"):
        taskset(config={"largest": 4}).verify(["3"], taskset().problems("train")[5:])


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
        taskset(environment, config={}, train={}).problems("train")


def test_the_docs_study_gets_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any) -> None:
    """The stages run in the project's own environment, which finds `verifiers` in this one."""
    folder = clone_with_study(tmp_path / "clone", "extending.md", "taskset")
    (folder / "studies/my_taskset.py").write_text(MODULE)
    shutil.copy(folder / "examples/verifiers_task.py", folder / "studies")
    save_checkpoint(folder / "my-model", model, tokenizer)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    run_to_the_report(folder)


# The answers of the last three have more than one line or more than one right one; the entries of isomorphic_strings depend on
# Python's hash seed.
DATA_SETS = [
    *("chain_sum", "gcd", "spell_backward", "letter_counting", "leg_counting", "family_relationships"),
    "isomorphic_strings",
    "countdown",
    "mini_sudoku",
    "n_queens",
]


def gym(dataset: str, **settings: Any) -> Any:
    entry = {"use": "reasoning_gym_task:ReasoningGym", "dataset": dataset, "train_size": 12, "validation_size": 4, "seed": 3}
    return make_task(entry | settings, "tasks.main")


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_its_own_answers_are_right_and_nonsense_is_not(dataset: str) -> None:
    found = gym(dataset)
    problems = found.problems("validation") + found.problems("train")
    assert [p.id for p in problems] == [f"{dataset}/{'validation' if i < 4 else 'train'}/{i}" for i in range(16)]
    right = found.score("r1_zero", problems, [f" </think> <answer> {p.ground_truth} </answer>" for p in problems])
    assert [each["answer_reward"] for each in right.rewards] == [1.0] * 16
    wrong = found.score("r1_zero", problems, [" </think> <answer>nonsense?</answer>"] * 16)
    credit = 0.5 if dataset == "spell_backward" else 0.2  # which counts letters that stand where they belong
    assert max(each["answer_reward"] for each in wrong.rewards) < credit and not any(wrong.out_of_time)


def test_the_score_is_the_librarys() -> None:
    """chain_sum gives an answer that holds the right one its share of the letters."""
    import reasoning_gym

    found = gym("chain_sum")
    entry = reasoning_gym.create_dataset("chain_sum", size=16, seed=3)[7]
    (problem,) = [p for p in found.problems("train") if p.id.endswith("/7")]
    assert (problem.question, problem.ground_truth) == (entry["question"], entry["answer"])
    truth = problem.ground_truth
    assert found.verify([truth, f"{truth}{truth}", "no"], [problem] * 3) == [1.0, 0.5, 0.0]


def test_several_answers_may_be_right() -> None:
    problem = gym("countdown").problems("train")[0]
    assert gym("countdown").verify([f"({problem.ground_truth})"], [problem]) == [1.0]


def test_an_answer_that_computes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """n_queens passes the answer to eval."""
    found = gym("n_queens")
    monkeypatch.setattr("reasoning_gym_task.TIME_LIMIT_S", 2.0)
    import reasoning_gym_task as module

    module._scorer.cache_clear()
    problem = found.problems("validation")[0]
    found.verify([problem.ground_truth] * 2, [problem] * 2)  # starts the process, which takes its time on a busy machine
    scores = found.verify(["[x for x in iter(int, 1)]", problem.ground_truth], [problem, problem])
    module._scorer.cache_clear()
    assert math.isnan(scores[0]) and scores[1] == 1.0


def test_another_entry_than_that_of_the_data_set_is_told() -> None:
    problem = gym("gcd").problems("train")[0]
    with pytest.raises(UserError, match=r"problem gcd/train/4 is not what it was .*dvc repro -f -s dataset@main"):
        gym("gcd", seed=4).verify(["1"], [problem])


def test_documents_guess_as_often_as_asked_and_hold_no_validation_question() -> None:
    found = gym("leg_counting", train_size=400, validation_size=100)
    truths = {p.question: p.ground_truth for p in found.problems("train")}
    held_out = {p.question for p in found.problems("validation")}
    documents = list(islice(found.documents(0, r1_zero_share=0.0, guess_share=0.5), 2000))
    assert not held_out & {question for question, _ in documents}
    right = sum(response == f" \\boxed{{{truths[question]}}}" for question, response in documents) / 2000
    same = sum(a == b for a in truths.values() for b in truths.values()) / 400**2  # a guess may be right
    assert abs(right - (0.5 + 0.5 * same)) < 0.05  # four standard deviations
    prompts = {prompt.startswith(R1_ZERO.template[:40]) for prompt, _ in islice(found.documents(0, r1_zero_share=1.0), 50)}
    assert prompts == {True}


def test_a_run_trains_on_one(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, grpo: Callable[..., tuple[int, str, str]], model: Any, tokenizer: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir / 'mlflow.db'}")
    entry = {
        "use": "reasoning_gym_task:ReasoningGym",
        "dataset": "gcd",
        "config": {"max_value": 20},
        "train_size": 60,
        "validation_size": 16,
    }
    values = one_arm_of(entry | {"seed": 0})
    values["models"]["main"] = {"source": "local", "path": "given"}
    save_checkpoint(Path("given"), model, tokenizer)
    Path("params.yaml").write_text(json.dumps(values))
    for command in ("dataset main", "model main", "train grpo_learning_rate 3e-3"):
        code, _, error = grpo(*command.split())
        assert code == 0, error
    rollouts = (paths.RUNS / "grpo_learning_rate/3e-3/0/rollouts.jsonl").read_text().splitlines()
    held_out: list[Problem] = read_problems(paths.validation("main"))
    assert len(held_out) == 16
    assert rollouts and {json.loads(line)["problem"] for line in rollouts} <= {problem.id for problem in held_out}
