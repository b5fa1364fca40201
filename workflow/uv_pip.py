"""Run ``uv pip ARGUMENTS...`` with pip's settings for package sources, proxy and certificates, which uv does not read.

The settings come from ``pip config list``: pip's files and the environment variables PIP_... . Settings made for uv take
precedence. If no package source is set, uv installs PyTorch's build for this machine's CPU or CUDA.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PLACES = ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_NO_INDEX")
FALSE = {"", "0", "false", "no", "off"}


def read_settings(listing: str) -> dict[str, str]:
    """Parse pip's settings from the output of ``pip config list``."""
    rows = [line.partition("=") for line in listing.splitlines()]
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # later ones take precedence
        settings |= {key.removeprefix(section): ast.literal_eval(value) for key, _, value in rows if key.startswith(section)}
    return settings


def for_uv(pip: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Translate pip's settings to uv's environment variables; non-empty values in ``env`` take precedence."""

    def several(name: str) -> list[str]:
        return pip.get(name, "").split()

    extra = several("extra-index-url")
    found = {
        "UV_FIND_LINKS": ",".join(several("find-links")),
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(extra),
        "UV_INDEX_STRATEGY": "unsafe-best-match" if extra else "",  # the best match of all indexes, as in pip
        "UV_NO_INDEX": "" if pip.get("no-index", "").lower() in FALSE else "1",
        "UV_INSECURE_HOST": " ".join(several("trusted-host")),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "HTTP_PROXY": pip.get("proxy", ""),
        "HTTPS_PROXY": pip.get("proxy", ""),
    }
    set_for_uv = {key: value for key, value in env.items() if value}
    values = {key: value for key, value in found.items() if value} | set_for_uv
    if not any(place in values for place in PLACES):
        values.setdefault("UV_TORCH_BACKEND", "auto")
    return values


def main(arguments: list[str]) -> None:
    """Replace this process by uv."""
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    env = for_uv(read_settings(listing), os.environ)
    uv = str(Path(sys.executable).with_name("uv"))
    no_index = ["--no-index"] if env.pop("UV_NO_INDEX", "") else []  # uv has it only as an argument
    os.execve(uv, [uv, "pip", arguments[0], *no_index, *arguments[1:]], env)


if __name__ == "__main__":
    main(sys.argv[1:])
