"""The end of responses in vLLM by their token ids.

vLLM ends a response at a stop token in its scheduler, and at a stop string in another object, which detokenises each token of
each response to find it. Here its scheduler does both, by the rules that all engines share (:class:`Responses`): most tokens
cannot end a response, which a look into a set tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo.common.errors import UserError
from grpo.rollout.responses import Responses


@dataclass
class Stops:
    """What ends the responses of the present call of :meth:`Engine.generate`."""

    responses: Responses | None = None

    def end(self, request: Any) -> bool:
        """Whether the newest token of a request of vLLM ends its response; not within its ``min_tokens``."""
        ids = request.output_token_ids
        return self.responses is not None and len(ids) > request.sampling_params.min_tokens and self.responses.has_ended(ids)


def stopping_scheduler(stops: Stops, asynchronous: bool) -> type:
    """Derive the class of a scheduler from vLLM's own (the setting ``scheduler_cls``).

    ``asynchronous``: from the one that schedules a step before the former one has ended, which vLLM uses on a GPU. Raises
    UserError if the scheduler of this version of vLLM takes a step's tokens in another way.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    base: Any = AsyncScheduler if asynchronous else Scheduler
    if not hasattr(base, "_update_request_with_output"):
        raise UserError("This version of vLLM cannot be told where responses end. Install vllm>=0.26,<0.33.")

    class StoppingScheduler(base):  # type: ignore[misc]
        def _update_request_with_output(self, request: Any, new_token_ids: list[int], **more: Any) -> tuple[list[int], bool]:
            new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, **more)
            if new_token_ids and stops.end(request):
                request.status, stopped = RequestStatus.FINISHED_STOPPED, True
            return new_token_ids, stopped

    return StoppingScheduler
