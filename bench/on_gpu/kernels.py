"""Measures single GPU kernels at the shapes of Llama-3.1-8B against the machine's limits and torch's kernels."""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.on_gpu.report import Figure, Report
from bench.on_gpu.timing import graph_ms
from bench.on_gpu.work import Limits
from model_runner.attention.backend import AttentionOptions
from model_runner.batch import Batch, BatchChoice, BatchMaker, LogitRows, StepTokens
from model_runner.kv_cache import KVCache, KVShape

LINEARS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
KINDS: Mapping[str, tuple[Literal["fp8", "int4"] | None, bool]] = {
    "exact": (None, True),
    "fast": (None, False),
    "fast fp8": ("fp8", False),
    "fast int4": ("int4", False),
}
BITS = {None: 16, "fp8": 8, "int4": 4}
ROWS = (1, 64, 8192)
HEADS, KV_HEADS, DIM = 32, 8, 128
DECODING, CONTEXT, PREFILL = 64, 1024, 8192
BLOCK = 32
BEYOND_CACHE = 256 << 20
"""Bytes that repeated runs cycle through, so that no input is cached."""
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Measures attention and linear kernels."""

    report: Report
    limits: Limits | None
    device: torch.device

    def measure(self) -> Figure:
        """Measure all kernels."""
        attempt = self.report.attempt
        for exact in (True, False):
            name = "exact" if exact else "fast"
            attempt("attention", f"{name}, decode", partial(self.decode_attention, name, BF16, exact=exact))
            attempt("attention", f"{name}, prefill", partial(self.prefill_attention, name, exact=exact))
        fp8 = partial(self.decode_attention, "exact, fp8 KV", torch.float8_e4m3fn, exact=True)
        attempt("attention", "exact, fp8 KV, decode", fp8)
        for name in KINDS:
            for rows in ROWS:
                attempt("linear", f"{name}, {rows} rows", partial(self.linears, name, rows))
        return Figure("kernels", "", note="done")

    def decode_attention(self, name: str, kv_dtype: torch.dtype, *, exact: bool) -> Figure:
        """Decode attention: one query per choice over its whole context."""
        shape = KVShape(KV_HEADS, DIM, DIM)
        num_bytes = DECODING * CONTEXT * shape.num_bytes(kv_dtype)
        layers = _copies(num_bytes)
        backend = self._attention(layers, DECODING * CONTEXT, kv_dtype, exact=exact)
        self._fill(backend, layers, DECODING, CONTEXT)
        metadata = backend.prepare(make_batch(DECODING, CONTEXT, CONTEXT - 1))
        query = self._random(DECODING, HEADS, DIM)
        ours = [partial(backend.attend, layer, query, _options(), metadata) for layer in range(layers)]
        keys, values = ([self._random(DECODING, KV_HEADS, CONTEXT, DIM) for _ in range(layers)] for _ in range(2))
        theirs = [
            partial(F.scaled_dot_product_attention, query[:, :, None], key, value, enable_gqa=True)
            for key, value in zip(keys, values, strict=True)
        ]
        flops = 4 * DECODING * CONTEXT * HEADS * DIM
        what = f"{name}, decode {DECODING} x {CONTEXT:,}"
        return self._figure("attention", what, (num_bytes, flops), ours, theirs)

    def prefill_attention(self, name: str, *, exact: bool) -> Figure:
        """Prefill attention: a prompt that attends to itself."""
        backend = self._attention(1, PREFILL, BF16, exact=exact)
        self._fill(backend, 1, 1, PREFILL)
        metadata = backend.prepare(make_batch(1, PREFILL, 0))
        query = self._random(PREFILL, HEADS, DIM)
        key, value = (self._random(1, KV_HEADS, PREFILL, DIM) for _ in range(2))
        attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        theirs = [partial(attention, query.transpose(0, 1)[None], key, value)]
        ours = [partial(backend.attend, 0, query, _options(), metadata)]
        num_bytes = 2 * PREFILL * DIM * 2 * (HEADS + KV_HEADS)
        flops = 2 * PREFILL * (PREFILL + 1) * HEADS * DIM
        return self._figure("attention", f"{name}, prefill {PREFILL:,}", (num_bytes, flops), ours, theirs)

    def linears(self, name: str, rows: int) -> Figure:
        """The linears of one layer, measured one by one and summed."""
        parts = {shape: self._linear(name, rows, shape) for shape in LINEARS}
        ours = sum(part["ms"] for part in parts.values())
        least_ms = sum(part["least_ms"] for part in parts.values())
        return Figure(
            "linear",
            f"{name}, {rows:,} rows",
            ours,
            of_limit=None if self.limits is None else least_ms / ours,
            plain=sum(part["torch_ms"] for part in parts.values()),
            note="linears of one layer, limit by the bf16 rate",
            details=parts,
        )

    def _linear(self, name: str, rows: int, shape_name: str) -> dict[str, float]:
        kind, exact = KINDS[name]
        from model_runner.cuda.linear import make_product  # noqa: PLC0415  (brings Triton)

        shape = LINEARS[shape_name]
        size = math.prod(shape) * BITS[kind] // 8
        weights = [self._random(*shape) * 0.02 for _ in range(_copies(size))]
        inputs = self._random(rows, shape[1])
        ours = [partial(make_product(weight, kind, exact=exact), inputs) for weight in weights]
        theirs = [partial(F.linear, inputs, weight) for weight in weights]
        num_bytes = size + 2 * rows * sum(shape)
        return {
            "ms": graph_ms(ours, self.device),
            "torch_ms": graph_ms(theirs, self.device),
            "least_ms": self._least_ms(num_bytes, 2 * rows * math.prod(shape)),
        }

    def _figure(
        self,
        part: str,
        what: str,
        least: tuple[float, float],
        ours: Sequence[Callable[[], object]],
        theirs: Sequence[Callable[[], object]],
    ) -> Figure:
        """Measure ours and torch's. `least` are the minimum bytes and operations of a run."""
        ours_ms, theirs_ms = graph_ms(ours, self.device), graph_ms(theirs, self.device)
        least_ms = self._least_ms(*least)
        of_limit = None if self.limits is None else least_ms / ours_ms
        return Figure(part, what, ours_ms, of_limit=of_limit, plain=theirs_ms, details={"least_ms": least_ms})

    def _least_ms(self, num_bytes: float, flops: float) -> float:
        """Lower bound of the time in milliseconds; NaN if the limits are unknown."""
        return math.nan if self.limits is None else self.limits.least_ms(num_bytes, flops)

    def _attention(self, layers: int, tokens: int, kv_dtype: torch.dtype, *, exact: bool) -> Any:
        shapes = [KVShape(KV_HEADS, DIM, DIM)] * layers
        cache = KVCache(shapes, tokens // BLOCK, BLOCK, kv_dtype, self.device)
        from model_runner.attention.triton import TritonAttention  # noqa: PLC0415  (brings Triton)

        return TritonAttention(cache, exact=exact, num_heads=HEADS)

    def _fill(self, backend: Any, layers: int, choices: int, context: int) -> None:
        """Store random keys and values at all positions, as a prefill step does."""
        metadata = backend.prepare(make_batch(choices, context, 0))
        for layer in range(layers):
            query = self._random(choices * context, HEADS, DIM)
            key, value = (self._random(choices * context, KV_HEADS, DIM) for _ in range(2))
            backend.forward(layer, query, key, value, _options(), metadata)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=BF16)


def _copies(num_bytes: int) -> int:
    return max(2, -(-BEYOND_CACHE // num_bytes))


def _options() -> AttentionOptions:
    return AttentionOptions(DIM**-0.5)


def make_batch(choices: int, context: int, start: int) -> Batch:
    """A batch with positions `start` to `context` of each choice, with all blocks allocated."""
    width, count = -(-context // BLOCK), context - start
    tokens = StepTokens([0] * choices * count, [start] * choices, [count] * choices)
    tables = [array("i", range(choice * width, (choice + 1) * width)) for choice in range(choices)]
    return BatchMaker(BLOCK).make([BatchChoice(blocks=table) for table in tables], tokens, LogitRows(()))
