"""To a device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(tensor: Tensor, device: Any) -> Tensor:
    """A CPU's tensor on a device; the host goes on at once.

    ``.to(device)`` alone copies to a GPU from memory that the system may move, and so waits until the GPU has done what it was
    given before.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
