"""The former place of :func:`grpo.study.paths.stage_of_run`, for the rooms that still import it from here."""

from grpo.study.paths import stage_of_run

__all__ = ["stage_of_run"]
