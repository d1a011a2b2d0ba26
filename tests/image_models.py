"""Tiny random models that take images, and what transformers says about them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from tests import image_processors

_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_ENDS = {"vision_start_token_id": 302, "vision_end_token_id": 303, "video_token_id": 301}


def _case(text: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, **text}, "vision_config": vision, "image_token_id": 300, **own}


_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 56}
_CASES: dict[str, dict[str, Any]] = {
    "llava": _case(
        {"model_type": "llama", "num_hidden_layers": 3},
        {**_VISION, "model_type": "clip_vision_model", "image_size": 28, "projection_dim": 16},
        image_seq_length=4,
    ),
    "pixtral": _case(
        {"model_type": "mistral"}, _PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full"
    ),
    "mistral3": _case({"model_type": "mistral"}, _PIXTRAL, spatial_merge_size=2, vision_feature_layer=-1),
    "lighton_ocr": _case({"model_type": "qwen3"}, _PIXTRAL, spatial_merge_size=2),
    "smolvlm": _case({"model_type": "llama"}, {**_VISION, "image_size": 56}, scale_factor=2),
    "idefics3": _case({"model_type": "llama"}, {**_VISION, "image_size": 56}, scale_factor=2),
    "internvl": _case(
        {"model_type": "qwen2"}, {**_VISION, "image_size": [56, 56], "patch_size": [14, 14]}, image_seq_length=4
    ),
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
_INTERLEAVED = {"rope_parameters": {**_SECTIONS["rope_parameters"], "mrope_interleaved": True}}
_PARTIAL = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}
_QWEN3_TOWER = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_GLM_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "image_size": 56,
    "patch_size": 14,
}
_GLM_ENDS = {"image_start_token_id": 302, "image_end_token_id": 303, "video_token_id": 301}
_CASES |= {
    "qwen2_vl": _case(
        _SECTIONS,
        {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        **_ENDS,
    ),
    "qwen2_5_vl": _case(
        _SECTIONS,
        {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **_ENDS,
    ),
    "qwen3_vl": _case(_INTERLEAVED, _QWEN3_TOWER, **_ENDS),
    "qwen3_vl_moe": _case(
        {**_INTERLEAVED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, _QWEN3_TOWER, **_ENDS
    ),
    "glm4v": _case(_PARTIAL, _GLM_TOWER, **_GLM_ENDS),
    "glm46v": _case(
        {**_PARTIAL, "model_type": "glm4v_text"}, {**_GLM_TOWER, "model_type": "glm4v_vision"}, **_GLM_ENDS
    ),
    "paddleocr_vl": _case(_SECTIONS, {**_VISION, "image_size": 56}, vision_start_token_id=301, vision_end_token_id=302),
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**_INTERLEAVED["rope_parameters"], "partial_rotary_factor": 1.0},
}
_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CASES |= {
    "glm_ocr": _case(_PARTIAL, _GLM_TOWER, **_GLM_ENDS),
    "glm4v_moe": _case({**_PARTIAL, **_MOE}, _GLM_TOWER, **_GLM_ENDS),
    "qwen3_5": _case({**_INTERLEAVED, **_DELTA}, {**_QWEN3_TOWER, "deepstack_visual_indexes": []}, **_ENDS),
}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_GEMMA4_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 320,
}
_GEMMA4_TEXT = {"sliding_window": 16, "global_head_dim": 8, "vocab_size_per_layer_input": 320}
_GEMMA4_IDS = {"boi_token_id": 301, "eoi_token_id": 302, "audio_token_id": 303, "audio_config": None}
_CASES |= {
    "gemma3": _case(
        {**_KINDS, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
        {**_VISION, "image_size": 56, "vision_use_head": False},
        mm_tokens_per_image=4,
    ),
    "gemma4": _case(
        {
            **_GEMMA4_TEXT,
            **_KINDS,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        },
        _GEMMA4_TOWER,
        **_GEMMA4_IDS,
    ),
    "gemma4_small": _case(
        {
            **_GEMMA4_TEXT,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
        },
        _GEMMA4_TOWER,
        **_GEMMA4_IDS,
    ),
}
_CASES |= {
    "vipllava": _case(
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model", "image_size": 28, "projection_dim": 16},
        image_seq_length=4,
        vision_feature_layer=[-2, 1],
    ),
    "llava_next": _case(
        {"model_type": "mistral"},
        {**_VISION, "model_type": "clip_vision_model", "image_size": 28, "projection_dim": 16},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        image_seq_length=4,
    ),
    "llava_next_video": _case(
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model", "image_size": 28, "projection_dim": 16},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        image_token_index=300,
        video_token_index=301,
    ),
    "llava_onevision": _case(
        {"model_type": "qwen2"},
        {**_VISION, "model_type": "siglip_vision_model", "image_size": 28, "vision_use_head": False},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 84]],
        vision_aspect_ratio="anyres_max_4",
        video_token_id=301,
    ),
    "granite_docling": _case(
        {"attention_multiplier": 0.3, "logits_scaling": 1.0, "embedding_multiplier": 2.0},
        {
            **_VISION,
            "image_size": 64,
            "patch_size": 16,
            "out_hidden_size": 32,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    "deepseek_vl": _case({"model_type": "llama"}, {**_VISION, "image_size": 28, "vision_use_head": False}),
    "aya_vision": _case(
        {"model_type": "cohere2", **_KINDS},
        {**_VISION, "model_type": "siglip_vision_model", "image_size": 56, "vision_use_head": False},
        downsample_factor=2,
    ),
    "qianfan_ocr": _case(
        {"model_type": "qwen3"}, {**_VISION, "image_size": [56, 56], "patch_size": [14, 14]}, image_seq_length=4
    ),
    "exaone4_5": _case(
        {"model_type": "exaone4", **_KINDS},
        {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "num_key_value_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_5_moe": _case(
        {
            **_INTERLEAVED,
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
        {**_QWEN3_TOWER, "deepstack_visual_indexes": []},
        **_ENDS,
    ),
}
_CASES |= {
    "deepseek_ocr2": _case(
        {**_MOE, "mlp_layer_types": ["dense", "sparse"], "max_position_embeddings": 2048},
        {
            "sam_config": {
                **{"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"image_size": 1024, "patch_size": 16, "downsample_channels": [8, 16], "global_attn_indexes": [1]},
                "mlp_dim": 24,
                "window_size": 8,
            },
            "encoder_config": {
                **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
                "num_key_value_heads": 2,
            },
        },
    ),
    "minicpmv4_6": _case(
        {**_DELTA, "model_type": "qwen3_5_text"},
        {**_VISION, "image_size": 112},
        insert_layer_id=0,
        image_size=112,
        video_token_id=301,
    ),
}
_TYPES = {"pixtral": "llava", "gemma4_small": "gemma4"}
FAMILIES = tuple(_CASES)


def tiny_config(family: str) -> PretrainedConfig:
    """A configuration of the family; "pixtral" is Llava with Pixtral's tower, "gemma4_small" is as its small models."""
    config: PretrainedConfig = CONFIG_MAPPING[_TYPES.get(family, family)](**_CASES[family])
    return config


def write_model(folder: Path, family: str, *more: str, template: str | None = None) -> None:
    """Write a random model with its tokenizer and processor; the further arguments are for `write_files`."""
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(tiny_config(family), dtype=torch.float32)
    for weight in model.parameters():
        weight.data.normal_(0, 0.5 if weight.dim() < 2 else weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    image_processors.write_files(folder, family, *more, template=template)
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 256}')


def load_oracle(folder: Path) -> PreTrainedModel:
    """The model as transformers runs it. With gradients, torch would compute some products in another way."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().requires_grad_(requires_grad=False)


def oracle_inputs(folder: Path, family: str, pieces: Sequence[Any]) -> Any:
    """The inputs that transformers' processor makes of texts and pictures."""
    processor = image_processors.processor_of(folder, family)
    names = {"gemma3": "boi_token", "qianfan_ocr": "image_placeholder_token"}
    placeholder = getattr(processor, names.get(family, "image_token"))
    text = "".join(piece if isinstance(piece, str) else placeholder for piece in pieces)
    pictures = [[piece for piece in pieces if not isinstance(piece, str)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # GLM's processor hands numpy a tensor
        return processor(
            text=text, images=pictures if pictures[0] else None, return_tensors="pt", add_special_tokens=False
        )
