"""What the GPU can do at best, measured: the bandwidth of a copy and the rate of a bfloat16 matrix product."""

import torch

from bench.on_gpu.timing import median_ms
from bench.on_gpu.work import Limits

COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192


def measure_limits(device: torch.device, *, copy_bytes: int = COPY_BYTES, matrix_size: int = MATRIX_SIZE) -> Limits:
    """Medians, of buffers far beyond the cache and of random numbers: zeros are multiplied faster."""
    return Limits(_copy_bytes_per_s(device, copy_bytes), _matrix_flop_per_s(device, matrix_size))


def _copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Read and written."""
    source = torch.randint(1 << 62, (size // 8,), device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device) * 1e3


def _matrix_flop_per_s(device: torch.device, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_ms(lambda: torch.matmul(a, b, out=out), device) * 1e3
