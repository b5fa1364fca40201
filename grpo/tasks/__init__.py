"""Tasks: problems, the formats they are put in, and how answers are verified. A task of one's own is a subclass of Task."""

from __future__ import annotations

from grpo.common.imports import named_file
from grpo.common.records import Problem
from grpo.tasks import formats
from grpo.tasks.task import Format, Task

__all__ = ["Format", "Problem", "Task", "formats", "named_file"]
