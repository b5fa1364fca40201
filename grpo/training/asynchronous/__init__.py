"""GRPO with generator, scorer and learner in Ray actors, which work at the same time.

:mod:`.loop` is the algorithm; :mod:`.actors` is what runs elsewhere, :mod:`.remote` how the loop speaks to it, :mod:`.worker`
what happens when it dies, :mod:`.replay` the buffer, and :mod:`.start` puts them together.
"""

import os
import tempfile
from pathlib import Path

# Since 2.60 Ray's clusters ask for the token in this file where there is one; what connects to them has to be told so,
# before Ray is imported.
if os.environ.get("RAY_ADDRESS") and (Path.home() / ".ray" / "auth_token").exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

# The names of Ray's sockets begin with the folder for temporary files. The kernel takes 107 characters, of which the rest of
# such a name needs 67: too few where a batch system names the folder.
if len(os.fsencode(tempfile.gettempdir())) > 40:
    os.environ.setdefault("RAY_TMPDIR", "/tmp")
