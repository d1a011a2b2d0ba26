"""Decoder layer of draft heads: a Llama layer whose attention comes from the caller."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.features import Feature
from model_runner.heads.base import Heads
from model_runner.heads.checkpoint import HeadsCheckpoint
from model_runner.kv_cache import KVShape

if TYPE_CHECKING:
    from transformers import LlamaConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query [n, heads, dim], key and value [n, kv_heads, dim], rotated -> [n, heads, value_dim].

Stores keys and values at the step's positions; a query sees its branch up to and including itself.
"""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [n, dim]."""

_ROTATES_BY_LENGTH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of the norms."""
    qkv_bias: bool = False
    norms_heads: bool = False
    """Whether queries and keys are normed before the rotation (Qwen3)."""

    @property
    def kv(self) -> KVShape:
        """Shape of a token's keys and values."""
        return KVShape(self.kv_heads, self.head_dim, self.head_dim, self.heads // self.kv_heads)

    @classmethod
    def of(cls, config: "LlamaConfig", names: frozenset[str], prefix: str) -> "LayerShape":
        """Sizes from the configuration; optional parts from the names of the tensors."""
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            eps=config.rms_norm_eps,
            qkv_bias=f"{prefix}self_attn.q_proj.bias" in names,
            norms_heads=f"{prefix}self_attn.q_norm.weight" in names,
        )


def layer_config(checkpoint: HeadsCheckpoint, entries: Mapping[str, Any]) -> "LlamaConfig":
    """The layer's configuration as a LlamaConfig. Raises HeadsError for options that are not supported."""
    from transformers import LlamaConfig  # noqa: PLC0415 - takes seconds, and most servers have no such heads

    activation = entries.get("hidden_act", "silu")
    if activation != "silu":
        raise checkpoint.error(f"their layer uses {activation}; only silu is supported")
    try:
        config = LlamaConfig.from_dict({**entries, "model_type": "llama"})
    except (TypeError, ValueError, KeyError) as error:
        raise checkpoint.error(f"config.json does not describe a decoder layer: {error}") from error
    kind = (config.rope_parameters or {}).get("rope_type")
    if kind in _ROTATES_BY_LENGTH:
        raise checkpoint.error(f"rotary scaling of type {kind} is not supported, because it depends on other requests")
    return config


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight.to(rows.dtype), self._eps)


class DraftAttention(nn.Module):
    """Rotary attention with grouped heads."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps) if shape.norms_heads else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.eps) if shape.norms_heads else nn.Identity()

    def forward(self, rows: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Rows [n, inputs] -> [n, hidden]."""
        query, key, value = (
            projection(rows).view(len(rows), -1, self._shape.head_dim)  # [n, heads, dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        output = attend(rotate(self.q_norm(query), rotation), rotate(self.k_norm(key), rotation), value)
        result: Tensor = self.o_proj(output.flatten(1))
        return result


class GatedMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return result


class DraftLayer(nn.Module):
    """Attention and MLP. The attention's input may be wider than the residual."""

    def __init__(self, shape: LayerShape, inputs: int | None = None) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, inputs or shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMLP(shape)

    def forward(self, residual: Tensor, rows: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Residual [n, hidden] and attention's rows [n, inputs] -> [n, hidden]."""
        hidden = residual + self.self_attn(rows, rotation, attend)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Rotary(nn.Module):
    """Rotary positions, computed by transformers for the configuration."""

    def __init__(self, config: "LlamaConfig") -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415 - as above

        super().__init__()
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, positions: Tensor) -> Rotation:
        """Positions [n] -> the rotation of each position."""
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self._rotary(like, positions.unsqueeze(0))
        return cos[0], sin[0]


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads [n, heads, dim]; the first half of the dimensions is paired with the second."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class RecurrentHeads(Heads):
    """Heads whose step at position i takes a state for i and the embedding of token i + 1, and predicts token i + 2.

    The first state of a position comes from the target's features there; later states are results of earlier steps.
    Keys and values of a position are from the step that had the target's features.
    """

    kv: KVShape
    """Shape of the keys and values that attention stores for each position."""
    scale: float
    """Scale of the attention scores."""

    @abstractmethod
    def first_state(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """Features of the target [n, hidden] at n positions -> their states [n, d]."""

    @abstractmethod
    def step(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States [n, d] after n positions.

        Args:
            embedded: [n, d] embeddings of the tokens after the positions, by `embed_tokens` if the heads have one.
            state: [n, d].
            positions: [n] int64.
            attend: attention over earlier positions, which also stores these.
        """

    @abstractmethod
    def logits(self, state: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [n, draft_vocab] of a step's states [n, d]; `target_head` is the target's own head."""
