"""What a decoder must do at least: bytes of device memory that a step reads, and floating-point operations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_runner.config import Quantization
from model_runner.models.loading import ModelShape, inspect_model, load_config


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at best."""

    copy_bytes_per_s: float
    """Read and written by a copy within the device's memory."""
    bf16_flop_per_s: float

    def least_ms(self, num_bytes: float, flops: float) -> float:
        """No implementation that moves so many bytes and computes so much in bfloat16 can be faster."""
        return 1e3 * max(num_bytes / self.copy_bytes_per_s, flops / self.bf16_flop_per_s)


@dataclass(frozen=True, slots=True)
class DecoderWork:
    """Of a model whose layers all have the same attention."""

    shape: ModelShape
    num_heads: int
    """Of queries, in each layer."""

    @classmethod
    def of(cls, folder: Path) -> "DecoderWork":
        """From the model's configuration."""
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
        """That every step reads once, without scales; the head always has 16 bits, and so has what int4 cannot hold."""
        shape = self.shape
        bits = {"fp8": 8 * shape.num_inner, "int4": 4 * shape.num_groupable}.get(quantization, 0)
        packed = {"fp8": shape.num_inner, "int4": shape.num_groupable}.get(quantization, 0)
        return bits // 8 + 2 * (shape.num_multiplied - packed)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Of so many tokens, in all layers."""
        return tokens * sum(kv.num_bytes(dtype) for kv in self.shape.kv)

    def decode_bytes(self, rows: int, context: float, quantization: Quantization, kv_dtype: torch.dtype) -> int:
        """Read by a step of `rows` choices that see `context` tokens each on average, their own included."""
        return self.weight_bytes(quantization) + self.kv_bytes(round(rows * context), kv_dtype)

    def decode_flops(self, rows: int, context: float) -> float:
        """Of that step."""
        return 2 * rows * (self.layers + self.head) + self._attention_flops(rows * context)

    def prefill_flops(self, tokens: int) -> float:
        """Of a prompt of so many tokens, which attend causally, and of the head for its last."""
        return 2 * (tokens * self.layers + self.head) + self._attention_flops(tokens * (tokens + 1) / 2)

    def _attention_flops(self, pairs: float) -> float:
        """Of the two products for so many pairs of a query and a key, in all layers."""
        return 2 * pairs * self.num_heads * sum(kv.key_dim + kv.value_dim for kv in self.shape.kv)
