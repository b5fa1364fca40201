"""A tiny model and tokenizers for the tests. torch is imported only by tests that ask for them."""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from grpo.sections import PretrainedHere
from grpo.study import Study, load_study

REPOSITORY = Path(__file__).parent.parent
# Modules that share the study of the fixture `finished`, which is dear to make.
OF_ONE_STUDY = {"test_pipeline", "test_push_pull", "test_slurm"}


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run side by side (`pytest -n 2`), those of a module stay in one process, and so do those of one study."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = Path(nodeid.split("::")[0]).stem
            return "one study" if module in OF_ONE_STUDY else module

    return ByModule(config, log)


@pytest.fixture(scope="session")
def mini_study() -> Study:
    return load_study(REPOSITORY / "studies" / "mini.yaml")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which `dvc repro` has run the smoke study from scratch; its results are committed.

    Takes minutes, so all tests share it: one that changes it brings it back to what it was.
    """
    from pipeline_parts import fresh_clone, sh

    folder = fresh_clone(tmp_path_factory.mktemp("dvc"))
    start = time.perf_counter()
    sh(folder, "dvc", "repro")
    print(f"smoke study through dvc repro: {time.perf_counter() - start:.0f} s")
    sh(folder, "git", "add", "-A")
    sh(folder, "git", "commit", "-qm", "results")
    return folder


@pytest.fixture(scope="session")
def _texts(mini_study: Study) -> list[str]:
    from grpo.training.documents import documents

    assert isinstance(mini_study.model, PretrainedHere)
    settings = mini_study.model.model_copy(update={"r1_zero_share": 0.6, "complete_form_share": 0.1, "guess_share": 0.1})
    return [prompt + response for prompt, response in itertools.islice(documents(settings, levels=2), 100)]


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
    import torch

    from grpo.models.hugging_face import SHARED_PROMPT, Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)  # a second thread costs more than it saves on so small a model
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # so that next-token distributions are far from uniform and depend on the context
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation(SHARED_PROMPT)  # as load_model does
    return model


@pytest.fixture
def model(fresh_model: Any) -> Any:
    """A randomly initialised Qwen2 model (hidden 32, 2 layers), a new copy for each test."""
    return copy.deepcopy(fresh_model)
