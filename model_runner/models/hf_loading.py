"""Loads models by transformers: configuration, sizes, and modules with their weights."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.library import INT4_GROUP
from model_runner.kv_cache import KVShape
from model_runner.models.damage import naming_damage
from model_runner.models.hf_attention import ATTENTION_NAME, StepAttention, register_attention
from model_runner.models.loading import (
    ModelShape,
    gguf_file_of,
    is_bare,
    is_unused_head,
    open_checkpoint,
    rotated,
)
from model_runner.models.refusal import SEE_MODELS, UnsupportedModelError, describe_model, few, other_task, refused
from model_runner.models.rotary import is_fixed


class _RecordingAttention(AttentionBackend[None]):
    """Records the shape of each layer's keys and values, and returns zeros."""

    needs_clean_blocks = False

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.calls = 0

    def prepare(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: None
    ) -> Tensor:
        self.calls += 1
        self.shapes[layer] = KVShape(key.shape[1], key.shape[2], value.shape[2], query.shape[1] // key.shape[1])
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _changing_rope(text: Any) -> set[str]:
    """The types of rotary scaling, in any layer of a text configuration, whose frequencies depend on the length."""
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    changing = (kind for kind in kinds if kind.get("rope_type") == "longrope" and not is_fixed(kind))
    return {"longrope" for _ in changing} | {"dynamic" for kind in kinds if kind.get("rope_type") == "dynamic"}


def _refuse_unsupported(config: PretrainedConfig, text: Any) -> None:
    """Raise UnsupportedModelError if the configuration alone rules the model out."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{describe_model(config)} is an encoder-decoder model; only decoder-only ones are supported; {SEE_MODELS}"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(f"{describe_model(config)} generates no text; {SEE_MODELS}")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"{describe_model(config)} has layers of the kind {', '.join(sorted(kinds))}, which is not supported; "
            f"{SEE_MODELS}"
        )
    if scaling := _changing_rope(text):
        raise UnsupportedModelError(
            f"{describe_model(config)} uses rotary scaling of type {', '.join(sorted(scaling))}, whose frequencies "
            "depend on the longest request in the batch: the same request would get different answers"
        )


def inspect_model(config: PretrainedConfig) -> ModelShape:
    """Run one token through the model on torch's meta device, which computes only shapes.

    Raises:
        UnsupportedModelError: if some layers do not use transformers' attention interface.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot run with paged attention", advice=SEE_MODELS):
        text: Any = config.get_text_config()
        _refuse_unsupported(config, text)
        return _run_on_meta(config, text)


def _run_on_meta(config: PretrainedConfig, text: Any) -> ModelShape:
    """Run the model on the meta device; errors are not yet converted."""
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
            f"{describe_model(config)} uses transformers' attention interface in only {len(recorder.shapes)} of its "
            f"{layers} layers, so it is not supported; {SEE_MODELS}"
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
        num_rotated=sum(rotated(weight.numel(), weight.shape[-1]) for weight in multiplied),
        num_inner=sum(weight.numel() for weight in inner),
        num_groupable=sum(weight.numel() for weight in inner if weight.shape[-1] % INT4_GROUP == 0),
        hidden=embedding.shape[1],
        vocab_size=output.logits.shape[-1],
        max_model_len=text.max_position_embeddings,
    )


def _make_model(config: PretrainedConfig) -> Any:
    """Raises TypeError if the architecture only supports its own attention."""
    try:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=False, attn_implementation=ATTENTION_NAME, experts_implementation="batched_mm"
        ).eval()
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise TypeError("it only supports its own kinds of attention") from error
    _adapt(model)
    return model


def _adapt(model: PreTrainedModel) -> None:
    """Replace GPT-2's Conv1D, and stop transformers from searching the tokens for padding: a batch has none."""
    make_linear(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.pad_token_id = None


def make_linear(model: nn.Module) -> None:
    """Replace every Conv1D of GPT-2, whose weight is [in, out], by an equal linear layer."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.weight = nn.Parameter(child.weight.data.t().contiguous(), requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)


def load_config(folder: Path) -> PretrainedConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: if transformers does not know the architecture, or its head is for another task.
    """
    with refused(f"{folder} holds no model that transformers can read", advice=SEE_MODELS), naming_damage(folder):
        entries = json.loads((folder / "config.json").read_bytes())
        kind = entries.get("model_type")
        if "auto_map" not in entries and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
            raise UnsupportedModelError(
                f"{folder} has the model type {str(kind)[:80]!r} in config.json, which transformers {__version__} does "
                f"not know; {SEE_MODELS}"
            )
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if (task := other_task(config.architectures)) is not None:
        raise UnsupportedModelError(
            f"{describe_model(config)} has a head for {task} ({few(config.architectures or [])}); classes that end in "
            "ForCausalLM, ForConditionalGeneration and ForSequenceClassification, and in Model for embeddings, are "
            "supported; give another checkpoint"
        )
    return config


def load_model(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    experts: str | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model with our attention, in evaluation mode.

    Args:
        folder: the model's folder.
        config: its configuration, from `checkpoint_quantization.as_served`.
        dtype: type of the loaded weights.
        experts: how transformers runs experts; None: its default.
        device: where the weights are loaded to; None: the CPU.

    Raises:
        UnsupportedModelError: if transformers cannot load it, or the weights of model and checkpoint do not match.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot be loaded"), naming_damage(folder), quiet():
        is_gguf = gguf_file_of(folder) is not None
        loaded: Any = _class_of(config).from_pretrained(
            None if is_gguf else folder,
            state_dict=_dense_tensors(folder, dtype) if is_gguf else None,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=experts,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_report refuses them with the others
        )
        model, report = loaded
        check_report(folder, model, report)
    _adapt(model)
    result: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return result


def _class_of(config: PretrainedConfig) -> Any:
    """The model's class."""
    with torch.device("meta"):
        return type(_make_model(config))


def _dense_tensors(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a folder in memory."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None, "the folder has a GGUF file"
    return {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.shapes}


def check_report(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError unless the checkpoint has all of the model's weights, and no others.

    Transformers does not report what it ignores by design, such as tied weights and multi-token prediction modules.

    Args:
        folder: the checkpoint's folder.
        model: the loaded model.
        report: transformers' loading report: `missing_keys`, `mismatched_keys` and `unexpected_keys`.
    """
    missing = set(report["missing_keys"]) - _head_that_may_be_missing(folder, model)
    unexpected = {key for key in report["unexpected_keys"] if not is_unused_head(key, model.config)}
    mismatched = [f"{key} {list(stored)} instead of {list(own)}" for key, stored, own in report["mismatched_keys"]]
    faults = (
        ("has no weights", missing),
        ("has weights of another shape", mismatched),
        ("has weights that the model does not use", unexpected),
    )
    if found := [f"{fault}: {few(names)}" for fault, names in faults if names]:
        raise UnsupportedModelError(f"{describe_model(model.config)} {'; and '.join(found)}")


def _head_that_may_be_missing(folder: Path, model: PreTrainedModel) -> set[str]:
    """Names of the head's weights if the checkpoint is for embeddings or classification, and may lack them."""
    if not is_bare(model.config) and not (folder / "modules.json").is_file():
        return set()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = () if head is None else tuple(head.parameters())
    return {name for name, weight in model.named_parameters() if any(weight is one for one in weights)}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and reports."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        hf_logging.set_verbosity(verbosity)
