"""Decoder layers for CUDA on attention and products in plain torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionOptions
from model_runner.batch import Batch
from model_runner.cuda.layer import CudaDecoderLayer
from model_runner.kv_cache import KVCache, KVShape
from model_runner.modules.step import StepAttention
from model_runner.spec.layer_spec import LayerSpec
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.oracles.attention import ReferenceAttention, ReferenceMetadata

BLOCK = 16
NUM_BLOCKS = 12

Step = Sequence[tuple[int, int, int]]  # (sequence, start, end)


class TorchProduct:
    """A product that takes one row after the other, in float64."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.double()

    def __call__(self, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        result = rows.new_empty(len(rows), len(self._weight), dtype=torch.float64)
        for row, answer in zip(rows.double(), result, strict=True):
            torch.mv(self._weight, row, out=answer)
        for addend in (bias, residual):
            result = result if addend is None else result + addend
        return result.to(rows.dtype)


class WrittenAttention:
    """The reference's attention to keys and values that the layer has written."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._reference = ReferenceAttention(cache)

    def prepare(self, batch: Batch) -> Sequence[ReferenceMetadata]:
        return self._reference.prepare(batch)

    def slots(self, layer: int, metadata: Sequence[ReferenceMetadata]) -> Tensor:
        of_group = metadata[self.cache.group_of[layer]]
        return of_group.block_of * BLOCK + of_group.offset_of

    def attend(
        self, layer: int, query: Tensor, options: AttentionOptions, metadata: Sequence[ReferenceMetadata]
    ) -> Tensor:
        return self._reference.attend(layer, query, options, metadata)


def make_cache(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> KVCache:
    """For layers of these forms."""
    shapes = [KVShape(spec.mixer.kv_heads, spec.mixer.head_dim, spec.mixer.head_dim) for spec in specs]
    return KVCache(shapes, NUM_BLOCKS, BLOCK, dtype, device, whole_keys=True)


def step_batch(step: Step) -> Batch:
    """Sequence s has four blocks, in falling order."""
    tables = {s: [NUM_BLOCKS - 1 - s * 4 - block for block in range(4)] for s, _, _ in step}
    return make_batch([Chunk(range(start, end), start, tables[s]) for s, start, end in step], BLOCK)


class OneLayer:
    """A decoder layer for CUDA with a cache of its own."""

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._attention = WrittenAttention(make_cache([spec], dtype, device))
        self._layer = CudaDecoderLayer(0, spec, TorchProduct)

    def __call__(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor] | None, step: Step) -> Tensor:
        """Hidden [tokens, width] of the step's tokens -> the same shape; cos and sin [tokens, rotary_dim]."""
        attention: Any = StepAttention(self._attention, self._attention.prepare(step_batch(step)))  # type: ignore[arg-type]
        embeddings = None if cos_sin is None else (cos_sin[0][None], cos_sin[1][None])
        result: Tensor = self._layer(hidden[None], attention=attention, position_embeddings=embeddings)
        return result[0]
