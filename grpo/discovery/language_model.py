"""Proposals by a language model, at any endpoint with OpenAI's chat completions API."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from openai import APIConnectionError, APIStatusError, APITimeoutError, OpenAI, Timeout

from grpo.common.errors import UserError
from grpo.discovery.log import Attempt, Proposal
from grpo.discovery.sandboxed import landlock_version
from grpo.discovery.search import Propose
from grpo.discovery.strategies import REFUSED, STRATEGIES, Messages, extract_program, messages_of

UNANSWERED = "the endpoint did not answer"  # start of a proposal's ``problem`` if another request may succeed
UNFENCED = "KISSING_UNFENCED"  # environment variable; 1: run a language model's programs even if they can read any file
NO_KEY = "none"  # sent to a server that needs no key
TRIES = 5  # requests for one answer; the client waits longer each time, or as long as the endpoint asks
TIMEOUT, CONNECT = 600.0, 15.0  # seconds without data from the endpoint, and for the connection
TEMPERATURE = 1.0
SHORTEST_SECRET = 6  # characters; shorter keys are words such as "EMPTY", which may occur in any text
LONGEST_NOTE = 300  # characters of an endpoint's error in the log
UNKNOWN_MODEL = re.compile(r"\bmodel\b.{0,80}\bnot (found|exist)|\bnot a valid model\b", re.I)
CUT_SHORT = {  # finish reason -> problem
    "length": "the answer was cut by the length limit of the model",
    "content_filter": "the endpoint's content filter stopped the answer",
}


@dataclass(frozen=True)
class Endpoint:
    """Address, model and key of an endpoint."""

    base_url: str  # usually ends with /v1
    model: str
    key: str = field(default=NO_KEY, repr=False)  # never shown; ``NO_KEY`` if there is none


def endpoint_from_environment(environ: Mapping[str, str], model: str) -> Endpoint:
    """Read the endpoint of a model from OPENAI_BASE_URL and OPENAI_API_KEY.

    ``environ``: such as ``os.environ``. Raises UserError if the address is missing, or a value is invalid.
    """
    url = environ.get("OPENAI_BASE_URL", "").strip().rstrip("/")
    if not re.fullmatch(r"https?://[^\s@?#]+", url):  # the message does not show the address, which may contain a password
        raise UserError(
            "no address of an endpoint. Set OPENAI_BASE_URL to that of an OpenAI-compatible server, such as "
            "http://127.0.0.1:8000/v1, without a user, a query or a fragment, as the log shows it."
        )
    key = environ.get("OPENAI_API_KEY", "").strip() or NO_KEY
    if not (key.isascii() and key.isprintable()):
        raise UserError("OPENAI_API_KEY: holds characters that no key has. Set it to the key alone, or unset it.")
    return Endpoint(url, model, key)


def propose_with(endpoint: Endpoint, strategy: str) -> Propose:
    """Make the function that proposes programs by a language model, with one of ``STRATEGIES``.

    The function raises UserError if the endpoint refuses the key or the model, or if its address does not exist. Raises
    UserError if the sandbox cannot restrict reading on this system, and ``KISSING_UNFENCED`` is not 1.
    """
    if not landlock_version() and os.environ.get(UNFENCED) != "1":
        raise UserError(
            f"{strategy}: on this system the language model's programs could read whatever you may read, and send it to the "
            "model. Search on Linux 5.13 or newer with Landlock, or in a container without anything of value, with "
            f"{UNFENCED}=1."
        )
    model, plan = _Model(endpoint), STRATEGIES[strategy]

    def propose(attempts: Sequence[Attempt], seed: int) -> Proposal:
        held = plan(attempts)
        return model.ask(messages_of(attempts, held), seed, held)

    return propose


class _Model:
    """Client of an endpoint, which repeats requests after temporary errors."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        timeout = Timeout(TIMEOUT, connect=min(TIMEOUT, CONNECT))
        self._client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.key, timeout=timeout, max_retries=TRIES - 1)

    def ask(self, messages: Messages, seed: int, parents: tuple[int, ...]) -> Proposal:
        """Ask the model for a proposal; its ``problem`` is the reason if there is no program.

        Raises UserError if the endpoint refuses the key or the model, its address does not exist, or the account is empty.
        """
        url, model = self._endpoint.base_url, self._endpoint.model
        try:
            raw = self._client.chat.completions.with_raw_response.create(
                model=model, messages=cast(Any, messages), temperature=TEMPERATURE, seed=seed
            )
            # Raw JSON, because the client's classes do not check what they contain.
            return replace(self._read(raw.content, messages), parents=parents, calls=raw.retries_taken + 1)
        except APIStatusError as error:
            line = self._line(f"HTTP {error.status_code}: {error.response.text}")
            unknown = error.status_code == 400 and UNKNOWN_MODEL.search(line)
            if error.status_code in (401, 402, 403, 404) or error.code == "insufficient_quota" or unknown:
                raise UserError(
                    f"{url}: {line}. Check OPENAI_API_KEY and its account, kissing_number.model, which is {model} "
                    f"({url}/models lists the models), and OPENAI_BASE_URL, which usually ends with /v1."
                ) from error
            again = error.status_code in (408, 409, 429) or error.status_code >= 500
            calls, problem = (TRIES, f"{UNANSWERED}: {line}") if again else (1, f"{REFUSED}: {line}")
        except APITimeoutError:
            calls, problem = TRIES, f"{UNANSWERED}: nothing within {TIMEOUT:g} seconds"
        except APIConnectionError as error:
            calls, problem = TRIES, self._line(f"{UNANSWERED}: no connection: {error.__cause__ or error}")
        return Proposal(None, problem, parents, messages=messages, calls=calls)

    def _read(self, body: bytes, messages: Messages) -> Proposal:
        """Read the program from the body of an answer, or the reason why there is none."""
        try:
            value = json.loads(body)
            choice = value["choices"][0]
            content, refusal = (choice["message"].get(key) or "" for key in ("content", "refusal"))
            answer = self._clean(content or refusal)
            characters = sum(len(message["content"]) for message in messages) + len(answer)
            tokens = (value.get("usage") or {}).get("total_tokens") or -(-characters // 4)
        except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
            start = self._line(body[:100].decode("utf-8", "replace"))
            return Proposal(None, f"{UNANSWERED}: what it sent is malformed ({start})", messages=messages)
        program, problem = extract_program(answer)
        why = "the model refused to answer" if refusal and not content else CUT_SHORT.get(str(choice.get("finish_reason")))
        if program is None and why:
            problem = f"{why}: {problem}"
        return Proposal(program, problem, messages=messages, answer=answer, tokens=tokens)

    def _line(self, text: str) -> str:
        """Make a text one short line for the log."""
        return " ".join(self._clean(text).split())[:LONGEST_NOTE]

    def _clean(self, text: str) -> str:
        """Remove the key and invalid characters from a text of the endpoint."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        key = self._endpoint.key
        return text.replace(key, "***") if len(key) >= SHORTEST_SECRET else text
