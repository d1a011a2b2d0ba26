"""What a model needs, found out before its weights are loaded."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.library import INT4_BITS, INT4_GROUP, ROTATED_BLOCK, WeightKind
from model_runner.kv_cache import KVShape
from model_runner.models.hf_attention import ATTENTION_NAME, StepAttention, register_attention
from model_runner.models.refusal import UnsupportedModelError, describe_model, refused

_POSITION_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that decide what fits in memory."""

    kv: tuple[KVShape, ...]
    """One for each layer."""
    num_parameters: int
    """Distinct weights; a head shared with the embedding counts once."""
    num_shared: int
    """Parameters of the head, if it is shared with the embedding."""
    num_multiplied: int
    """Weights of linears, experts and the head, a shared one included: what every token is multiplied with."""
    num_rotated: int
    """The same when inputs are padded to be rotated."""
    num_inner: int
    """Those of them that are not the head's."""
    num_groupable: int
    """Those of them that int4 can hold: all but the head that have whole groups of inputs."""
    hidden: int
    vocab_size: int
    max_model_len: int

    def packed_bytes(self, kind: WeightKind) -> int:
        """Memory of what is multiplied, when it is packed; what int4 cannot hold is int8."""
        if kind == "int8_rotated":
            return self.num_rotated
        num_int4 = self.num_groupable if kind == "int4" else 0
        return self.num_multiplied - num_int4 + num_int4 * INT4_BITS // 8


class _RecordingAttention(AttentionBackend[None]):
    """Notes the shape of each layer's keys and values, and returns zeros."""

    needs_clean_blocks = False

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.calls = 0

    def prepare(self, batch: Batch) -> None:
        """Nothing is shared."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: None
    ) -> Tensor:
        """See AttentionBackend.forward."""
        self.calls += 1
        self.shapes[layer] = KVShape(key.shape[1], key.shape[2], value.shape[2], query.shape[1] // key.shape[1])
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _rope_types(text: Any) -> set[str]:
    """The types of rotary scaling that a text configuration names, for all layers or for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(kind["rope_type"]) for kind in kinds if "rope_type" in kind}


def _refuse_unsupported(config: PretrainedConfig, text: Any) -> None:
    """Raise UnsupportedModelError for what the configuration alone rules out."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{describe_model(config)} is an encoder-decoder model; only decoder-only models are served"
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"{describe_model(config)} has layers of kind {', '.join(sorted(kinds))}: not supported"
        )
    scaling = _rope_types(text) & _POSITION_DEPENDENT_ROPE
    if scaling:
        raise UnsupportedModelError(
            f"{describe_model(config)} uses rotary scaling of type {', '.join(sorted(scaling))}, whose frequencies "
            "depend on the longest request in the batch: the same request would get different answers"
        )


def inspect_model(config: PretrainedConfig) -> ModelShape:
    """Run one token through the model on torch's meta device, which computes shapes only.

    Raises:
        UnsupportedModelError: if the architecture does not send every layer's attention through our interface.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot run with paged attention"):
        text: Any = config.get_text_config()
        _refuse_unsupported(config, text)
        return _run_on_meta(config, text)


def _run_on_meta(config: PretrainedConfig, text: Any) -> ModelShape:
    """See inspect_model."""
    recorder = _RecordingAttention()
    with torch.device("meta"):
        model = _make_model(config)
        token = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode():
            output = model(
                input_ids=token, position_ids=token, use_cache=False, attention=StepAttention(recorder, None)
            )
    layers = text.num_hidden_layers
    if recorder.calls != layers or set(recorder.shapes) != set(range(layers)):
        raise UnsupportedModelError(
            f"{describe_model(config)} sends {len(recorder.shapes)} of its {layers} layers through the attention "
            "interface"
        )
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    shared = head is not None and head.weight is embedding
    num_shared = embedding.numel() if shared else 0
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2 and weight is not embedding]
    multiplied = [*matrices, embedding] if shared else matrices
    inner = [weight for weight in matrices if head is None or weight is not head.weight]
    return ModelShape(
        kv=tuple(recorder.shapes[layer] for layer in range(layers)),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_shared=num_shared,
        num_multiplied=sum(weight.numel() for weight in multiplied),
        num_rotated=sum(_padded(weight) for weight in multiplied),
        num_inner=sum(weight.numel() for weight in inner),
        num_groupable=sum(weight.numel() for weight in inner if weight.shape[-1] % INT4_GROUP == 0),
        hidden=embedding.shape[1],
        vocab_size=output.logits.shape[-1],
        max_model_len=text.max_position_embeddings,
    )


def _make_model(config: PretrainedConfig) -> Any:
    """Raises TypeError if the architecture takes no attention but its own."""
    try:
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=False, attn_implementation=ATTENTION_NAME, experts_implementation="batched_mm"
        ).eval()
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise TypeError("it has a table of its own of what can be its attention") from error


def _padded(weight: Tensor) -> int:
    """Numbers of a weight [..., outputs, inputs] whose inputs are padded to be rotated."""
    inputs = weight.shape[-1]
    return weight.numel() // inputs * -(-inputs // ROTATED_BLOCK) * ROTATED_BLOCK
