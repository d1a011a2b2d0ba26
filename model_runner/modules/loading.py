"""Loads models by transformers: configuration, sizes, and modules with their weights."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel, __version__
from transformers.utils import logging as hf_logging

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.batch import Batch
from model_runner.gguf.modules import module_tensors
from model_runner.json_files import read_object
from model_runner.kernels.library import INT4_GROUP
from model_runner.kv_cache import KVShape
from model_runner.modules.attention import register_attention
from model_runner.modules.call import ModelCall
from model_runner.modules.classes import REFUSED
from model_runner.modules.latents import keep_latents, plain_heads
from model_runner.modules.step import RecordedStates, StepAttention
from model_runner.modules.text_model import (
    ATTENTION,
    adapt,
    class_config,
    explaining,
    generates_text,
    leave_out,
    make_model,
    model_class,
    text_only,
    watch_calls,
    without_validation,
)
from model_runner.refusal import SEE_MODELS, UnsupportedModelError, describe_model, few, is_bare, other_task, refused
from model_runner.spec.model_folder import gguf_file_of, is_unused_head, open_checkpoint
from model_runner.spec.model_shape import ModelShape, rotated
from model_runner.spec.rotary import is_fixed
from model_runner.weights.damage import naming_damage

logger = logging.getLogger("samewise.runner")

_LAYER_KINDS = frozenset(
    {
        "chunked_attention",
        "compressed_sparse_attention",
        "conv",
        "full_attention",
        "heavily_compressed_attention",
        "hybrid",
        "indexed_attention",
        "linear_attention",
        "minimax_m3_sparse",
        "mlp",
        "moe",
        "sliding_attention",
    }
)
"""Kinds of layers, of transformers' `layer_types`, that keep only keys, values and recurrent states of other tokens."""
_WITHOUT_POSITIONS = 1 << 20
"""The longest request of a model that has no attention, and so no limit of its own."""


class _RecordingAttention(AttentionBackend[None]):
    """Records the shape of the keys and values of each call, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: list[KVShape] = []

    def prepare(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: None
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        self.shapes.append(KVShape(key.shape[1], key.shape[2], value.shape[2], group, options.reach))
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: None) -> Tensor:
        return query.new_zeros(*query.shape[:2], self.shapes[layer].value_dim)

    def select(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        weights: Tensor | None,
        options: IndexOptions,
        metadata: None,
    ) -> Tensor:
        self.shapes.append(KVShape(1, key.shape[2], 0, query.shape[1]))
        return query.new_zeros(0)

    def see_entries(self, block: int, metadata: None) -> Tensor:
        return torch.zeros(0)

    def recall(self, layer: int, rows: Tensor, block: int, count: int, metadata: None) -> tuple[Tensor, Tensor]:
        self.shapes.append(KVShape(1, rows.shape[2], 0, 1, count))
        return torch.zeros(0, dtype=torch.int64), rows.new_zeros(0, count, rows.shape[2])


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
    if not generates_text(config):
        raise UnsupportedModelError(f"{describe_model(config)} generates no text; {SEE_MODELS}")
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        raise UnsupportedModelError(
            f"{describe_model(config)} has layers of the kind {', '.join(sorted(kinds))}, which is not supported; "
            f"{SEE_MODELS}"
        )
    if (reason := REFUSED.get(config.model_type)) is not None:
        raise UnsupportedModelError(f"{describe_model(config)} {reason}; {SEE_MODELS}")
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        raise UnsupportedModelError(
            f"{describe_model(config)} has recurrent_kv_cache_mode last_loop, whose answers depend on how a prompt is "
            f"cut; only per_loop is supported; {SEE_MODELS}"
        )
    if scaling := _changing_rope(text):
        raise UnsupportedModelError(
            f"{describe_model(config)} uses rotary scaling of type {', '.join(sorted(scaling))}, whose frequencies "
            "depend on the longest request in the batch: the same request would get different answers"
        )


def inspect_model(config: PretrainedConfig, *, keeps_latents: bool = False) -> ModelShape:
    """Run one token through the model on torch's meta device, which computes only shapes.

    Args:
        config: the model's configuration.
        keeps_latents: whether layers with latent attention will store latents (`modules/latents.py`).

    Raises:
        UnsupportedModelError: if some layers do not use transformers' attention interface.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot run with paged attention", advice=SEE_MODELS):
        text: Any = config.get_text_config()
        _refuse_unsupported(config, text)
        with explaining(config):
            seen = _run_on_meta(config)
    if not (seen.shapes or seen.states.recurrences or seen.states.scans or seen.states.convolutions):
        raise UnsupportedModelError(
            f"{describe_model(config)} does not use transformers' attention interface, so its keys and values cannot "
            f"be stored in pages; {SEE_MODELS}"
        )
    longest = getattr(text, "max_position_embeddings", None) or (None if seen.shapes else _WITHOUT_POSITIONS)
    if longest is None:
        raise UnsupportedModelError(
            f"{describe_model(config)} has no max_position_embeddings in config.json; {SEE_MODELS}"
        )
    shape = _shape_of(seen, longest)
    if keeps_latents and keep_latents(seen.model, plain_heads):
        with torch.device("meta"):
            recorder, *_ = _try_one_token(seen.model)
        shape = replace(shape, kv=tuple(recorder.shapes))
    return shape


@dataclass(frozen=True, slots=True)
class _Inspection:
    """Findings of one token on the meta device."""

    model: Any
    """The model without its unused parts."""
    unused: Sequence[str]
    """Names of the parts that text does not use."""
    shapes: Sequence[KVShape]
    """Shapes of the keys and values of each attention call, in the order of the calls."""
    states: RecordedStates
    """Shapes of its recurrences, scans and convolutions."""
    num_logits: int


def _run_on_meta(config: PretrainedConfig) -> _Inspection:
    """Run one token through the model's text part; errors are not converted."""
    with torch.device("meta"):
        model = make_model(class_config(config))
        with watch_calls(model) as uncalled:
            recorder, states, logits = _try_one_token(model)
            unused = uncalled()
        if unused:  # run it again: the pass may read the weights of a module that it does not call
            leave_out(model, unused)
            recorder, states, logits = _try_one_token(model)
    return _Inspection(model, unused, recorder.shapes, states, logits.shape[-1])


def _try_one_token(model: nn.Module) -> tuple[_RecordingAttention, RecordedStates, Tensor]:
    """Run one token through a model on the meta device."""
    recorder, states = _RecordingAttention(), RecordedStates()
    token = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode(), without_validation():
        logits = ModelCall(model)(token, token, token, StepAttention(recorder, None), states)
    return recorder, states, logits


def _shape_of(seen: _Inspection, longest: int) -> ModelShape:
    model = seen.model
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    shared = head is not None and head.weight is embedding
    num_shared = embedding.numel() if shared else 0
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2 and weight is not embedding]
    multiplied = [*matrices, embedding] if shared else matrices
    inner = [weight for weight in matrices if head is None or weight is not head.weight]
    return ModelShape(
        kv=tuple(seen.shapes),
        recurrences=tuple(seen.states.recurrences),
        scans=tuple(seen.states.scans),
        convolutions=tuple(seen.states.convolutions),
        num_layers=model.config.get_text_config().num_hidden_layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_shared=num_shared,
        num_multiplied=sum(weight.numel() for weight in multiplied),
        num_rotated=sum(rotated(weight.numel(), weight.shape[-1]) for weight in multiplied),
        num_inner=sum(weight.numel() for weight in inner),
        num_groupable=sum(weight.numel() for weight in inner if weight.shape[-1] % INT4_GROUP == 0),
        hidden=embedding.shape[1],
        vocab_size=seen.num_logits,
        max_model_len=longest,
        unused=tuple(seen.unused),
    )


def load_config(folder: Path) -> PretrainedConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: if transformers does not know the architecture, or its head is for another task.
    """
    with refused(f"{folder} holds no model that transformers can read", advice=SEE_MODELS), naming_damage(folder):
        entries = read_object(folder / "config.json")
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
    unused: Collection[str] | None = None,
) -> PreTrainedModel:
    """Load a model with our attention, in evaluation mode.

    Args:
        folder: the model's folder.
        config: its configuration, from `checkpoint_quantization.as_served`.
        dtype: type of the loaded weights.
        experts: how transformers runs experts; None: its default.
        device: where the weights are loaded to; None: the CPU.
        unused: parts that text does not use, from `inspect_model`; None: they are found again.

    Raises:
        UnsupportedModelError: if transformers cannot load it, or the weights of model and checkpoint do not match.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot be loaded"), naming_damage(folder), quiet():
        is_gguf = gguf_file_of(folder) is not None
        own = class_config(config)
        unused = _run_on_meta(config).unused if unused is None else unused
        loaded: Any = text_only(model_class(own), unused).from_pretrained(
            None if is_gguf else folder,
            state_dict=_dense_tensors(folder, dtype) if is_gguf else None,
            config=own,
            dtype=dtype,
            attn_implementation=ATTENTION,
            experts_implementation=experts,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_report refuses them with the others
        )
        model, report = loaded
        left = _left_unread(model, unused, report)
        check_report(folder, model, {**report, "unexpected_keys": set(report["unexpected_keys"]) - left})
    if left:
        logger.info("text only  %d weights of %s are left unread", len(left), ", ".join(unused))
    adapt(model)
    result: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return result


def _left_unread(model: PreTrainedModel, unused: Collection[str], report: Mapping[str, Any]) -> set[str]:
    """The weights in a checkpoint that belong to modules which were left out, by transformers' loading report."""
    base = f"{model.base_model_prefix}."
    prefixes = tuple(f"{one}." for name in unused for one in (name, name.removeprefix(base), base + name))
    return {key for key in report["unexpected_keys"] if key.startswith(prefixes)}


def _dense_tensors(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a folder with a GGUF file in memory, as transformers' modules have them.

    None is a view of the file, which may be replaced while the model is served.
    """
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None, "the folder has a GGUF file"

    def in_memory(name: str) -> Tensor:
        tensor = checkpoint.tensor(name)
        return tensor.to(dtype, copy=tensor.untyped_storage().nbytes() > tensor.nbytes)

    entries = read_object(folder / "config.json")
    return module_tensors({name: in_memory(name) for name in checkpoint.shapes}, entries)


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
    refuse_faults(model.config, {**report, "missing_keys": missing, "unexpected_keys": unexpected})


def refuse_faults(config: PretrainedConfig, report: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if a loading report of this form is not empty."""
    mismatched = [f"{key} {list(stored)} instead of {list(own)}" for key, stored, own in report["mismatched_keys"]]
    faults = (
        ("has no weights", report["missing_keys"]),
        ("has weights of another shape", mismatched),
        ("has weights that the model does not use", report["unexpected_keys"]),
    )
    if found := [f"{fault}: {few(names)}" for fault, names in faults if names]:
        raise UnsupportedModelError(f"{describe_model(config)} {'; and '.join(found)}")


def _head_that_may_be_missing(folder: Path, model: PreTrainedModel) -> set[str]:
    """Names of the head's weights if the checkpoint is for embeddings or classification, and may lack them."""
    if not is_bare(model.config.architectures) and not (folder / "modules.json").is_file():
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
