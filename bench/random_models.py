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
from transformers import AutoConfig, AutoModelForCausalLM

from model_runner.models.repository import resolve_model

SEED = 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The fields of config.json that differ between the models."""

    model_type: str
    fields: dict[str, Any]


FORMS = {
    # Llama-3.2-1B except for the vocabulary: 49,152 tokens instead of 128,256
    "llama-1b": ModelForm(
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
    "experts": ModelForm(
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
}


def make(form: ModelForm, folder: Path, tokenizer: Path) -> None:
    """Write config, bfloat16 weights, and the tokenizer from the folder `tokenizer`."""
    source = AutoConfig.from_pretrained(tokenizer)
    shared = {name: getattr(source, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(
        form.model_type, tie_word_embeddings=True, max_position_embeddings=8192, **shared, **form.fields
    )
    torch.manual_seed(SEED)
    models: Any = AutoModelForCausalLM
    models.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)


def main() -> None:
    """Create the model that the arguments name."""
    parser = argparse.ArgumentParser(description="Write a model with random weights to a folder.")
    parser.add_argument("form", choices=sorted(FORMS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make(FORMS[arguments.form], arguments.folder, resolve_model(None, Console(stderr=True)).path)


if __name__ == "__main__":
    main()
