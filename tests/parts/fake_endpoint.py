"""An OpenAI-compatible endpoint on this machine that follows a script."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-secret-0123456789"
MODEL = "a-model"

# 22 vectors ±2e_i: norms 4, squared distances at least 8.
CROSS = """\
def run_code():
    points = []
    for i in range(11):
        for sign in (1, -1):
            points.append([2 * sign if j == i else 0 for j in range(11)])
    return points
"""
# And all signs on the first four coordinates: 16 more.
CROSS_AND_CUBE = f"""\
import itertools

{CROSS.replace("run_code", "cross")}
points = cross() + [[*signs] + [0] * 7 for signs in itertools.product((1, -1), repeat=4)]
"""
# Two vectors at squared distance 1, one of squared norm 4.
TOO_CLOSE = "points = [[2] + [0] * 10, [1] + [0] * 10]\n"


@dataclass(frozen=True)
class Behaviour:
    """What the endpoint does with a request: a status and a body, after a while, or nothing at all."""

    body: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    after_s: float = 0.0
    hang_up: bool = False


def saying(content: str, finish_reason: str = "stop") -> Behaviour:
    """An answer in due form, of 100 tokens."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    return Behaviour(json.dumps({"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}))


def program(text: str) -> Behaviour:
    return saying(f"Here it is:\n\n```python\n{text}```\n")


def refusing(status: int, message: str, **error: Any) -> Behaviour:
    """An error in due form."""
    return Behaviour(json.dumps({"error": {"message": message, **error}}), status)


GOOD = program(CROSS)  # 22 points
BETTER = program(CROSS_AND_CUBE)  # 38 points
BAD = program(TOO_CLOSE)
GARBAGE = saying("I would rather talk about the weather.")
UNFINISHED = saying("```python\ndef run_code():\n    points = [", "length")
SLOW = Behaviour("", after_s=30.0)
BUSY = Behaviour(json.dumps({"error": {"message": "too many requests"}}), 429, {"Retry-After": "0.5"})
BROKEN = refusing(500, "out of memory")
HANG_UP = Behaviour(hang_up=True)
NO_ENTRY = refusing(401, f"Incorrect API key provided: {KEY}.", code="invalid_api_key")

Script = Sequence[Behaviour] | Callable[[dict[str, Any]], Behaviour]


class FakeEndpoint:
    """The endpoint, as a context manager.

    Args:
        script: the behaviours one after another, the last of them for ever; or a function of a request's body.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._closing, self._lock = threading.Event(), threading.Lock()
        self.requests: list[dict[str, Any]] = []  # bodies
        self.headers: list[dict[str, str]] = []  # names in lower case
        self.paths: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> FakeEndpoint:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def prompts(self) -> list[str]:
        """The text of each request."""
        return ["\n".join(message["content"] for message in request["messages"]) for request in self.requests]

    def _next(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Behaviour:
        with self._lock:
            number = len(self.requests)
            self.paths.append(path)
            self.headers.append(headers)
            self.requests.append(body)
        if callable(self._script):
            return self._script(body)
        return self._script[min(number, len(self._script) - 1)]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                behaviour = endpoint._next(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                if behaviour.after_s:
                    endpoint._closing.wait(behaviour.after_s)
                if behaviour.hang_up:
                    self.close_connection = True
                    with suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return
                content = behaviour.body.encode()
                with suppress(OSError):  # the client may have given up
                    self.send_response(behaviour.status)
                    for name, value in {**behaviour.headers, "Content-Length": str(len(content))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        return Handler
