"""Small arrays of the host on their way to a device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """The array on the device. On CUDA nobody waits: it leaves from memory that torch keeps until it has left."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
