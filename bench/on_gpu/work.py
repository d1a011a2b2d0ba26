"""Lower bounds of a decoder's work: bytes of device memory that a step reads, and floating-point operations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_runner.config import Quantization
from model_runner.modules.loading import inspect_model, load_config
from model_runner.spec.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits."""

    copy_bytes_per_s: float
    """Bytes read and written per second by a copy in the device's memory."""
    bf16_flop_per_s: float

    def least_ms(self, num_bytes: float, flops: float) -> float:
        """Lower bound in milliseconds for moving `num_bytes` bytes and computing `flops` operations in bfloat16."""
        return 1e3 * max(num_bytes / self.copy_bytes_per_s, flops / self.bf16_flop_per_s)


@dataclass(frozen=True, slots=True)
class DecoderWork:
    """Work of a model whose layers all have the same attention."""

    shape: ModelShape
    num_heads: int
    """Query heads in each layer."""

    @classmethod
    def of(cls, folder: Path) -> "DecoderWork":
        """Read the shape from a model's configuration."""
        config: Any = load_config(folder)
        return cls(inspect_model(config), config.num_attention_heads)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.shape.vocab_size * self.shape.hidden

    @property
    def layers(self) -> int:
        """Weights of the layers' products."""
        return self.shape.num_multiplied - self.head

    def weight_bytes(self, quantization: Quantization) -> int:
        """Bytes of weights that a step reads, without scales. The head, and weights unsuited for int4, have 16 bits."""
        shape = self.shape
        bits = {"fp8": 8 * shape.num_inner, "int4": 4 * shape.num_groupable}.get(quantization, 0)
        packed = {"fp8": shape.num_inner, "int4": shape.num_groupable}.get(quantization, 0)
        return bits // 8 + 2 * (shape.num_multiplied - packed)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of `tokens` tokens in all layers."""
        return tokens * sum(kv.num_bytes(dtype) for kv in self.shape.kv)

    def decode_bytes(self, rows: int, context: float, quantization: Quantization, kv_dtype: torch.dtype) -> int:
        """Bytes that a decode step of `rows` choices reads; `context` is their mean length with the new tokens."""
        return self.weight_bytes(quantization) + self.kv_bytes(round(rows * context), kv_dtype)

    def decode_flops(self, rows: int, context: float) -> float:
        """Operations of a decode step of `rows` choices with a mean context of `context` tokens."""
        return 2 * rows * (self.layers + self.head) + self._attention_flops(rows * context)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt of `tokens` tokens with causal attention, and of the head for its last token."""
        return 2 * (tokens * self.layers + self.head) + self._attention_flops(tokens * (tokens + 1) / 2)

    def _attention_flops(self, pairs: float) -> float:
        """Operations of attention's two products for `pairs` pairs of query and key, in all layers."""
        return 2 * pairs * self.num_heads * sum(kv.key_dim + kv.value_dim for kv in self.shape.kv)
