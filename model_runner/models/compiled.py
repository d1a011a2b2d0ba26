"""Decoder layers that are not recognised, compiled by torch: for servers whose answers may depend on the batch."""

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.models.cuda_layer import CudaDecoderLayer
from model_runner.models.features import decoder_layers
from model_runner.models.grouped_experts import GROUPED_EXPERTS_NAME, grouped_experts
from model_runner.models.hf_attention import ATTENTION_NAME, paged_attention


def compile_layers(model: PreTrainedModel) -> int:
    """Compile each decoder layer that is still transformers' own, when it is first called.

    Layers of a kind share what is compiled, for any number of tokens, but one alone. The attention stays as it is, for
    what it does depends on the step, and so do the experts, whose kernels are launched with options that torch's
    compiler does not take. From now on transformers calls both in that form, in other models as well.

    Returns:
        How many layers there are of that kind.

    Raises:
        UnsupportedModelError: if the model's decoder layers cannot be found.
    """
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(paged_attention))  # type: ignore[no-untyped-call]
    ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS_NAME, torch.compiler.disable(grouped_experts))  # type: ignore[no-untyped-call]
    own = [layer for layer in decoder_layers(model) if not isinstance(layer, CudaDecoderLayer)]
    for layer in own:
        layer.compile(dynamic=True)
    return len(own)
