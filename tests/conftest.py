"""A tiny model and tokenizers for the tests. torch is imported only by tests that ask for them."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from grpo.common import imports

if TYPE_CHECKING:
    from grpo.study.schema import Study

# Tests on a GPU need torch, transformers and pydantic only.
with suppress(ModuleNotFoundError):
    import dvc  # noqa: F401 - its log writes to the stdout of its first import, which in a test with capsys is soon closed

# The longest first, so that all processes end together. The first runs the smoke study; those that wait for it come later.
LONGEST = [
    *("test_pipeline", "test_killed_runs", "test_workflow", "test_asynchronous", "test_mlflow_process"),
    *("test_slurm", "test_without_gpu", "test_new_projects", "test_several_processes", "test_processes", "test_training_loop"),
    *("test_kissing_number", "test_evaluation", "test_faults", "test_programs"),
]


def scope(nodeid: str) -> str:
    """Where tests run side by side (`pytest -n 2`), those of one scope, which is a module, stay in one process."""
    return Path(nodeid.split("::")[0]).stem


def pytest_configure() -> None:
    """Where pytest itself was started in the background (``nohup … &``), SIGINT is ignored, and so in all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(scope(item.nodeid)) if scope(item.nodeid) in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # it would begin with the modules that have the most tests
    return ByScope(config, log)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that one of the processes makes, and for which the others wait; who changes it must work on a copy."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with FileLock(f"{folder}.lock"):
        if not (done := Path(f"{folder}.made")).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def mini_study() -> Study:
    from study_parts import edited

    return edited()


@pytest.fixture(autouse=True)
def study_folders() -> Iterator[None]:
    """Take back after each test where a study's modules are searched; pytest itself restores a part of it only."""
    before = [*sys.path], imports._study_folders, imports._added
    yield
    sys.path[:], imports._study_folders, imports._added = before


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``grpo ARGUMENTS`` in this process, where nothing is imported again: exit code, stdout and stderr."""
    from grpo.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["grpo", *arguments])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which Snakemake has run the smoke study from scratch; its results are committed.

    Takes minutes, so all tests share it. Only test_pipeline runs a pipeline in it, and brings back what it changes.
    """
    from pipeline_parts import fresh_clone, sh

    def make(folder: Path) -> None:
        fresh_clone(folder)
        start = time.perf_counter()
        sh(folder, "snakemake", "--profile", "local")
        print(f"smoke study through Snakemake: {time.perf_counter() - start:.0f} s")
        sh(folder, "git", "add", "-A")
        sh(folder, "git", "commit", "-qm", "results")

    return made_once(tmp_path_factory, "smoke-study", make)


@pytest.fixture(scope="session")
def _texts() -> list[str]:
    from grpo.tasks.arithmetic import Arithmetic

    documents = Arithmetic(1, 1, levels=2, seed=0).documents(1, r1_zero_share=0.6, complete_form_share=0.1, guess_share=0.1)
    return [prompt + response for prompt, response in itertools.islice(documents, 100)]


@pytest.fixture(scope="session")
def tokenizer(_texts: list[str]) -> Any:
    """512 tokens, trained on generated documents: long pieces, and the r1_zero prompt in few of them."""
    from grpo.models.tokenizer import train_tokenizer

    return train_tokenizer(_texts, vocab_size=512)


@pytest.fixture(scope="session")
def byte_tokenizer(_texts: list[str]) -> Any:
    """The 256 bytes and end-of-text, no merges: a stop string is as many tokens as it has bytes."""
    from grpo.models.tokenizer import train_tokenizer

    return train_tokenizer(_texts, vocab_size=257)


@pytest.fixture(scope="session")
def fresh_model(tokenizer: Any) -> Any:
    """What ``model`` is a copy of; not to be changed."""
    from model_parts import tiny_model

    return tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


@pytest.fixture
def model(fresh_model: Any) -> Any:
    """A randomly initialised Qwen2 model (hidden 32, 2 layers), a new copy for each test."""
    return copy.deepcopy(fresh_model)
