"""Which models of transformers are known as wholes: what they compute before, between and after their decoder layers.

A model is in the table if that is: an embedding, the layers one after the other, an RMS norm and a linear head, with
the factors that `ModelFamily` names, and cos and sin of the rotary positions for the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _one(model: Any) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How the models of a family are read. Functions take the model; defaults are Llama's."""

    decoder: str = "model"
    """Path of what has the embedding, the layers, the norm and the rotary positions."""
    embedding_scale: Callable[[Any], float] = _one
    """What the rows of the embedding are multiplied by."""
    norm_adds_one: bool = False
    """The factor of the last norm is 1 + its weight."""
    rotary_by_kind: bool = False
    """Layers of each kind have rotary positions of their own."""
    logits_scale: Callable[[Any], float] = _one
    """What the model multiplies the logits by."""
    logits_softcap: Callable[[Any], float | None] = lambda model: None
    """Logits x become softcap * tanh(x / softcap)."""
    is_plain: Callable[[Any], bool] = lambda model: True
    """False for models of the same class that do something else with tokens."""


def _model(model: str, name: str) -> str:
    """The full name of a model's class."""
    return f"transformers.models.{model}.modeling_{model}.{name}"


def _scale_of_embedding(model: Any) -> float:
    return float(model.get_input_embeddings().embed_scale)


def _multiplier_of_model(model: Any) -> float:
    return float(model.model.embedding_multiplier)


def _final_softcap(model: Any) -> float | None:
    cap: float | None = _text_config(model).final_logit_softcapping
    return cap


_LLAMA = ModelFamily()
_GEMMA = ModelFamily(embedding_scale=_scale_of_embedding, norm_adds_one=True)
_CAPPED_GEMMA = replace(_GEMMA, logits_softcap=_final_softcap)
_GRANITE = ModelFamily(
    embedding_scale=_multiplier_of_model, logits_scale=lambda model: 1 / _text_config(model).logits_scaling
)

MODEL_FAMILIES = {
    _model("cwm", "CwmForCausalLM"): _LLAMA,
    _model("emu3", "Emu3ForCausalLM"): _LLAMA,
    _model("dots1", "Dots1ForCausalLM"): _LLAMA,
    _model("exaone4", "Exaone4ForCausalLM"): _LLAMA,
    _model("gemma", "GemmaForCausalLM"): _GEMMA,
    _model("gemma2", "Gemma2ForCausalLM"): _CAPPED_GEMMA,
    _model("gemma3", "Gemma3ForCausalLM"): replace(_CAPPED_GEMMA, rotary_by_kind=True),
    # Has no soft cap, whatever its configuration says.
    _model("gemma3", "Gemma3ForConditionalGeneration"): replace(
        _GEMMA,
        decoder="model.language_model",
        rotary_by_kind=True,
        is_plain=lambda model: model.config.image_token_id < _text_config(model).vocab_size,
    ),
    _model("granite", "GraniteForCausalLM"): _GRANITE,
    _model("granitemoe", "GraniteMoeForCausalLM"): _GRANITE,
    _model("granitemoehybrid", "GraniteMoeHybridForCausalLM"): _GRANITE,
    _model("granitemoeshared", "GraniteMoeSharedForCausalLM"): _GRANITE,
    _model("hyperclovax", "HyperCLOVAXForCausalLM"): ModelFamily(
        embedding_scale=_multiplier_of_model, logits_scale=lambda model: _text_config(model).logits_scaling
    ),
    _model("llama", "LlamaForCausalLM"): _LLAMA,
    _model("mellum", "MellumForCausalLM"): replace(_LLAMA, rotary_by_kind=True),
    _model("ministral", "MinistralForCausalLM"): _LLAMA,
    _model("mistral", "MistralForCausalLM"): _LLAMA,
    _model("mixtral", "MixtralForCausalLM"): _LLAMA,
    _model("phi3", "Phi3ForCausalLM"): _LLAMA,
    _model("phi4_multimodal", "Phi4MultimodalForCausalLM"): _LLAMA,
    _model("qwen2", "Qwen2ForCausalLM"): _LLAMA,
    _model("qwen2_moe", "Qwen2MoeForCausalLM"): _LLAMA,
    _model("qwen3", "Qwen3ForCausalLM"): _LLAMA,
    _model("qwen3_moe", "Qwen3MoeForCausalLM"): _LLAMA,
    _model("seed_oss", "SeedOssForCausalLM"): _LLAMA,
    _model("smollm3", "SmolLM3ForCausalLM"): _LLAMA,
    _model("solar_open", "SolarOpenForCausalLM"): _LLAMA,
    _model("vaultgemma", "VaultGemmaForCausalLM"): _CAPPED_GEMMA,
}
"""From the full name of a model's class to how it is read."""
