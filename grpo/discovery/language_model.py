"""A language model as the proposer of programs: any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, APITimeoutError, OpenAI, Timeout
from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential, wait_random

from grpo.common.errors import UserError
from grpo.discovery.log import Attempt, Proposal
from grpo.discovery.search import Propose
from grpo.discovery.strategies import REFUSED, STRATEGIES, Messages, extract_program

NO_KEY = "none"  # sent to a server that wants none
FIRST_WAIT = 1.0  # seconds before the second try; then twice as long each time, and a random part
LONGEST_WAIT = 60.0  # seconds, also where the endpoint asks for more
CONNECT = 15.0  # seconds for the connection, which a server at work makes at once
SHORTEST_SECRET = 6  # characters; shorter keys are words such as "EMPTY", which texts may hold by themselves
LONGEST_NOTE = 300  # characters of an endpoint's error in the log

AGAIN = {408, 409, 429}  # and all from 500 on: what may be over in a moment
# What endpoints say where prompt and longest answer together do not fit into the model's context.
TOO_LONG = re.compile(r"max_tokens|max_completion_tokens|max_model_len|in the completion|context length", re.I)
UNKNOWN_MODEL = re.compile(
    r"\bmodel\b.{0,80}\b(not found|does not exist|not exist|unknown)|\b(unknown|invalid|no such|not a valid) model", re.I | re.S
)


@dataclass(frozen=True)
class Endpoint:
    """Where a language model is, and how it is asked.

    Attributes:
        base_url: usually ends with /v1.
        key: never shown; ``NO_KEY`` if there is none.
        timeout: seconds without anything from the endpoint, after which a request has failed.
        max_tokens: of an answer, reasoning included.
        tries: requests for one answer, the first included.
    """

    base_url: str
    model: str
    key: str = field(default=NO_KEY, repr=False)
    timeout: float = 600.0
    temperature: float = 1.0
    max_tokens: int = 16_384
    tries: int = 5

    def __post_init__(self) -> None:
        """Raise UserError where a value makes no sense."""
        least = {"timeout": 0.001, "temperature": 0, "max_tokens": 1, "tries": 1}
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise UserError(f"the endpoint's {name} is {getattr(self, name)}; it must be at least {value}")


def endpoint_from_environment(environ: Mapping[str, str], base_url: str | None = None, model: str | None = None) -> Endpoint:
    """The endpoint that OPENAI_BASE_URL, OPENAI_MODEL and OPENAI_API_KEY describe.

    Args:
        environ: such as ``os.environ``.
        base_url: instead of OPENAI_BASE_URL, if given.
        model: instead of OPENAI_MODEL, if given.

    Raises:
        UserError: a value is missing (only the key may be), or is none that could work.
    """
    url = (base_url or environ.get("OPENAI_BASE_URL", "")).strip().rstrip("/")
    if not url:
        raise UserError(
            "no endpoint is given. Set OPENAI_BASE_URL to the address of an OpenAI-compatible server, such as "
            "http://127.0.0.1:8000/v1 of vLLM."
        )
    _check_url(url)
    name = (model or environ.get("OPENAI_MODEL", "")).strip()
    if not name:
        raise UserError(f"no model is given. Set OPENAI_MODEL to the name of one that {url} serves ({url}/models lists them).")
    key = environ.get("OPENAI_API_KEY", "").strip() or NO_KEY
    if not (key.isascii() and key.isprintable()):
        raise UserError("OPENAI_API_KEY: holds characters that no key has. Set it to the key alone, or unset it.")
    return Endpoint(url, name, key)


def _check_url(url: str) -> None:
    example = "an address such as http://127.0.0.1:8000/v1"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
        parts = urlsplit("")
    # What it holds is not told, in case it is a password.
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"the endpoint's address holds a user, a query or a fragment, and the log would show it. Give {example}; a key "
            "belongs into OPENAI_API_KEY."
        )
    if not usable:
        raise UserError(f"{url}: no address of an endpoint. Set OPENAI_BASE_URL to {example}.")


def propose_with(endpoint: Endpoint, strategy: str) -> Propose:
    """Proposals of the language model at an endpoint, asked as one of ``STRATEGIES`` says.

    A proposal raises UserError where the endpoint refuses the key or the model, or has no such address.

    Raises:
        UserError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"{strategy}: no such strategy. Name one of {', '.join(STRATEGIES)}.")
    model, plan = _Model(endpoint), STRATEGIES[strategy]

    def propose(attempts: Sequence[Attempt], seed: int) -> Proposal:
        parents, messages = plan(attempts, seed)
        record = _Record()
        try:
            reply = model.ask(messages, seed, record)
        except _Failed as failure:
            what = "the endpoint did not answer" if failure.again else REFUSED
            program, problem, answer, tokens = None, f"{what}: {failure}", None, 0
        else:
            answer, tokens = reply.answer, reply.tokens
            program, problem = extract_program(answer)
            if program is None and reply.why:
                problem = f"{reply.why}: {problem}"
        return Proposal(
            program=program,
            problem=problem,
            parents=parents,
            messages=messages,
            answer=answer,
            tokens=tokens,
            calls=record.calls,
            errors=tuple(record.errors),
        )

    return propose


@dataclass
class _Record:
    """Of the requests for one proposal, how many there were, and a line of each that failed."""

    calls: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Reply:
    """An answer, what it cost, and what may have kept a program out of it ("" if it ended as it should)."""

    answer: str
    tokens: int
    why: str


class _Failed(Exception):
    """A request without an answer. ``again``: it is worth repeating, after at least ``wait`` seconds."""

    def __init__(self, line: str, again: bool = True, wait: float = 0.0) -> None:
        super().__init__(line)
        self.again, self.wait = again, wait


class _Model:
    """Asks, and asks again."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = OpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.key,
            timeout=Timeout(endpoint.timeout, connect=min(endpoint.timeout, CONNECT)),
            max_retries=0,
        )
        self._takes_seed = True
        self._limit: str | None = "max_tokens"  # what the endpoint calls it; None where it wants no limit of ours

    def ask(self, messages: Messages, seed: int, record: _Record) -> _Reply:
        """The answer to a prompt.

        Raises:
            _Failed: all tries were in vain, or there is no use in another one.
            UserError: the endpoint refuses the key or the model, or has no such address.
        """
        retrying = Retrying(
            stop=stop_after_attempt(self._endpoint.tries),
            wait=_wait,
            retry=_worth_repeating,
            reraise=True,
        )
        return retrying(self._try, messages, seed, record)

    def _try(self, messages: Messages, seed: int, record: _Record) -> _Reply:
        """One try: one request, or more where the endpoint turns out to want another form of it."""
        record.calls += 1
        try:
            return self._request(messages, seed)
        except APIStatusError as error:
            line = self._line(f"HTTP {error.status_code}: {_message_of(error)}")
            if error.status_code in (400, 422) and (change := self._adapt(line)):
                record.errors.append(f"{line}; asked again {change}")
                return self._try(messages, seed, record)
            self._check_mistake(error, line)
            failure = _Failed(line, error.status_code in AGAIN or error.status_code >= 500, _retry_after(error))
        except APITimeoutError:
            failure = _Failed(f"no answer within {self._endpoint.timeout:g} seconds")
        except APIConnectionError as error:
            failure = _Failed(self._line(f"no connection: {error.__cause__ or error}"))
        except _Malformed as error:
            failure = _Failed(self._line(f"a malformed answer ({error})"))
        record.errors.append(str(failure))
        raise failure from None

    def _request(self, messages: Messages, seed: int) -> _Reply:
        raw = self._client.chat.completions.with_raw_response.create(
            model=self._endpoint.model,
            messages=cast(Any, messages),
            temperature=self._endpoint.temperature,
            **cast(Any, {self._limit: self._endpoint.max_tokens} if self._limit else {}),
            **cast(Any, {"seed": seed} if self._takes_seed else {}),
        )
        # Not the client's own classes, which hold whatever came, unchecked.
        return self._reply(raw.content, messages)

    def _adapt(self, line: str) -> str:
        """Change the form of all requests from now on, if the endpoint complains of it; the change in words, or ""."""
        if self._takes_seed and re.search(r"\bseed\b", line):
            self._takes_seed = False
            return "without seed"
        if self._limit == "max_tokens" and "max_completion_tokens" in line and "instead" in line:
            self._limit = "max_completion_tokens"
            return "with max_completion_tokens"
        if self._limit and TOO_LONG.search(line):  # then an answer ends where the model's context does
            self._limit = None
            return f"without a limit of {self._endpoint.max_tokens} tokens to the answer"
        return ""

    def _reply(self, body: bytes, messages: Messages) -> _Reply:
        """Read the body of an answer.

        Raises:
            _Malformed: it is not what an endpoint should send.
        """
        start = body[:100].decode("utf-8", "replace")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise _Malformed(f"not JSON: {start}") from None
        try:
            choice = value["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason")
            content, refusal = message.get("content") or "", message.get("refusal") or ""
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _Malformed(f"without a choice: {start}") from None
        if not isinstance(content, str) or not isinstance(refusal, str):
            raise _Malformed(f"its content is no text: {start}")
        why = {
            "length": f"the answer was cut by the length limit ({self._endpoint.max_tokens} tokens, or the model's context)",
            "content_filter": "the endpoint's content filter stopped the answer",
        }.get(str(finish), "")
        if refusal and not content:
            why = "the model refused to answer"
        answer = self._clean(content or refusal)
        return _Reply(answer, _tokens(value.get("usage"), messages, answer), why)

    def _check_mistake(self, error: APIStatusError, line: str) -> None:
        """Raise UserError if the endpoint says that the key, the model or the address is wrong, or not paid for."""
        url, model, status = self._endpoint.base_url, self._endpoint.model, error.status_code
        if status in (401, 403):
            which = "a" if self._endpoint.key == NO_KEY else "another"
            raise UserError(
                f"{url}: refuses access ({line}). Set OPENAI_API_KEY to {which} key, which may use the model {model}."
            )
        if status == 402 or error.code == "insufficient_quota":
            raise UserError(f"{url}: nothing is left to pay for the answer ({line}). Check the account of OPENAI_API_KEY.")
        if status == 404 or (status == 400 and UNKNOWN_MODEL.search(line)):
            raise UserError(
                f"{url}: has no model {model}, or is no address of an endpoint ({line}). Check OPENAI_MODEL ({url}/models "
                "lists the models) and OPENAI_BASE_URL, which usually ends with /v1."
            )

    def _line(self, text: str) -> str:
        """A text for the log, in one line."""
        return " ".join(self._clean(text).split())[:LONGEST_NOTE]

    def _clean(self, text: str) -> str:
        """A text of the endpoint without the key, should it hold it, and without what is no character and cannot be written."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        key = self._endpoint.key
        return text.replace(key, "***") if len(key) >= SHORTEST_SECRET else text


class _Malformed(Exception):
    """An answer that is not what an endpoint should send."""


def _worth_repeating(state: RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome else None
    return isinstance(error, _Failed) and error.again


def _wait(state: RetryCallState) -> float:
    """Seconds before the next try: twice as long each time, with a random part, and not less than the endpoint asks for."""
    backoff = (wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT) + wait_random(0, FIRST_WAIT))(state)
    error = state.outcome.exception() if state.outcome else None
    return min(max(backoff, error.wait if isinstance(error, _Failed) else 0.0), LONGEST_WAIT)


def _retry_after(error: APIStatusError) -> float:
    """Seconds that the endpoint asks to wait; 0 if it does not say."""
    value = str(error.response.headers.get("retry-after", "")).strip()
    return float(value) if re.fullmatch(r"\d{1,9}(\.\d+)?", value, re.ASCII) else 0.0


def _message_of(error: APIStatusError) -> str:
    """What the body of an error says."""
    body = error.body
    if isinstance(body, dict):
        return str(body.get("message") or body.get("detail") or body)
    return error.response.text or error.response.reason_phrase


def _tokens(usage: Any, messages: Messages, answer: str) -> int:
    """The endpoint's count, or a quarter of the characters where it gives none."""
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(total, int) and total > 0:
        return total
    return -(-(sum(len(message["content"]) for message in messages) + len(answer)) // 4)
