"""Chooses the platform for a configuration."""

# Short: a separate module, so that only the chosen platform is imported.

from functools import partial

import torch

from model_runner.config import RunnerConfig
from model_runner.platforms.cpu import CpuPlatform
from model_runner.platforms.platform import Platform


def resolve_device(device: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        ValueError: if CUDA is requested but not available.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda is not available: torch finds no CUDA device; use --device cpu")
    return torch.device(device)


def choose_platform(config: RunnerConfig) -> Platform:
    """The platform for the configuration's device. Raises ValueError if it does not support a setting."""
    device = resolve_device(config.device)
    if device.type == "cpu":
        return CpuPlatform(config)
    # These import Triton, which the CPU does not need.
    from model_runner.cuda.graphs import CudaGraphs  # noqa: PLC0415
    from model_runner.platforms.cuda import CudaPlatform  # noqa: PLC0415

    device = torch.device("cuda", torch.cuda.current_device())
    return CudaPlatform(config, device, partial(CudaGraphs, device) if config.cuda_graphs else None)
