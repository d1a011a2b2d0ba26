"""Creates image-text models of known shapes with random weights, for measurements of speed and memory."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from bench.random_models import SEED, TOKENIZER_FILES


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The fields of the files of a model that reads images."""

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: dict[str, Any]
    """Settings of the image processor."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of config.json."""
    of_text: dict[str, Any] = field(default_factory=dict)
    """Content of processor_config.json."""


_SMALL_TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
FORMS = {
    "tiny": ImageForm(
        "llava",
        {**_SMALL_TEXT, "model_type": "llama", "num_hidden_layers": 2},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "projection_dim": 64,
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        {"image_seq_length": 16},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    # LLaVA-1.5's tower, with a small language model
    "llava": ImageForm(
        "llava",
        {**_SMALL_TEXT, "model_type": "llama"},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
        {"image_seq_length": 576},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    # SmolVLM-256M
    "smolvlm": ImageForm(
        "smolvlm",
        {**_SMALL_TEXT, "model_type": "llama"},
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
        },
        {"scale_factor": 4},
        {"image_seq_len": 64},
    ),
    # Qwen2.5-VL's tower with half of the layers, with a small language model
    "qwen2.5-vl": ImageForm(
        "qwen2_5_vl",
        {**_SMALL_TEXT, "rope_parameters": _ROPE},
        {
            "depth": 16,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 576,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15],
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 1_003_520},
        {"vision_start_token_id": 49_001, "vision_end_token_id": 49_002, "video_token_id": 49_003},
    ),
}


def make(form: ImageForm, folder: Path, tokenizer: Path) -> None:
    """Write config, bfloat16 weights, the image processor's settings, and the tokenizer from the folder `tokenizer`."""
    source = AutoConfig.from_pretrained(tokenizer)
    shared = {name: getattr(source, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    text = {"tie_word_embeddings": False, "max_position_embeddings": 8192, **shared, **form.text}
    config: PreTrainedConfig = AutoConfig.for_model(
        form.model_type, text_config=text, vision_config=form.vision, image_token_id=49_000, **form.more
    )
    torch.manual_seed(SEED)
    models: Any = AutoModelForImageTextToText
    model = models.from_config(config, dtype=torch.bfloat16)
    for weight in model.parameters():
        weight.data.normal_(0, weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.02)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("weight"):
            weight.data.fill_(1.0)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(form.processor))
    (folder / "processor_config.json").write_text(json.dumps(form.of_text))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)
