"""The one exception type for mistakes a user can make.

The command line turns it into a single message on stderr and exit code 2. Every other exception is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, and what to do about it."""
