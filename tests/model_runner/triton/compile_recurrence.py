"""Compiles the kernels of recurrent layers for the sizes that models have."""

from dataclasses import astuple

import torch

from model_runner.kernels.triton.recurrence import RecurrenceSizes, convolve, recur, scan
from model_runner.recurrence.states import ConvShape, RecurrentShape, ScanShape, StateCache
from tests.model_runner.triton.hopper import report

SHAPES = (
    RecurrentShape(32, 16, 128, 128, delta=True, per_channel=False),  # Qwen3.5
    RecurrentShape(32, 32, 128, 128, delta=True, per_channel=True),  # Kimi Linear
    RecurrentShape(64, 8, 128, 64, delta=False, per_channel=False),  # Nemotron 3
    RecurrentShape(48, 1, 256, 64, delta=False, per_channel=False),  # Falcon-H1
)


def launch() -> None:
    """One token of one choice, a selective scan of Falcon-Mamba's and a convolution."""
    numbers, starts = torch.zeros(64, dtype=torch.int32), (0, 16, 20, 24, 28, 32, 1)
    for shape in SHAPES:
        cache = StateCache([shape], [], 1, 1, torch.device("cpu"))
        query, value = torch.zeros(1, shape.key_heads, shape.key_dim), torch.zeros(1, shape.heads, shape.value_dim)
        beta = torch.zeros(1, shape.heads) if shape.delta else None
        memory = cache.recurrent[0]
        parts = memory.keys, memory.decays, memory.updates, memory.states
        recur(RecurrenceSizes(*astuple(shape)), parts, numbers, starts, (query, value, beta), value)
    of_scan = StateCache([], [], 1, 1, torch.device("cpu"), scans=[ScanShape(8192, 16)]).scan[0]
    parts, rows = (of_scan.steps, of_scan.values, of_scan.inputs, of_scan.states), torch.zeros(1, 8192)
    scan(parts, numbers, starts, (torch.zeros(8192, 16), torch.zeros(1, 16)), rows)
    conv = StateCache([], [ConvShape(6144, 4)], 1, 1, torch.device("cpu")).conv[0]
    x, weight = torch.zeros(1, 6144), torch.zeros(6144, 4)
    convolve((conv.inputs, conv.last), torch.zeros(1, 3, dtype=torch.int32), x, weight, None, x, silu=True)


if __name__ == "__main__":
    report(launch)
