"""What comes only where it is used."""

from __future__ import annotations

import pytest

from grpo.common.errors import UserError
from grpo.common.imports import require_extra


def test_a_missing_extra_is_told_with_the_command_that_brings_it() -> None:
    with pytest.raises(UserError, match=r"an asynchronous run: needs no_such_package.*`pip install 'grpo-study\[ray\]'`"):
        require_extra("no_such_package", "ray", "an asynchronous run")
    require_extra("json", "ray", "anything")
