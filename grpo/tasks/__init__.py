"""Tasks: problems, prompt formats, and verification of answers. Subclass Task for your own task."""

from __future__ import annotations

from grpo.common.imports import named_file
from grpo.common.records import Problem
from grpo.tasks import formats
from grpo.tasks.task import Format, Task

__all__ = ["Format", "Problem", "Task", "formats", "named_file"]
