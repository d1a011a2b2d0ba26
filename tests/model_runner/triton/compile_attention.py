"""Compiles the attention for Hopper in the variants that a server may launch; see hopper.py."""

from dataclasses import replace

import numpy as np
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
SINKS = AttentionOptions(0.1, sinks=torch.zeros(HEADS, dtype=torch.bfloat16), chunk=256)
SPANS = AttentionOptions(0.1, window=512, sees_spans=True)
VARIANTS = [  # type of the query, of the cache, size of a head, options, exact; those that differ most
    (torch.bfloat16, torch.bfloat16, 128, PLAIN, False),
    (torch.float16, FP8, 128, PLAIN, True),
    (torch.bfloat16, torch.bfloat16, 256, CAPPED, True),
    (torch.bfloat16, torch.bfloat16, 64, SINKS, True),
    (torch.bfloat16, torch.bfloat16, 256, SPANS, True),
]


def launch() -> None:
    """Decode a token, after a long prompt so that partial sums are merged; a prompt where its tiles differ."""
    for dtype, stored, dim, options, exact in VARIANTS:
        cache = KVCache([KVShape(1, dim, dim)], 20, 32, stored, CPU, whole_keys=True)
        attention = TritonAttention(cache, exact=exact, num_heads=HEADS, num_programs=8)
        tokens = 1 if exact else 100
        batch = make_batch([Chunk(range(tokens), 520, list(range(20)))], 32)
        if options.sees_spans:
            batch = replace(batch, span_last=np.full(tokens, 600))
        query = torch.zeros(tokens, HEADS, dim, dtype=dtype)
        attention.attend(0, query, options, attention.prepare(batch))


if __name__ == "__main__":
    report(launch)
