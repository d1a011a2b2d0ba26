"""Tiny checkpoints in the published formats, made with plain torch, and the formulas of their layers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_runner.heads.base import TargetShape

HIDDEN, VOCAB, LAYERS = 16, 40, 8
HEADS, KV_HEADS, DIM, INTERMEDIATE = 4, 2, 8, 24
EPS = 1e-5
TARGET = TargetShape(hidden=HIDDEN, vocab_size=VOCAB, num_layers=LAYERS)

Tensors = dict[str, Tensor]


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector, pair by pair as complex numbers: element i goes with element i + half."""
    half = len(x) // 2
    angles = position * torch.tensor([theta ** (-2 * i / len(x)) for i in range(half)])
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([pairs.real, pairs.imag])


class LayerOracle:
    """A decoder layer one token at a time, with every key kept: attention as a sum over them."""

    def __init__(self, tensors: Tensors, prefix: str, theta: float = 10000.0) -> None:
        self.weights = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        self.theta = theta
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, residual: Tensor, row: Tensor, position: int) -> Tensor:
        """The layer's output for one token [hidden]."""
        query, key, value = (
            (self.weights[f"self_attn.{name}_proj.weight"] @ row).view(-1, DIM) for name in ("q", "k", "v")
        )
        if "self_attn.q_norm.weight" in self.weights:
            query = rms(query, self.weights["self_attn.q_norm.weight"])
            key = rms(key, self.weights["self_attn.k_norm.weight"])
        self.keys.append(torch.stack([rotated(head, position, self.theta) for head in key]))
        self.values.append(value)
        outputs = []
        for index, head in enumerate(query):
            group = index // (HEADS // KV_HEADS)
            scores = torch.stack([rotated(head, position, self.theta) @ key[group] for key in self.keys]) * DIM**-0.5
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            outputs.append(sum(w * value[group] for w, value in zip(weights, self.values, strict=True)))
        hidden = residual + self.weights["self_attn.o_proj.weight"] @ torch.cat(outputs)
        normed = rms(hidden, self.weights["post_attention_layernorm.weight"])
        gate, up = (self.weights[f"mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        return hidden + self.weights["mlp.down_proj.weight"] @ (silu(gate) * up)


def layer_shapes(prefix: str, inputs: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, inputs),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, inputs),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, inputs),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }


LAYER_CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}


def causal_attention() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """An `Attend` that remembers what it was given: every token sees all before it, and itself."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        before = len(keys)
        keys.extend(key)
        values.extend(value)
        outputs = []
        for index, row in enumerate(query):
            seen = before + index + 1
            group = len(row) // key.shape[1]
            k = torch.stack(keys[:seen]).repeat_interleave(group, dim=1)  # [seen, heads, dim]
            v = torch.stack(values[:seen]).repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,shd->hs", row * attend_scale(row), k).softmax(-1)
            outputs.append(torch.einsum("hs,shd->hd", weights, v))
        return torch.stack(outputs)

    return attend


def attend_scale(row: Tensor) -> float:
    return float(row.shape[-1] ** -0.5)
