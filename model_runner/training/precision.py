"""In which type the products of training run."""

import time

import torch
import torch.nn.functional as F

_ROWS, _SIZE, _REPEATS = 256, 1024, 8


def product_type(device: torch.device) -> torch.dtype:
    """bfloat16 where its products are at least half again as fast as those of float32, which on CPUs is measured."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if _seconds(torch.bfloat16) * 1.5 < _seconds(torch.float32) else torch.float32


def _seconds(dtype: torch.dtype) -> float:
    """The quickest of some products: others on the machine only make them slower."""
    rows, weight = torch.zeros(_ROWS, _SIZE, dtype=dtype), torch.zeros(_SIZE, _SIZE, dtype=dtype)
    quickest = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        F.linear(rows, weight)
        quickest = min(quickest, time.perf_counter() - start)
    return quickest
