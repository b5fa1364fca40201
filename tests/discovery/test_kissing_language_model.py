"""Searches with a language model: a fake HTTP endpoint, real programs, and the real verifier; and a real vLLM server."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import fake_endpoint as fake
import pytest
from fake_endpoint import BAD, BETTER, CROSS, GOOD, KEY, MODEL, SLOW, Behaviour, FakeEndpoint, refusing, saying

from grpo.common.errors import UserError
from grpo.discovery import language_model
from grpo.discovery.language_model import TRIES, Endpoint, endpoint_from_environment, propose_with
from grpo.discovery.log import BEST_PROGRAM, LOG, Attempt, Log, SearchSettings, open_log
from grpo.discovery.search import SILENCE, Budget, search, seed_of
from grpo.discovery.strategies import BASELINE, REFUSED, STRATEGIES
from grpo.discovery.verifier import verify_text


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and no proxy on the way to this machine."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def open_search(server: FakeEndpoint, folder: Path, strategy: str = "conversation", seed: int = 0) -> Log:
    return open_log(folder / LOG, SearchSettings(strategy, seed, MODEL, server.url))


def run(server: FakeEndpoint, folder: Path, budget: Budget, strategy: str = "conversation") -> list[Attempt]:
    """The attempts of a search, as its log has them."""
    propose = propose_with(Endpoint(server.url, MODEL, KEY), strategy)
    search(propose, verify_text, budget, open_search(server, folder, strategy))
    assert KEY not in (folder / LOG).read_text()
    return open_search(server, folder, strategy).attempts


def scores(attempts: list[Attempt]) -> list[float]:
    return [attempt.score for attempt in attempts]


SCRIPT = [BAD, fake.GARBAGE, GOOD, fake.UNFINISHED, BETTER, GOOD, fake.program("x = 1\n"), BAD]
SCORES = [0, 0, 22, 0, 38, 22, 0, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_with_each_strategy(tmp_path: Path, strategy: str) -> None:
    with FakeEndpoint(SCRIPT) as server:
        attempts = run(server, tmp_path, Budget(calls=8), strategy)
    assert scores(attempts) == SCORES
    assert (tmp_path / BEST_PROGRAM).read_text() == fake.CROSS_AND_CUBE
    (tmp_path / BEST_PROGRAM).unlink()  # as if it was killed between writing the log and the program
    assert run(server, tmp_path, Budget(calls=8), strategy) == attempts
    assert (tmp_path / BEST_PROGRAM).read_text() == fake.CROSS_AND_CUBE
    assert server.paths == ["/v1/chat/completions"] * 8
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    for index, (attempt, request) in enumerate(zip(attempts, server.requests, strict=True)):
        assert request["messages"] == attempt.proposal.messages
        assert request["seed"] == attempt.seed == seed_of(0, index)
        assert (request["model"], request["temperature"]) == (MODEL, 1.0) and "max_tokens" not in request
        assert attempt.proposal.calls == 1 and attempt.proposal.tokens == 100 and attempt.proposal.failed_calls == 0
        assert attempt.propose_s > 0 and (attempt.verify_s > 0) == (attempt.proposal.program is not None)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", attempt.started_at)
        assert all(parent < index for parent in attempt.proposal.parents)
    assert attempts[0].verdict.message.startswith("Minimum squared distance 1 < maximum squared norm 4")
    assert attempts[1].proposal.answer == "I would rather talk about the weather."
    assert attempts[1].verdict.message == "the answer holds no code block"
    assert attempts[3].verdict.message.startswith("the answer was cut by the length limit of the model")
    assert "no closing fence" in attempts[3].verdict.message


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (fake.BUSY, 'HTTP 429: {"error": {"message": "too many requests"}}'),
        (Behaviour("<h1>Bad\nGateway</h1>", 502), "HTTP 502: <h1>Bad Gateway</h1>"),
        (refusing(408, "late"), "HTTP 408: "),
        (refusing(409, "locked"), "HTTP 409: "),
        (fake.HANG_UP, "no connection: "),
        (SLOW, "nothing within 1 seconds"),
    ],
)
def test_what_may_pass_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Behaviour, line: str) -> None:
    monkeypatch.setattr(language_model, "TIMEOUT", 1 if failure is SLOW else 60)
    with FakeEndpoint([failure, GOOD]) as server:
        (attempt,) = run(server, tmp_path, Budget(calls=2))
    assert attempt.score == 22 and server.requests[0] == server.requests[1]
    assert (attempt.proposal.calls, attempt.proposal.failed_calls) == (2, 1)
    monkeypatch.setattr(language_model, "TRIES", 2)
    with FakeEndpoint([failure]) as server:
        proposal = run(server, tmp_path / "in vain", Budget(calls=2))[0].proposal
    assert (proposal.program, proposal.answer, proposal.tokens, proposal.calls, proposal.failed_calls) == (None, None, 0, 2, 2)
    assert proposal.problem.startswith(f"the endpoint did not answer: {line}") and "\n" not in proposal.problem


@pytest.mark.parametrize("answer", ["<html>", '{"choices": []}', '{"choices": [{"message": null}]}'])
def test_what_is_malformed_scores_nothing_and_the_search_goes_on(tmp_path: Path, answer: str) -> None:
    with FakeEndpoint([Behaviour(answer), GOOD]) as server:
        attempts = run(server, tmp_path, Budget(calls=2))
    assert scores(attempts) == [0, 22] and attempts[0].proposal.calls == attempts[0].proposal.failed_calls == 1
    assert attempts[0].proposal.problem.startswith("the endpoint did not answer: what it sent is malformed (")


TALK = "I set no EMPTY lists."


@pytest.mark.parametrize(
    ("message", "finish_reason", "why"),
    [
        ({"content": TALK, "refusal": "No."}, "stop", ""),
        ({"content": None, "refusal": TALK}, "stop", "the model refused to answer: "),
        ({"content": TALK}, "content_filter", "the endpoint's content filter stopped the answer: "),
    ],
)
def test_an_answer_without_a_program_or_a_count_of_tokens(message: dict[str, Any], finish_reason: str, why: str) -> None:
    """Four characters of prompt and answer count as a token; a key that is a common word stays in the text."""
    body = json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}], "usage": None})
    with FakeEndpoint([Behaviour(body), refusing(400, "x" * 999)]) as server:
        propose = propose_with(Endpoint(server.url, MODEL, "EMPTY"), "best_of_n")
        answered, refused = propose([], 0), propose([], 1)
    assert (answered.problem, answered.answer) == (f"{why}the answer holds no code block", TALK)
    assert answered.tokens == math.ceil((len(BASELINE) + len(TALK)) / 4)
    assert len(refused.problem) == len(f"{REFUSED}: ") + 300 and refused.calls == 1


def test_a_silent_endpoint_ends_the_search_which_can_go_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "TRIES", 1)
    with FakeEndpoint(lambda request: fake.BROKEN if len(server.requests) <= SILENCE else GOOD) as server:
        with pytest.raises(UserError, match=rf"{SILENCE} attempts in a row had no answer \(.*HTTP 500: .*out of memory"):
            run(server, tmp_path, Budget(calls=100))
        assert scores(run(server, tmp_path, Budget(calls=SILENCE + 2))) == [0] * SILENCE + [22] * 2


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (fake.NO_ENTRY, r"HTTP 401: .*Incorrect API key provided: \*\*\*\..*Check OPENAI_API_KEY"),
        (refusing(404, "no such model"), r"HTTP 404: .*kissing_number.model, which is a-model .*/models.*OPENAI_BASE_URL"),
        (refusing(400, "The model `a-model` does not exist."), r"HTTP 400: .*kissing_number.model, which is a-model"),
        (refusing(400, "a-model is not a valid model ID"), r"HTTP 400: .*kissing_number.model, which is a-model"),
        (refusing(402, "Insufficient Balance"), r"HTTP 402: .*OPENAI_API_KEY and its account"),
        (refusing(403, "Country not supported"), r"HTTP 403: .*Check OPENAI_API_KEY"),
        (refusing(429, "You exceeded your quota", code="insufficient_quota"), r"HTTP 429: .*OPENAI_API_KEY and its account"),
    ],
)
def test_mistakes_of_the_user_are_told_at_once(tmp_path: Path, failure: Behaviour, told: str) -> None:
    with FakeEndpoint([GOOD, failure]) as server:
        with pytest.raises(UserError, match=told) as caught:
            run(server, tmp_path, Budget(calls=9))
        assert len(server.requests) == (1 + TRIES if failure.status == 429 else 2)
        assert str(caught.value).startswith(server.url) and KEY not in str(caught.value)
        assert scores(open_search(server, tmp_path).attempts) == [22], "what was done before is kept"


def test_a_request_that_is_refused_is_not_repeated_and_a_shorter_one_follows(tmp_path: Path) -> None:
    too_long = refusing(400, "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens.")
    with FakeEndpoint([GOOD, too_long, too_long, BETTER]) as server:
        attempts = run(server, tmp_path, Budget(calls=4))
    assert scores(attempts) == [22, 0, 0, 38] and len(server.requests) == 4
    assert attempts[1].proposal.problem.startswith(f"{REFUSED}: HTTP 400: ")
    prompts = server.prompts()
    assert CROSS in prompts[1] and prompts[2] == prompts[3] == prompts[0]


def test_the_key_is_nowhere(tmp_path: Path) -> None:
    """Not even where the endpoint sends it back."""
    endpoint = Endpoint("http://127.0.0.1:1/v1", MODEL, KEY)
    assert KEY not in repr(endpoint) and KEY not in str(endpoint)
    echo = saying(f"Your key is {KEY}.\n```python\n# {KEY}\n{CROSS}```")
    with FakeEndpoint([refusing(400, f"key {KEY} crashed"), Behaviour(f"key {KEY}"), echo]) as server:
        refused, malformed, attempt = run(server, tmp_path, Budget(calls=3))
    assert "key *** crashed" in refused.proposal.problem and "(key ***)" in malformed.proposal.problem
    assert "Your key is ***." in (attempt.proposal.answer or "")
    assert all(KEY not in file.read_text() for file in tmp_path.iterdir())


ENVIRONMENT = {"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1/", "OPENAI_API_KEY": f" {KEY}\n"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"OPENAI_BASE_URL": ""}, "no address of an endpoint. Set OPENAI_BASE_URL to"),
        ({"OPENAI_BASE_URL": f"http://me:{KEY}@example.org/v1"}, "without a user, a query or a fragment"),
        ({"OPENAI_API_KEY": "sk-sécret"}, "OPENAI_API_KEY: holds characters that no key has"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        endpoint_from_environment({**ENVIRONMENT, **changes}, "m")
    assert KEY not in str(caught.value) and "cret" not in str(caught.value)


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    with FakeEndpoint([GOOD]) as server:
        run(server, tmp_path, Budget(calls=2))
        log = tmp_path / LOG
        whole = log.read_text()
        without_seed = json.loads(whole)
        del without_seed["attempts"][1]["seed"]
        for text in (whole[: len(whole) // 2], "[]", "{}", json.dumps(without_seed)):
            log.write_text(text)
            with pytest.raises(UserError, match=rf"{LOG}.*damaged"):
                run(server, tmp_path, Budget(calls=3))
            assert log.read_text() == text, "the user may mend it"
        assert len(server.requests) == 2


ON_A_KERNEL_WITHOUT_LANDLOCK = """
import ctypes, os, sys
from pathlib import Path
from grpo.common.errors import UserError
from grpo.discovery.language_model import endpoint_from_environment, propose_with
from grpo.discovery.log import SearchSettings, open_log
from grpo.discovery.search import Budget, search
from grpo.discovery.verifier import verify_text
seccomp = ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint(0x7FFF0000)))
seccomp.seccomp_rule_add_array(context, ctypes.c_uint(0x50026), 444, ctypes.c_uint(0), None)  # ENOSYS, as Linux 5.12 says
assert seccomp.seccomp_load(context) == 0
endpoint = endpoint_from_environment(os.environ, "m")
try:
    propose_with(endpoint, "conversation")
except UserError as error:
    print(error)
os.environ["KISSING_UNFENCED"] = "1"
log = open_log(Path(sys.argv[1]), SearchSettings("conversation", 0))
search(propose_with(endpoint, "conversation"), verify_text, Budget(calls=2), log)
"""


@pytest.mark.skipif(not find_library("seccomp"), reason="takes a system call away with libseccomp")
def test_programs_run_where_reading_is_not_fenced_only_if_the_user_says_so(tmp_path: Path) -> None:
    """A key that a program may read there would come into its answer, and so into the next prompt."""
    (tmp_path / "key").write_text("PRIVATE KEY", encoding="utf-8")
    thief = saying(f"```python\nraise ValueError(open({str(tmp_path / 'key')!r}).read())\n```")
    with FakeEndpoint([thief]) as server:
        said = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": KEY}
        command = [sys.executable, "-c", ON_A_KERNEL_WITHOUT_LANDLOCK, str(tmp_path / "log.json")]
        done = subprocess.run(command, env=os.environ | said, capture_output=True, text=True, check=True)
        assert "could read whatever you may read" in done.stdout and "KISSING_UNFENCED=1" in done.stdout
        assert "PRIVATE KEY" in server.prompts()[1]  # what is at stake


CONTEXT = 2048  # tokens


@pytest.fixture(scope="module")
def vllm_server(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    from model_parts import FOR_VLLM, tiny_model

    from grpo.models.checkpoint import save_checkpoint

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
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield Endpoint(f"http://127.0.0.1:{port}/v1", "random")
    finally:
        server.terminate()
        server.wait(60)


def search_by(vllm_server: Endpoint, folder: Path, strategy: str, calls: int) -> list[Attempt]:
    log = Log(folder / "conversation_log.json", SearchSettings(strategy, 0, vllm_server.model, vllm_server.base_url))
    search(propose_with(vllm_server, strategy), verify_text, Budget(calls=calls), log)
    return log.attempts


@pytest.mark.vllm
def test_a_search_asks_vllm(vllm_server: Endpoint, tmp_path: Path) -> None:
    """The same answers for the same seeds, as long as the model's context allows."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, again = (search_by(vllm_server, tmp_path / name, "best_of_n", calls=3) for name in ("a", "b"))
    assert [attempt.proposal.calls for attempt in first] == [1, 1, 1]
    for attempt in first:
        assert attempt.proposal.answer and attempt.score == 0 and "code block" in attempt.verdict.message
        assert attempt.proposal.tokens > 50, "vLLM's own count, prompt included"
    assert [attempt.proposal.answer for attempt in first] == [attempt.proposal.answer for attempt in again]
    assert first[0].proposal.answer != first[1].proposal.answer


@pytest.mark.vllm
def test_a_model_that_is_not_served_is_named(vllm_server: Endpoint, tmp_path: Path) -> None:
    other = Endpoint(vllm_server.base_url, "other")
    with pytest.raises(UserError, match=r"The model `other` does not exist.*kissing_number.model"):
        search_by(other, tmp_path, "best_of_n", calls=1)
