"""Compiles the attention for Hopper in the variants that a server may launch; see hopper.py."""

import torch

from model_runner.attention.backend import AttentionOptions
from model_runner.attention.triton import TritonAttention
from model_runner.kv_cache import KVCache, KVShape
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.triton.hopper import report

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
HEADS = 4
PLAIN, CAPPED = AttentionOptions(0.1), AttentionOptions(0.1, window=64, softcap=30.0)
VARIANTS = [  # type of the query, of the cache, size of a head, options, exact
    *((torch.bfloat16, torch.bfloat16, dim, PLAIN, exact) for dim in (64, 128, 256) for exact in (True, False)),
    *((torch.bfloat16, dtype, 128, PLAIN, exact) for dtype in (torch.int8, FP8) for exact in (True, False)),
    *((torch.float16, dtype, 128, PLAIN, True) for dtype in (torch.float16, torch.int8, FP8)),
    (torch.bfloat16, FP8, 256, PLAIN, True),
    (torch.bfloat16, torch.bfloat16, 256, CAPPED, True),
    (torch.bfloat16, torch.bfloat16, 96, CAPPED, True),
]


def launch() -> None:
    """Decode a token, after a long prompt so that partial sums are merged, and for a prompt if its tiles differ."""
    for dtype, stored, dim, options, exact in VARIANTS:
        cache = KVCache([KVShape(1, dim, dim)], 20, 32, stored, CPU, whole_keys=True)
        attention = TritonAttention(cache, exact=exact, num_heads=HEADS, num_programs=8)
        for tokens in (1,) if exact else (1, 100):
            batch = make_batch([Chunk(range(tokens), 520, list(range(20)))], 32)
            query = torch.zeros(tokens, HEADS, dim, dtype=dtype)
            attention.attend(0, query, options, attention.prepare(batch))


if __name__ == "__main__":
    report(launch)
