"""From a folder to a model that is ready to run: configuration, sizes, weights, and a head that classifies."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.library import INT4_BITS, INT4_GROUP, ROTATED_BLOCK, WeightKind
from model_runner.kv_cache import KVShape
from model_runner.models.hf_attention import ATTENTION_NAME, StepAttention, register_attention
from model_runner.models.refusal import UnsupportedModelError, describe_model, few, refused

FloatArray = npt.NDArray[np.float64]

CLASSIFIES = "ForSequenceClassification"
"""How classes of such models are named."""
HEAD_NAMES = ("score.weight", "score.bias")
"""As transformers calls them for decoder-only models."""


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


def load_config(folder: Path) -> PretrainedConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: if transformers does not know the architecture.
    """
    with refused(f"{folder} holds no model that transformers can read"):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


def check_tokenizers(model: Path, other: Path, role: str) -> None:
    """Raises ValueError unless two models' folders hold the same vocabulary; `role` is what the other one is for."""
    if _vocabulary(model) != _vocabulary(other):
        raise ValueError(f"the {role} model {other} has another vocabulary than {model}; it cannot speak of its tokens")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab() if path.exists() else None


def load_model(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    experts: str | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model whose attention is ours, in evaluation mode.

    Args:
        folder: of the model.
        config: its configuration, as `checkpoint_quantization.as_served` has it.
        dtype: what the weights are loaded as.
        experts: how transformers runs experts; None for its own choice.
        device: where the weights are read to; the CPU if it is None.

    Raises:
        UnsupportedModelError: if transformers cannot load it, or not all of the model and of the checkpoint's weights
            became one.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot be loaded"), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=experts,
            device_map=device,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused with the others
        )
        model, report = loaded
        check_report(folder, model, report)
    result: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return result


def check_report(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError unless every weight of the model was loaded, and every one of the checkpoint used.

    What transformers ignores by design, as tied weights and modules of multi-token prediction, it does not report.

    Args:
        folder: of the checkpoint.
        model: as it was loaded.
        report: transformers' own: `missing_keys`, `mismatched_keys` and `unexpected_keys`.
    """
    missing = set(report["missing_keys"]) - _head_that_may_be_missing(folder, model)
    unexpected = {key for key in report["unexpected_keys"] if not _is_known_beside(key, model.config)}
    mismatched = [f"{key} {list(stored)} instead of {list(own)}" for key, stored, own in report["mismatched_keys"]]
    faults = (
        ("has no weights", missing),
        ("has weights of another shape", mismatched),
        ("has weights that the model does not use", unexpected),
    )
    if found := [f"{fault}: {few(names)}" for fault, names in faults if names]:
        raise UnsupportedModelError(f"{describe_model(model.config)} {'; and '.join(found)}")


def _head_that_may_be_missing(folder: Path, model: PreTrainedModel) -> set[str]:
    """Names of the head's weights, if the checkpoint is of a model for embeddings or classification."""
    architecture = str((model.config.architectures or [""])[0])
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if not is_bare and not architecture.endswith(CLASSIFIES) and not (folder / "modules.json").is_file():
        return set()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = () if head is None else tuple(head.parameters())
    return {name for name, weight in model.named_parameters() if any(weight is one for one in weights)}


def _is_known_beside(key: str, config: PretrainedConfig) -> bool:
    """Whether a weight belongs to heads for multi-token prediction, or to one that classifies."""
    text: Any = config.get_text_config()
    layer = re.search(r"\blayers\.(\d+)\.", key)
    num_modules = getattr(text, "num_nextn_predict_layers", None) or 0
    if layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < num_modules:
        return True
    classifies = str((config.architectures or [""])[0]).endswith(CLASSIFIES)
    return classifies and key in HEAD_NAMES


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars and reports."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        hf_logging.set_verbosity(verbosity)


class ClassificationHead:
    """Scores of classes from the hidden state of a last token."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Weight [classes, hidden], and bias [classes] if there is one."""
        self._weight: FloatArray = weight.double().numpy()
        self._bias: FloatArray = np.zeros(len(weight)) if bias is None else bias.double().numpy()

    def __call__(self, hidden: FloatArray) -> FloatArray:
        """[classes] of [hidden]."""
        scores: FloatArray = (self._weight * hidden).cumsum(-1)[:, -1] + self._bias
        return scores


def load_classification_head(folder: Path, config: PretrainedConfig) -> ClassificationHead | None:
    """None for a model of another kind. Raises UnsupportedModelError if the checkpoint has no such head."""
    if not str((config.architectures or [""])[0]).endswith(CLASSIFIES):
        return None
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in HEAD_NAMES if name in file.keys()}  # noqa: SIM118
    weight, bias = (tensors.get(name) for name in HEAD_NAMES)
    hidden = config.get_text_config().hidden_size
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden:
        raise UnsupportedModelError(f"{folder} is to classify, and has no weight score.weight of [classes, {hidden}]")
    return ClassificationHead(weight, bias)
