"""Sampling with vLLM in this process, with the policy's current weights.

vLLM gets no tokenizer. With one it turns each token into text, in the thread that prepares the GPU's next step, to search for
stop strings. In place of that, its scheduler ends responses by their token ids and by the rules that all engines share
(:class:`Responses`): most tokens cannot end a response, which a look into a set tells.

vLLM's interfaces change between releases. Only this module and :mod:`grpo.rollout.vllm_weights` use them. Tested with the CPU
builds of vllm 0.32 and (ends of responses) 0.29.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo.common.errors import UserError
from grpo.common.records import Completion
from grpo.common.world import ALONE, World
from grpo.models.checkpoint import load_tokenizer
from grpo.models.examine import limited_context
from grpo.rollout.engine import CompletionSpec, Responses, SamplingParams, derive_seed, require_room_for, responses_of
from grpo.rollout.vllm_weights import put_weights
from grpo.study.software import install_vllm


@dataclass(frozen=True)
class VllmSettings:
    """Settings of vLLM."""

    dtype: str
    device: str
    gpu_memory_utilization: float  # share of GPU memory that vLLM may take
    max_batch_size: int  # number of sequences decoded at once
    # release vLLM's memory between calls. vLLM drops its weights (level 2) and loads the policy's when it wakes, so it needs a
    # GPU and a policy
    sleep: bool = False


class VllmEngine:
    """Engine that runs vLLM from a checkpoint folder, optionally with the weights of a model in this process.

    Raises UserError: vLLM is not installed, cannot start with these settings, or cannot take the policy's weights.

    Args:
        folder: in Hugging Face format.
        model: the policy, whose weights vLLM loads now and at each :meth:`synchronize`; None keeps the folder's weights.
        world: the processes that train the run together, each with its own vLLM on one GPU.
    """

    def __init__(self, folder: Path, model: Any, settings: VllmSettings, world: World = ALONE):
        # In this process, vLLM can load weights directly, and samples with torch's generator.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the learner uses the same threads
        try:
            from vllm import LLM
        except ImportError as error:
            raise UserError(
                f"params.yaml: engine.name: vllm cannot be imported ({error}). Install it with "
                f"`{install_vllm(settings.device)}` (docs/gpu.md), or set engine.name to transformers."
            ) from error
        self._policy, self._device, self._world, self._sleep = model, settings.device, world, settings.sleep
        self._tokenizer = load_tokenizer(folder)
        self.policy_version = 0
        self._awake = True
        on_cpu, share = settings.device == "cpu", settings.gpu_memory_utilization
        gpu = {} if on_cpu else {"gpu_memory_utilization": share, "enable_sleep_mode": settings.sleep}
        self._stops = Stops()
        try:
            self._llm = LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                scheduler_cls=stopping_scheduler(self._stops, asynchronous=not on_cpu),
                async_scheduling=not on_cpu,
                dtype=settings.dtype,
                max_num_seqs=settings.max_batch_size,
                enforce_eager=on_cpu,
                logprobs_mode="processed_logprobs",  # of the distribution that tokens are drawn from
                disable_log_stats=True,
                max_model_len=limited_context(folder),  # vLLM chooses LongRoPE's factors by it
                **gpu,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"vLLM could not start with {folder} ({' '.join(str(error).split())}). If memory is short, change "
                f"grpo.gpu_memory_utilization ({share}) or engine.max_batch_size ({settings.max_batch_size})."
            ) from error
        if world.size == 1:  # else the processes end their group themselves
            atexit.register(_end_process_group)
        self.context = int(self._llm.model_config.max_model_len)
        if model is not None:
            put_weights(self._llm, self._policy)
        self._rest()

    @contextmanager
    def turns(self) -> Iterator[None]:
        """See :class:`grpo.rollout.engine.Engine`: vLLM sleeps once, after the last call."""
        sleep, self._sleep = self._sleep, False
        try:
            yield
        finally:
            self._sleep = sleep
        self._rest()

    def synchronize(self, model: Any, policy_version: int) -> None:
        """Load ``model``'s weights; a sleeping engine does so when it wakes."""
        self._policy, self.policy_version = model, policy_version
        if self._awake:
            put_weights(self._llm, self._policy)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[CompletionSpec] = ()
    ) -> list[list[Completion]]:
        """See :class:`grpo.rollout.engine.Engine`.

        Raises UserError if a prompt and ``max_tokens`` together exceed the model's context, or vLLM ran out of memory.
        """
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        require_room_for(self.context, prompts, params, n, draws)
        self._wake()
        share = slice(None) if draws else self._world.share
        if draws:  # each completion is a request of its own, as its seed and limit are
            prompts = [prompt for prompt in prompts for _ in range(n)]
            least = [min(params.min_tokens, one.max_tokens) for one in draws]  # more than its limit is refused
            own = [replace(params, max_tokens=one.max_tokens, min_tokens=few) for one, few in zip(draws, least, strict=True)]
            settings = [request_settings(each, 1, one.seed, self._device, 1)[0] for each, one in zip(own, draws, strict=True)]
        else:
            settings = request_settings(params, n, seed, self._device, len(prompts))[share]
        # Only these tokens end a response, as in the other engine, and not the end-of-text token that vLLM assumes.
        ends = {"stop_token_ids": list(self._tokenizer.stop_token_ids), "ignore_eos": True}
        asked = [VllmSamplingParams(**each, **ends) for each in settings]
        # On a CPU only this seed decides, so samples depend on the number of processes; on a GPU it has no effect.
        torch.manual_seed(seed + self._world.rank)
        mine = [{"prompt_token_ids": list(ids)} for ids in prompts[share]]
        responses = self._stops.responses = responses_of(self._tokenizer, params.stop)
        try:
            outputs = self._llm.generate(mine, asked, use_tqdm=False) if mine else []
        except (torch.OutOfMemoryError, EngineDeadError) as error:
            raise UserError(
                f"vLLM ended while it sampled ({type(error).__name__}: {str(error).splitlines()[0]}). If memory is short, "
                "lower engine.max_batch_size, grpo.sampling_max_tokens or grpo.gpu_memory_utilization, or set "
                "engine.sleep_level to 2; then run the same command again."
            ) from error
        self._rest()
        completions = [[self._completion(responses, one) for one in output.outputs] for output in outputs]
        return [[one for (one,) in completions[i : i + n]] for i in range(0, len(completions), n)] if draws else completions

    def _completion(self, responses: Responses, output: Any) -> Completion:
        flat = output.logprobs  # the sampled token comes first at each position
        log_probs = [] if flat is None else [flat.logprobs[start] for start in flat.start_indices]
        return responses.completion(output.token_ids, log_probs, output.finish_reason, self.policy_version)

    def _rest(self) -> None:
        if self._sleep and self._awake:
            self._llm.sleep(level=2)
            self._awake = False

    def _wake(self) -> None:
        """Allocate memory again: for the weights, then load them, then for keys and values."""
        if self._awake:
            return
        torch.cuda.empty_cache()  # vLLM allocates outside of torch, whose cache may still hold memory of the learner
        self._llm.wake_up(tags=["weights"])
        put_weights(self._llm, self._policy)
        self._llm.wake_up(tags=["kv_cache"])
        self._awake = True


def _end_process_group() -> None:
    """End the process group that vLLM starts for itself; at the exit torch warns of one that is left."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def request_settings(params: SamplingParams, n: int, seed: int, device: str, prompts: int) -> list[dict[str, Any]]:
    """Build the arguments of each prompt's ``vllm.SamplingParams``.

    On a GPU vLLM does not use torch's generator, so each prompt gets its own seed, and vLLM gives its i-th completion seed + i.
    Prompt seeds are 62 random bits: two of them are never that close, and seed + i fits 63 bits. On a CPU seeds of single
    requests fail ("CPU Generator does not use offset"), and torch's generator is used.

    Args:
        n: completions of each prompt.
        seed: of the call.
        prompts: number of prompts.
    """
    shared = {
        "n": n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_tokens": params.min_tokens,
        "max_tokens": params.max_tokens,
        "detokenize": False,
        "logprobs": 0,  # of the sampled token only
        "flat_logprobs": True,  # a few lists instead of a dictionary and an object for each token
    }
    if device == "cpu":
        return [shared] * prompts
    return [shared | {"seed": derive_seed(seed, "prompt", i) >> 1} for i in range(prompts)]


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
