"""Asynchronous GRPO: generator, scorer and learner are Ray actors that work concurrently.

:mod:`.loop` is the algorithm, :mod:`.actors` the code in the actors, :mod:`.remote` the loop's side of them, :mod:`.replay` the
replay buffer, and :mod:`.start` builds it all.
"""

import os
import tempfile
from pathlib import Path

# If this file exists, a Ray cluster (2.60 or newer) requires its token, and a client must set this before it imports Ray.
if os.environ.get("RAY_ADDRESS") and (Path.home() / ".ray" / "auth_token").exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

# Ray's socket names start with the temporary folder. The kernel allows 107 characters, of which the rest of the name takes 67;
# the temporary folders of batch systems are often longer than the remaining 40.
if len(os.fsencode(tempfile.gettempdir())) > 40:
    os.environ.setdefault("RAY_TMPDIR", "/tmp")
