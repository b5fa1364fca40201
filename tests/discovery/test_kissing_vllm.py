"""The search against a real vLLM server (CPU build) with a random model."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_parts import FOR_VLLM, tiny_model

from grpo.common.errors import UserError
from grpo.discovery.language_model import Endpoint, propose_with
from grpo.discovery.log import Attempt, Log, Settings
from grpo.discovery.search import Budget, search
from grpo.discovery.verifier import verify_text
from grpo.models.checkpoint import save_checkpoint

pytestmark = pytest.mark.vllm
CONTEXT = 2048  # tokens


@pytest.fixture(scope="module")
def endpoint(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """vLLM's server with a random model."""
    config = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **FOR_VLLM}
    config |= {"max_position_embeddings": CONTEXT, "initializer_range": 0.02}
    folder = tmp_path_factory.mktemp("served")
    save_checkpoint(folder, tiny_model("qwen2", len(tokenizer), **config), tokenizer)
    (folder / "chat.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "random",
        "--chat-template", str(folder / "chat.jinja"), "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager",
    ]  # fmt: skip
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    try:
        deadline = time.monotonic() + 180
        while not _answers(port):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield Endpoint(f"http://127.0.0.1:{port}/v1", "random")
    finally:
        server.terminate()
        server.wait(60)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def run(endpoint: Endpoint, folder: Path, strategy: str, calls: int) -> list[Attempt]:
    log = Log(folder / "conversation_log.json", Settings(strategy, 0, endpoint.model, endpoint.base_url))
    search(propose_with(endpoint, strategy), verify_text, Budget(calls=calls), log)
    return log.attempts


def test_a_search_asks_vllm(endpoint: Endpoint, tmp_path: Path) -> None:
    """The same answers for the same seeds, as long as the model's context allows."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, again = (run(endpoint, tmp_path / name, "best_of_n", calls=3) for name in ("a", "b"))
    assert [attempt.proposal.calls for attempt in first] == [1, 1, 1]
    for attempt in first:
        assert attempt.proposal.answer and attempt.score == 0 and "code block" in attempt.verdict.message
        assert attempt.proposal.tokens > 50, "vLLM's own count, prompt included"
    assert [attempt.proposal.answer for attempt in first] == [attempt.proposal.answer for attempt in again]
    assert first[0].proposal.answer != first[1].proposal.answer


def test_a_model_that_is_not_served_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    other = Endpoint(endpoint.base_url, "other")
    with pytest.raises(UserError, match=r"The model `other` does not exist.*OPENAI_MODEL"):
        run(other, tmp_path, "best_of_n", calls=1)
