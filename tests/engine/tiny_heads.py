"""Random heads for tiny models, in the published formats."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 64
INNER = 96
_LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
}


def write_medusa(folder: Path, vocab_size: int) -> Path:
    """Three heads of one layer."""
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    tensors = {}
    for head in range(3):
        tensors |= {
            f"{head}.0.linear.weight": _random(HIDDEN, HIDDEN),
            f"{head}.0.linear.bias": _random(HIDDEN),
            f"{head}.1.weight": _random(vocab_size, HIDDEN),
        }
    return _write(folder, config, tensors)


def write_hydra(folder: Path, vocab_size: int) -> Path:
    """Three heads of one layer."""
    config = {"hydra_num_heads": 3, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    tensors = {}
    for head in range(3):
        inputs = (head + 2) * HIDDEN
        tensors |= {
            f"hydra_mlp.{head}.0.linear.weight": _random(HIDDEN, inputs),
            f"hydra_mlp.{head}.0.linear.bias": _random(HIDDEN),
            f"hydra_mlp.{head}.0.res_connection.weight": _random(HIDDEN, inputs),
            f"hydra_mlp.{head}.0.res_connection.bias": _random(HIDDEN),
            f"hydra_lm_head.{head}.weight": _random(vocab_size, HIDDEN),
            f"hydra_lm_head.{head}.bias": _random(vocab_size),
        }
    return _write(folder, config, tensors)


def write_eagle3(folder: Path, vocab_size: int) -> Path:
    """EAGLE-3 with a draft vocabulary of every other token."""
    draft_ids = torch.arange(0, vocab_size, 2)
    tensors = {
        "fc.weight": _random(HIDDEN, 3 * HIDDEN),
        **_layer("midlayer.", 2 * HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(len(draft_ids), HIDDEN),
        "d2t": draft_ids - torch.arange(len(draft_ids)),
        "t2d": torch.arange(vocab_size) % 2 == 0,
    }
    config = {
        **_LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": vocab_size,
        "draft_vocab_size": len(draft_ids),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    return _write(folder, config, tensors)


def _layer(prefix: str, inputs: int) -> dict[str, Tensor]:
    return {
        f"{prefix}self_attn.q_proj.weight": _random(HIDDEN, inputs),
        f"{prefix}self_attn.k_proj.weight": _random(HIDDEN // 2, inputs),
        f"{prefix}self_attn.v_proj.weight": _random(HIDDEN // 2, inputs),
        f"{prefix}self_attn.o_proj.weight": _random(HIDDEN, HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}mlp.gate_proj.weight": _random(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": _random(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": _random(HIDDEN, INNER),
    }


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape) * shape[-1] ** -0.5


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
