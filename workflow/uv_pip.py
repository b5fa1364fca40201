"""Run ``uv pip ARGUMENTS...`` with pip's package sources, proxy and certificates, which uv does not read.

Variables of uv take precedence. If no package source is set, uv installs PyTorch's build for this machine's CPU or CUDA.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# pip's setting: uv's variable and what stands between several values in it
NAMES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
for line in sorted(listing.splitlines(), key=lambda line: line.startswith("global.")):  # after `:env:` and `install.`
    key, _, value = line.partition("=")
    name, between = NAMES.get(key.rpartition(".")[2], ("", ""))
    if name and not os.environ.get(name):
        os.environ[name] = between.join(ast.literal_eval(value).split())
if "UV_INDEX" in os.environ:
    os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # the best match of all indexes, as in pip
if not os.environ.keys() & {"UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_NO_INDEX"}:
    os.environ.setdefault("UV_TORCH_BACKEND", "auto")
no_index = ["--no-index"] if os.environ.pop("UV_NO_INDEX", "").lower() in {"1", "true", "yes", "on"} else []
uv = str(Path(sys.executable).with_name("uv"))
os.execv(uv, [uv, "pip", sys.argv[1], *no_index, *sys.argv[2:]])
