"""AdamW on float32 weights, for models of any precision, and learning rate schedules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.common.errors import UserError
from grpo.models.sharding import computing_dtype, gather, is_sharded, share_of

if TYPE_CHECKING:  # a measurement on a bare machine has no pydantic
    from grpo.study.config import RunConfig

BETAS = 0.9, 0.95
MOMENTS = "exp_avg", "exp_avg_sq"  # torch's keys in the optimizer state of a weight
FIRST_SCALE, STEPS_TO_GROW = 2.0**16, 2000  # as torch.amp.GradScaler's


class LossScale:
    """Loss scale of a model that computes in float16: multiplies the loss and divides the gradients.

    Values below 6e-8 are 0 in float16, which many gradients are without a scale (mixed precision training, arXiv 1710.03740,
    Section 3.2). The scale is a power of two, so scaling does not round. It halves after a gradient that is not finite, and
    doubles after STEPS_TO_GROW steps without one. (``torch.amp.GradScaler`` does the same, but needs one more read from the
    device and one of torch's optimizers.)
    """

    def __init__(self) -> None:
        self.value, self.steps = FIRST_SCALE, 0  # steps in a row with a finite gradient since the last change

    def follow(self, finite: bool) -> None:
        """Adapt the scale to a step with a finite gradient or one that is not."""
        grows = finite and self.steps + 1 == STEPS_TO_GROW
        self.steps = self.steps + 1 if finite and not grows else 0
        self.value *= 2.0 if grows else 1.0 if finite else 0.5


class Optimizer:
    """AdamW, by default with betas 0.9 and 0.95, as in the handout, and the gradients of the current step.

    A bfloat16 weight of size 1 cannot change by less than 0.004 (float16: 0.0005), so most steps at a learning rate of 1e-5
    would have no effect. A model in half precision therefore has a float32 copy of each weight: gradients are summed and steps
    are taken in the copy, and the model gets the rounded result (mixed precision training, arXiv 1710.03740, Section 3.1).
    ``scale``: the loss scale; None unless the model computes in float16.

    Args:
        model: its parameters with ``requires_grad`` are trained.
        name: ``adamw``, or ``adamw_8bit``, whose two moments take one byte per weight instead of four; it needs bitsandbytes.
    """

    def __init__(
        self,
        model: Any,
        learning_rate: float,
        name: str = "adamw",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = BETAS,
        epsilon: float = 1e-8,
    ):
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.weights = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.parameters]
        for parameter, weight in zip(self.parameters, self.weights, strict=True):
            if parameter is not weight:
                parameter.register_post_accumulate_grad_hook(_add_to(weight))  # type: ignore[attr-defined, no-untyped-call]
        self.adamw = _adamw(name, self.weights, lr=learning_rate, betas=betas, eps=epsilon, weight_decay=weight_decay)
        computing = {computing_dtype(model)} if is_sharded(model) else {p.dtype for p in model.parameters()}
        self.scale = LossScale() if torch.float16 in computing else None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.adamw.param_groups[0]["lr"] = rate

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, times the scale, to those before."""
        (loss if self.scale is None else loss * self.scale.value).backward()  # type: ignore[no-untyped-call]

    def gradients(self) -> list[Tensor]:
        """Float32 gradients of all weights, summed since the last step, and times the scale until :meth:`clip`."""
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def step(self, max_norm: float, loss: float = 0.0) -> tuple[float, bool]:
        """Run :meth:`clip` and :meth:`finish`; return the norm before clipping, and whether the step was taken."""
        norm = self.clip(max_norm).item()
        return norm, self.finish(norm, loss)

    def clip(self, max_norm: float) -> Tensor:
        """Divide the gradients by the scale, and clip their norm; return the norm before, a scalar still on the device."""
        gradients = self.gradients()
        if self.scale is not None:
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        return gather(torch.nn.utils.clip_grad_norm_(self.weights, max_norm))

    def finish(self, norm: float, loss: float) -> bool:
        """Take the step, and free the gradients, which would take memory from the engine until the next update.

        A step whose loss or gradient norm is not finite would destroy the weights, so it is skipped, and False returned. If
        only the norm is not finite, the gradient may have overflowed in float16, and the scale halves.
        """
        if self.scale is not None and math.isfinite(loss):
            self.scale.follow(math.isfinite(norm))
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            self.adamw.step()
            with torch.no_grad():
                for parameter, weight in zip(self.parameters, self.weights, strict=True):
                    if parameter is not weight:
                        parameter.copy_(weight)
        for weight in self.weights:
            weight.grad = None
        return finite

    def state(self) -> dict[str, Any]:
        """The moments; the float32 copies of weights, None for weights without one; and the scale, if there is one."""
        pairs = zip(self.parameters, self.weights, strict=True)
        scale = {} if self.scale is None else {"scale": vars(self.scale).copy()}
        return {"adamw": self.adamw.state_dict(), "weights": [None if p is w else w.detach() for p, w in pairs], **scale}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state`; the caller restores the model's own weights."""
        moments = {
            i: {name: share_of(self.weights[i], value) if name in MOMENTS else value for name, value in of_weight.items()}
            for i, of_weight in state["adamw"]["state"].items()
        }
        self.adamw.load_state_dict(state["adamw"] | {"state": moments})
        if self.scale is not None:
            vars(self.scale).update(state["scale"])
        with torch.no_grad():
            for weight, saved in zip(self.weights, state["weights"], strict=True):
                if saved is not None:
                    weight.copy_(share_of(weight, saved))


def learning_rate(config: RunConfig, update: int) -> float:
    """Learning rate of one update.

    It rises linearly from 0 over ``warmup_steps`` updates. Then it stays (``constant``), or it falls linearly or along half a
    cosine (SGDR, arXiv 1608.03983, Equation 5, without restarts), to reach 0 one update after the last. The rates equal those
    of transformers' ``get_scheduler`` (``constant`` is its ``constant_with_warmup``), so the first warm-up update has rate 0.
    They depend on the arguments only, so a resumed run continues with the same rates. ``update``: number of updates before this
    one, including skipped ones.
    """
    peak, warmup, total = config.learning_rate, config.warmup_steps, config.n_updates
    if update < warmup:
        return peak * update / warmup
    if config.lr_scheduler_type == "constant" or total is None:
        return peak
    done = (update - warmup) / (total - warmup)
    return peak * (1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def _add_to(weight: Tensor) -> Any:
    """Make a hook that moves a parameter's new gradient into the float32 sum of its copy."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if weight.grad is None:
            weight.grad = parameter.grad.float()
        else:
            weight.grad += parameter.grad
        parameter.grad = None

    return move


def _adamw(name: str, weights: list[Tensor], **settings: Any) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(weights, **settings, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, attr-defined]
    except ImportError as error:
        raise UserError(
            "params.yaml: learner.optimizer: adamw_8bit needs bitsandbytes: `pip install bitsandbytes`, or use adamw."
        ) from error
    return AdamW8bit(weights, **settings)  # type: ignore[no-untyped-call]
