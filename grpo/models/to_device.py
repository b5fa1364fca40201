"""Transfer of tensors to a device without waiting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(tensor: Tensor, device: Any) -> Tensor:
    """Copy a CPU tensor to a device without making the host wait.

    ``.to(device)`` alone copies to a GPU from pageable memory, and so waits for the GPU's earlier work.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
