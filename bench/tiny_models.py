"""Tiny random models of every type that transformers can generate text with, for measurements of breadth.

A type's configuration is transformers' default with the sizes of `_BASE`, and what `_CASES` adds: experts, windows, and
whatever else makes layers of each kind appear within four. Vision and audio towers keep their widths and lose layers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from model_runner.modules.text_model import without_missing_towers

VOCAB_SIZE = 320
SEED = 7
_SPREAD = 3.0
"""Factor on the matrices of a fresh model, so that its answers vary."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1}
_GROUPED = {**_ROUTED, "n_group": 2, "topk_group": 1}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_INDEXED = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
_WINDOWS = {"layer_types": _ALTERNATING, "sliding_window": 16}
_CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
_SHARED_BLOCKS = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    "mamba_d_state": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_GPT = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024}

_PART = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_LOCAL = {**_PART, "hidden_size_global": 64}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WHOLE_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_VISION_TOKENS = {"vision_start_token_id": 10, "vision_end_token_id": 11}
_DECODER = {"is_decoder": True}
_SMALL_PALIGEMMA = {
    "model_type": "paligemma",
    "text_config": {"model_type": "gemma", **_BASE},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
}

_CASES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _DECODER,
    ),
    **dict.fromkeys(
        (
            "cosmos3_edge_text",
            "hunyuan_vl_text",
            "paddleocr_vl_text",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
        ),
        _SECTIONS,
    ),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), _WHOLE_SECTIONS),
    "glm4v_moe_text": {
        **_ROUTED,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    },
    "glm5_next_text": {
        **_LATENT,
        **_GROUPED,
        **_INDEXED,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "xmod": {**_DECODER, "default_language": "en_XX", "languages": ["en_XX"]},
    "apertus1p5": {"image_token_offset": 0, "audio_token_offset": 131072, "text_config": {"vocab_size": 1 << 18}},
    "aya_vision": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
        }
    },
    "chameleon": {"vocabulary_map": {"<image>": 10}},
    "emu3": {"vocabulary_map": {"<image>": 10}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "deepseek_ocr2": {
        "vision_config": {"encoder_config": {"hidden_size": 896, "intermediate_size": 96, "num_hidden_layers": 1}}
    },
    "deepseek_ocr2_text": {**_ROUTED, "num_key_value_heads": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "diffusion_gemma_text": {**_WINDOWS, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "dots3_note_text": {
        **_LATENT,
        **_INDEXED,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 40},
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [40, 40],
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "1/1"},
    "muse_glimmer": {"vision_config": {"num_hidden_layers": 1}},
    "muse_spark": {"vision_config": {"num_hidden_layers": 1}, "audio_config": {"out_hidden_size": 64}},
    "mistral_large4_text": {
        **{name: size for name, size in _LATENT.items() if name != "q_lora_rank"},
        **_ROUTED,
        **_INDEXED,
        "no_rope_layers": [1, 1, 1, 0],
        "kv_source_layers": [0, 1, 0, 3],
    },
    "mistral4": {**_LATENT, **_ROUTED, "head_dim": 8},
    "step3p5": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "sliding_window": 16,
    },
    "xlnet": {"d_head": 16},
    "youtu": {**_LATENT, "head_dim": 8},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "sliding_window": 16},
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 6}
    },
    "inkling2_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "muse_spark_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_hidden_size": 32,
        "sliding_window": 16,
    },
    "reformer": {**_DECODER, "axial_pos_embds": False},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 0]}},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _VISION_TOKENS),
    "sarvam_mla": {**_LATENT, **_GROUPED, "first_k_dense_replace": 1, "head_dim": 8},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 32}}},
    "pi0": {"vlm_config": _SMALL_PALIGEMMA, "dit_config": {"model_type": "gemma", **_BASE}},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    "axk1": {**_LATENT, **_GROUPED, "first_k_dense_replace": 1, "head_dim": 8},
    "axk2": {**_LATENT, **_GROUPED, **_INDEXED, "first_k_dense_replace": 1},
    "bailing_hybrid": {
        **_LATENT,
        **_GROUPED,
        "num_local_experts": 8,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": _LINEAR,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [3]},
    "bloom": {"n_head": 4, "n_layer": 4},
    "blt": {
        "patcher_config": _PART,
        "encoder_config": _LOCAL,
        "decoder_config": _LOCAL,
        "global_config": _PART,
        "encoder_hash_byte_group_vocab": 10,
    },
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere2": _WINDOWS,
    "cwm": _WINDOWS,
    "deepseek_v2": {**_LATENT, **_GROUPED, "n_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {**_LATENT, **_GROUPED, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v32": {**_LATENT, **_GROUPED, **_INDEXED, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_key_value_heads": 1,
        **_INDEXED,
        "index_topk": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
    "dots1": {
        **_ROUTED,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": _ALTERNATING,
        "sliding_window": 16,
    },
    "exaone4": _WINDOWS,
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA2},
    "falcon_mamba": {"state_size": 16},
    "flint": _WINDOWS,
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "gemma3n_text": {
        "layer_types": [*_ALTERNATING, *_ALTERNATING[:2]],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        "intermediate_size": [96] * 6,
    },
    "gemma4_text": {
        "layer_types": [*_ALTERNATING, *_ALTERNATING[:2]],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "global_head_dim": 24,
    },
    "glm4_moe_lite": {**_LATENT, **_GROUPED},
    "glm_moe_dsa": {**_LATENT, **_GROUPED, **_INDEXED},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gpt_oss": {**_FOUR, **_WINDOWS},
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite_swa": _WINDOWS,
    "granitemoe_swa": {**_FOUR, **_WINDOWS},
    "granitemoehybrid": {**_MAMBA2, **_FOUR, "layer_types": _LINEAR, "shared_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2] * 4},
    "hy_v4": {**_LATENT, **_INDEXED, **_EXPERTS},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {
        "mamba_d_state": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
    },
    "kimi_linear": {
        **_LATENT,
        **_GROUPED,
        "q_lora_rank": None,
        "num_local_experts": 8,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": _LINEAR,
    },
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 32,
        "floor_scale": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
    },
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 40,
        "ffn_hidden_size": 96,
    },
    "mamba": {"state_size": 16},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "v_head_dim": 12,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    },
    "minicpm3": _LATENT,
    "minimax": {
        **_FOUR,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
        "block_size": 16,
    },
    "minimax_m3_vl_text": {
        **_FOUR,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 40,
    },
    "ministral": _WINDOWS,
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 1024},
    "nemotron_h": {
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 40,
    },
    "olmo3": _WINDOWS,
    "olmo_hybrid": {**_DELTA, "layer_types": _LINEAR},
    "qwen3_5_moe_text": {**_DELTA, **_SHARED, "layer_types": _LINEAR},
    "qwen3_5_text": {**_DELTA, "layer_types": _LINEAR},
    "qwen3_next": {**_DELTA, **_SHARED, "layer_types": _LINEAR},
    "qwen4_exp_text": {
        **_DELTA,
        **_SHARED,
        "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": 200,
        "heads_per_ngram": 2,
    },
    "recurrent_gemma": {
        "lru_width": 64,
        "attention_window_size": 32,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 3,
    },
    "rwkv": {"attention_hidden_size": 64},
    "vaultgemma": _WINDOWS,
    "zamba": {**_SHARED_BLOCKS, "n_mamba_heads": 2, "mamba_dt_rank": 8},
    "zamba2": {
        **_SHARED_BLOCKS,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
    },
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 40, "router_hidden_size": 16},
}
_TEXT_TYPES: Mapping[str, str] = {"gemma4_assistant": "gemma4_text"}
"""Types of the text where the default configuration is not valid."""
_WITHOUT: Mapping[str, tuple[str, ...]] = {"falcon": ("head_dim",), "xlnet": ("max_position_embeddings", "head_dim")}
"""Entries of `_BASE` that a type does not take."""
_WITH_ENCODERS = frozenset({"evolla", "musicgen", "musicgen_melody", "vision-encoder-decoder"})
"""Types whose classes do not say that they have encoders: of sounds, of proteins, or any."""
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "num_blocks", "layers")
_SMALL = ("out_hidden_size", "projection_dim")


def decoder_types() -> list[str]:
    """Types of transformers' mappings for causal language models, and for images and text, without an encoder."""
    names = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    return [name for name in names if name not in _WITH_ENCODERS and not CONFIG_MAPPING[name].is_encoder_decoder]


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that loads such a model."""
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if has_images else AutoModelForCausalLM


def tiny_config(model_type: str) -> PretrainedConfig:
    """The type's configuration with few and small layers."""
    config_class: Any = CONFIG_MAPPING[model_type]
    if "text_config" not in config_class.sub_configs:
        config: PretrainedConfig = config_class(**_entries(model_type))
        _shrink_towers(config)
        return config
    sub_config = config_class.sub_configs["text_config"]
    text_type = getattr(sub_config, "model_type", None) or _TEXT_TYPES.get(model_type)
    text_type = text_type or config_class().get_text_config().model_type
    own = dict(_CASES.get(model_type, {}))
    text = {"model_type": text_type, **_entries(text_type), **own.pop("text_config", {})}
    config = config_class(text_config=text, **own)
    _shrink_towers(config)
    return config


def _entries(model_type: str) -> dict[str, Any]:
    entries = {**_BASE, **_CASES.get(model_type, {})}
    return {name: entry for name, entry in entries.items() if name not in _WITHOUT.get(model_type, ())}


def _shrink_towers(config: PretrainedConfig) -> None:
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and name != "text_config":
            _shrink_towers(part)
            _shrink(part)


def _shrink(config: PretrainedConfig) -> None:
    """Leave one layer of a tower; those with kinds or widths of layers are in `_CASES`."""
    entries = config.to_dict()
    if entries.get("per_layer_config") is not None:
        config.per_layer_config = {}
    depths = () if entries.get("layer_types") or entries.get("depths") else _DEPTHS
    for name in depths:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 1)
    for name in _SMALL:
        if isinstance(entries.get(name), int):
            setattr(config, name, _BASE["hidden_size"])


def write_tiny_model(model_type: str, folder: Path) -> None:
    """Write a random model of the type, without a tokenizer."""
    config = tiny_config(model_type)
    torch.manual_seed(SEED)
    with without_missing_towers():
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data.normal_()
        elif weight.dim() >= 2 and "A_log" not in name:
            weight.data.mul_(_SPREAD)
    model.save_pretrained(folder)
