"""All uses of transformers' private parts, so that a new version can be checked in one place.

`tests/test_private_parts.py` says which part a version has not, and finds private parts that are used elsewhere.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.moe import _default_apply_gate

Replace = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a method of a module, and returns what the module calls instead."""


def from_config(model_class: Any, config: PretrainedConfig, **options: Any) -> Any:
    """A model of this class without weights. The public `from_config` chooses the class itself."""
    return model_class._from_config(config, **options)


def set_attention(config: PretrainedConfig, name: str) -> None:
    """Set the attention, also for classes that refuse to choose one."""
    config._attn_implementation = name


def experts_name(config: PretrainedConfig) -> str | None:
    """The name of the function that runs experts; None for the family's own code."""
    name: str | None = getattr(config, "_experts_implementation", None)
    return name


def ignore_tied_weights(model_class: Any) -> None:
    """Let a class without its language model have no weights that others share."""
    model_class._tied_weights_keys = None


def gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """The function between up and down. Llama 4's experts have none of their own."""
    gate: Callable[[Tensor], Tensor] = getattr(experts, "_apply_gate", None) or partial(_default_apply_gate, experts)
    return gate


def has_default_gate(experts: Any) -> bool:
    """Whether the experts compute activation(gate) * up."""
    return getattr(type(experts), "_apply_gate", _default_apply_gate) is _default_apply_gate  # as in `gate_of`


def mark_as_common(experts: Any) -> None:
    """Give experts the entries that transformers' functions for experts read."""
    experts.is_transposed = experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
    experts.is_concatenated = experts.has_gate = True
    if not hasattr(experts, "_apply_gate"):
        experts._apply_gate = gate_of(experts)


def replace_ngram_shift(embedding: Any, replace: Replace) -> None:
    """Replace the method of Qwen4's n-gram embedding that shifts tokens."""
    embedding._shift_right_ignore_eos = replace(MethodType(type(embedding)._shift_right_ignore_eos, embedding))


def replace_short_convolution(layer: Any, replace: Replace) -> None:
    """Replace the dilated convolution of Qwen4's embeddings per layer."""
    layer._short_conv = replace(MethodType(type(layer)._short_conv, layer))


def accept_falcon(name: str) -> None:
    """Let Falcon, which chooses the class of its attention by its name, take its plain one for `name`."""
    from transformers.models.falcon import modeling_falcon  # noqa: PLC0415 - only where needed

    modeling_falcon.FALCON_ATTENTION_CLASSES[name] = modeling_falcon.FalconAttention


def accept_gpt_neo(name: str) -> None:
    """As `accept_falcon`, for GPT-Neo."""
    from transformers.models.gpt_neo import modeling_gpt_neo  # noqa: PLC0415 - only where needed

    modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES[name] = modeling_gpt_neo.GPTNeoSelfAttention


def accept_llama4(_: str) -> None:
    """Llama 4 reads `image_outputs` from its text model's output, which has none in transformers 5.24."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast  # noqa: PLC0415 - only where needed

    output: Any = MoeCausalLMOutputWithPast
    output.image_outputs = None
