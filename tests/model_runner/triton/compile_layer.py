"""Compiles the kernels around a decoder layer's products in the variants that a server can launch."""

import torch

from model_runner.kernels.triton.kv_write import CacheLayer, write_kv
from model_runner.kernels.triton.linear import activate_and_multiply
from model_runner.kernels.triton.norm import add_and_norm, rms_norm
from model_runner.kernels.triton.rotary import rotate_and_write
from tests.model_runner.triton.hopper import report

KV_HEADS, BLOCK_SIZE = 8, 16


def make_cache(dtype: torch.dtype, dim: int) -> CacheLayer:
    heads = 2, KV_HEADS, BLOCK_SIZE
    keys, values = (torch.zeros(*heads, dim, dtype=dtype) for _ in range(2))
    scales = torch.zeros(heads) if dtype.itemsize == 1 else None
    return CacheLayer(keys.mT, values, scales, scales)


def launch_norms() -> None:
    """In two types; of two widths: 16 heads at once, and the widest that there are."""
    for dtype, width in ((torch.bfloat16, 128), (torch.bfloat16, 16384), (torch.float32, 16384)):
        rows, factor = torch.zeros(3, width, dtype=dtype), torch.zeros(width)
        rms_norm(rows, factor, 1e-5)
        add_and_norm(rows, rows, 0.5, factor, factor, 1e-5)
    rms_norm(rows, factor, 1e-5, is_centred=True)


def launch_gates() -> None:
    for dtype, activation in ((torch.bfloat16, "silu"), (torch.float32, "gelu_tanh")):
        activate_and_multiply(torch.zeros(3, 2 * 14336, dtype=dtype), activation)


def launch_writes() -> None:
    """Without rotation; with half of the dimensions rotated, and norms; with all, without norms."""
    slots = torch.zeros(3, dtype=torch.int64)
    for dtype, stored, dim, rotary_dim in (
        (torch.bfloat16, torch.bfloat16, 128, 128),
        (torch.float16, torch.float16, 64, 0),
        (torch.bfloat16, torch.float8_e4m3fn, 256, 128),
        (torch.float16, torch.int8, 64, 64),
        (torch.float32, torch.float32, 256, 128),
    ):
        key, cache = torch.zeros(3, KV_HEADS, dim, dtype=dtype), make_cache(stored, dim)
        write_kv(key, key, slots, cache)
        qkv, turn = torch.zeros(3, (32 + 2 * KV_HEADS) * dim, dtype=dtype), torch.zeros(3, rotary_dim, dtype=dtype)
        factor = torch.zeros(dim) if 0 < rotary_dim < dim else None
        rotate_and_write(qkv, (turn, turn) if rotary_dim else None, (factor, factor), 1e-5, slots, cache)


def launch() -> None:
    launch_norms()
    launch_gates()
    launch_writes()


if __name__ == "__main__":
    report(launch)
