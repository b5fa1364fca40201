"""AdamW on float32 weights, whatever precision the model computes in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError
from grpo.models.sharding import computing_dtype, fill, gather, is_sharded, share_of

BETAS = 0.9, 0.95
MOMENTS = "exp_avg", "exp_avg_sq"  # torch's names in the state of a weight
FIRST_SCALE, STEPS_TO_GROW = 2.0**16, 2000  # as torch.amp.GradScaler's


class LossScale:
    """What the loss is multiplied by, and its gradients divided by, where a model computes in float16.

    What is smaller than 6e-8 is 0 in float16, and many gradients are (mixed precision training, arXiv 1710.03740, Section 3.2).
    The scale is a power of two, so that neither rounds anything. It halves after a gradient that is not finite, and doubles
    after many steps without one. (``torch.amp.GradScaler`` does so too, reads from the device once more, and wants one of
    torch's optimizers.)

    Attributes:
        value: the scale.
        steps: taken in a row since it was last changed.
    """

    def __init__(self) -> None:
        self.value, self.steps = FIRST_SCALE, 0

    def follow(self, finite: bool) -> None:
        """Take note of a step's gradient."""
        grows = finite and self.steps + 1 == STEPS_TO_GROW
        self.steps = self.steps + 1 if finite and not grows else 0
        self.value *= 2.0 if grows else 1.0 if finite else 0.5


class Optimizer:
    """AdamW with betas 0.9 and 0.95, as in the handout, and the gradients of one step.

    A bfloat16 weight of size 1 cannot take a step below 0.004, and a learning rate of 1e-5 would leave most of them where they
    are; in float16 it is 0.0005. So of a model in half precision a float32 copy of each weight is kept: gradients are summed
    there and steps are taken there, and the model gets the rounded result. (Mixed precision training, arXiv 1710.03740,
    Section 3.1.)

    Args:
        model: whose parameters are trained.
        name: ``adamw``, or ``adamw_8bit``, whose two moments take a byte for each weight instead of four.
        weight_decay: the share of each weight that a step takes away, before it is multiplied by the learning rate.

    Attributes:
        scale: of the loss; None where the model does not compute in float16, and nothing is scaled.

    Raises:
        UserError: adamw_8bit without bitsandbytes.
    """

    def __init__(self, model: Any, learning_rate: float, name: str = "adamw", weight_decay: float = 0.0):
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.weights = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.parameters]
        for parameter, weight in zip(self.parameters, self.weights, strict=True):
            if parameter is not weight:
                parameter.register_post_accumulate_grad_hook(_add_to(weight))  # type: ignore[attr-defined, no-untyped-call]
        self.adamw = _adamw(name, self.weights, learning_rate, weight_decay)
        computing = {computing_dtype(model)} if is_sharded(model) else {p.dtype for p in model.parameters()}
        self.scale = LossScale() if torch.float16 in computing else None

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.adamw.param_groups[0]["lr"] = rate

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients to the others', times the scale."""
        (loss if self.scale is None else loss * self.scale.value).backward()  # type: ignore[no-untyped-call]

    def gradients(self) -> list[Tensor]:
        """The float32 gradient of each weight, summed over all backward passes since the last :meth:`step`; until
        :meth:`clip` times the scale.
        """
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def step(self, max_norm: float, loss: float = 0.0) -> tuple[float, bool]:
        """:meth:`clip` and :meth:`finish`; returns the norm before clipping, and whether the step was taken."""
        norm = self.clip(max_norm).item()
        return norm, self.finish(norm, loss)

    def clip(self, max_norm: float) -> Tensor:
        """Divide the gradients by the scale, and clip them to a norm; returns the norm before that, a number on the device, for
        which nothing has waited yet.
        """
        gradients = self.gradients()
        if self.scale is not None:
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        return gather(torch.nn.utils.clip_grad_norm_(self.weights, max_norm))

    def finish(self, norm: float, loss: float) -> bool:
        """Take a step, and free the gradients, which would lie beside the engine's memory until the next update.

        A step whose loss or gradient is not finite would ruin the weights for good, so it is skipped. Where the gradient alone
        is not, it may have grown too large for float16, and the scale halves.

        Returns:
            whether the step was taken.
        """
        if self.scale is not None and math.isfinite(loss):
            self.scale.follow(math.isfinite(norm))
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            self.adamw.step()
            with torch.no_grad():
                rounded = [i for i, weight in enumerate(self.weights) if weight is not self.parameters[i]]
                if rounded:
                    torch._foreach_copy_([self.parameters[i] for i in rounded], [self.weights[i] for i in rounded])
        for weight in self.weights:
            weight.grad = None
        return finite

    def state(self) -> dict[str, Any]:
        """The moments, the float32 weights where the model's own are rounded, and the scale where there is one."""
        pairs = zip(self.parameters, self.weights, strict=True)
        scale = {} if self.scale is None else {"scale": vars(self.scale).copy()}
        return {"adamw": self.adamw.state_dict(), "weights": [None if p is w else w.detach() for p, w in pairs], **scale}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`; the model's own weights are restored elsewhere."""
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
                    fill(weight, saved)


def _add_to(weight: Tensor) -> Any:
    """A hook that moves a parameter's new gradient into the float32 weight's sum."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if weight.grad is None:
            weight.grad = parameter.grad.float()
        else:
            weight.grad += parameter.grad
        parameter.grad = None

    return move


def _adamw(name: str, weights: list[Tensor], learning_rate: float, weight_decay: float) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(weights, lr=learning_rate, betas=BETAS, weight_decay=weight_decay, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, attr-defined]
    except ImportError as error:
        raise UserError(
            "params.yaml: learner.optimizer: adamw_8bit needs bitsandbytes: `pip install bitsandbytes`, or use adamw."
        ) from error
    return AdamW8bit(weights, lr=learning_rate, betas=BETAS, weight_decay=weight_decay)  # type: ignore[no-untyped-call]
