"""Creates models of known shapes with random weights, for measurements of speed: `python -m bench.random_models`.

The seed is fixed, so the weights are always the same. Tokenizer and vocabulary are the embedded model's.
"""

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from model_runner.hub.repository import resolve_model

SEED = 20
STD = 0.02
MXFP4_BLOCK = 32
"""Weights with one scale."""
MXFP4_SCALE = 120
"""2 ** -7, with which the weights vary about as much as the others."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The fields of config.json that differ between the models."""

    model_type: str
    fields: dict[str, Any]
    experts_in_mxfp4: bool = False
    """Whether experts are stored as gpt-oss publishes them."""


FORMS = {
    # Llama-3.2-1B except for the vocabulary: 49,152 tokens instead of 128,256
    "llama-1b": ModelSpec(
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    # 510 M parameters, of which a token uses about 114 M
    "experts": ModelSpec(
        "qwen3_moe",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "intermediate_size": 2048,  # unused: only for layers without experts
            "norm_topk_prob": True,
        },
    ),
    # Qwen3.5-0.8B except for the vocabulary
    "qwen3.5-0.8b": ModelSpec(
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    # gpt-oss-20b with 8 layers of 24, except for the vocabulary
    "gpt-oss-8-layers": ModelSpec(
        "gpt_oss",
        {
            "num_hidden_layers": 8,
            "num_local_experts": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "tie_word_embeddings": False,
        },
        experts_in_mxfp4=True,
    ),
}


def make(spec: ModelSpec, folder: Path, tokenizer: Path) -> None:
    """Write config, bfloat16 weights, and the tokenizer from the folder `tokenizer`."""
    source = AutoConfig.from_pretrained(tokenizer)
    shared = {name: getattr(source, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    fields = {"tie_word_embeddings": True, "max_position_embeddings": 8192, **shared, **spec.fields}
    config = AutoConfig.for_model(spec.model_type, **fields)
    torch.manual_seed(SEED)
    models: Any = AutoModelForCausalLM
    if spec.experts_in_mxfp4:
        _write_in_mxfp4(models, config, folder)
    else:
        models.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)


def _write_in_mxfp4(models: Any, config: Any, folder: Path) -> None:
    """Write config and weights without ever holding the experts in bfloat16."""
    with torch.device("meta"):
        model = models.from_config(config, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            experts, inputs, outputs = weight.shape
            groups = experts, outputs, inputs // MXFP4_BLOCK
            tensors[f"{name}_blocks"] = torch.randint(256, (*groups, MXFP4_BLOCK // 2), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(groups, MXFP4_SCALE, dtype=torch.uint8)
        elif weight.dim() == 1 and name.endswith("norm.weight"):
            tensors[name] = torch.ones(weight.shape, dtype=torch.bfloat16)
        else:
            tensors[name] = (torch.randn(weight.shape) * STD).bfloat16()
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    """Create the model that the arguments name."""
    parser = argparse.ArgumentParser(description="Write a model with random weights to a folder.")
    parser.add_argument("form", choices=sorted(FORMS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make(FORMS[arguments.form], arguments.folder, resolve_model(None, Console(stderr=True)).path)


if __name__ == "__main__":
    main()
