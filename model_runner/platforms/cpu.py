"""CPU platform: native kernels if they can be built, otherwise plain torch."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.config import LogprobsMode, Rows, RunnerConfig, Sizes
from model_runner.kernels.build import NoKernelsError, build_kernels
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.kv_cache import KVCache, KVShape, cache_structs, resolve_kv_dtype
from model_runner.models.activations import replace_activations
from model_runner.models.early_exit import EarlyExit
from model_runner.models.experts import EXPERTS_NAME, pack_experts, register_experts
from model_runner.models.features import Feature
from model_runner.models.heads.hydra import HydraHeads
from model_runner.models.loading import ModelShape, load_model
from model_runner.models.native_layer import bind_layers, fuse_layers, make_native_experts, part_layers
from model_runner.models.native_model import NativeEarlyExit, NativeModel, NativeTargetModel, read_native_model
from model_runner.models.packed import NativePacker, OneDNNPacker, Packer, pack_weights
from model_runner.models.refusal import UnsupportedModelError
from model_runner.models.repository import cache_folder
from model_runner.models.target import HFTargetModel, TargetModel
from model_runner.platforms.memory import GIB, Room, StorageTypes
from model_runner.platforms.platform import Platform
from model_runner.processes import available_cores, free_memory
from model_runner.sampling.sampler import NativeDraw, Sampler, TorchDraw, pick, pick_allowed
from model_runner.sampling.truncations import NativeTruncations

logger = logging.getLogger("samewise.runner")

_DEVICE = torch.device("cpu")
_CACHE_LIMIT = 4 * GIB
"""Upper limit of the KV cache's default size: other programs need memory, too."""
_CACHE_SHARE = 0.5


class CpuPlatform(Platform):
    """Everything in float32, except weights, keys and values."""

    device = _DEVICE
    exact = True
    is_async = False

    def __init__(self, config: RunnerConfig) -> None:
        """Builds the native kernels at first use. Raises ValueError for settings that the CPU does not support."""
        if config.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype {config.dtype} is not supported on CPU; use float32 or auto")
        if not config.exact:
            raise ValueError("the CPU always computes exactly; remove --no-exact")
        threads = config.threads or available_cores()
        torch.set_num_threads(threads)
        self._kernels = _load_kernels(threads)
        weights = resolve_quantization(config.quantization, self._kernels)
        kind = resolve_rows(config.rows, weights, self._kernels)
        self._packer = NativePacker(self._kernels, kind) if self._kernels and kind else None
        kv = resolve_kv_dtype(config.kv_cache_dtype, torch.float32, _DEVICE, quantized_weights=weights is not None)
        self.types = StorageTypes(torch.float32, weights, kv)
        self.presamples = self._kernels is not None
        self.pick_allowed = None if self._kernels is None else partial(pick_allowed, self._kernels)
        self.rows = "float32" if kind is None else "int8" if kind == "int8_rotated" else "int16"
        self.kernels = "none" if self._kernels is None else self._kernels.isa
        self._native_models: dict[PreTrainedModel, NativeModel] = {}
        """The loaded models whose parts are all known."""

    @property
    def hardware(self) -> str:
        return torch.backends.cpu.get_cpu_capability()

    def sizes(self, config: RunnerConfig) -> Sizes:
        return Sizes(config.max_num_seqs or 64, config.max_num_batched_tokens or 512)

    def room(self) -> Room:
        return Room("cpu", free_memory(), _CACHE_SHARE, _CACHE_LIMIT)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Memory of a model's weights. A head that is shared with the embedding is also packed, as a copy."""
        return _weight_bytes(shape, None if self._packer is None else self._packer.kind)

    def int4_bytes(self, shape: ModelShape) -> int | None:
        return None if self._kernels is None or self.types.weights == "int4" else _weight_bytes(shape, "int4")

    def load(self, folder: Path) -> PreTrainedModel:
        register_experts()
        model = load_model(folder, self.read_config(folder), torch.float32, EXPERTS_NAME)
        prepare(model, self._packer)
        if self._read_natively(model):
            logger.info("forward    as one native call")
        return model

    def load_again(self, loaded: PreTrainedModel) -> PreTrainedModel:
        model = super().load_again(loaded)
        part_layers(model)
        self._read_natively(model)
        return model

    def _read_natively(self, model: PreTrainedModel) -> bool:
        """Prepare the model to run as one native call; returns whether all its parts are known."""
        if self._kernels is not None and (native := read_native_model(model, self._kernels)) is not None:
            self._native_models[model] = native
        return model in self._native_models

    def make_cache(self, shapes: Sequence[KVShape], num_blocks: int, block_size: int) -> KVCache:
        return KVCache(shapes, num_blocks, block_size, self.types.kv, _DEVICE, self._kernels)

    def attention(self, cache: KVCache) -> AttentionBackend[Any]:
        return ReferenceAttention(cache) if self._kernels is None else NativeAttention(self._kernels, cache)

    def make_target(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend[Any],
        max_model_len: int,
        needs: Collection[Feature] = (),
    ) -> TargetModel:
        if self._packer is not None and isinstance(attention, NativeAttention):
            bind_layers(model, cache_structs(attention.cache))
            if (native := self._native_models.get(model)) is not None:
                return NativeTargetModel(native, attention, needs)
        return HFTargetModel(model, attention, needs, None if self._kernels is None else partial(pick, self._kernels))

    def find_early_exit(self, model: PreTrainedModel) -> EarlyExit | None:
        native = self._native_models.get(model)
        return super().find_early_exit(model) if native is None else NativeEarlyExit(native)

    def prepare_heads(self, heads: nn.Module) -> None:
        if self._kernels is not None:
            packer = replace(
                self._packer or NativePacker(self._kernels, "int8"), packs=self._kernels.single_thread_clone()
            )
            pack_weights(heads, packer.in_int8, OneDNNPacker())
            if isinstance(heads, HydraHeads):
                heads.make_native(self._kernels)

    def make_sampler(self, vocab_size: int, logprobs_mode: LogprobsMode) -> Sampler:
        if self._kernels is None:
            return Sampler(TorchDraw(vocab_size, _DEVICE), logprobs_mode)
        divides = logprobs_mode == "raw"  # processed logprobs need divided logits
        return Sampler(NativeDraw(self._kernels, divides), logprobs_mode, NativeTruncations(self._kernels))


def prepare(model: PreTrainedModel, packer: NativePacker | None) -> None:
    """Make the results of a model's rows independent of each other.

    With int4, the head is packed in int8, because its error reaches every logit.

    Args:
        model: changed in place.
        packer: packs the weights for the native kernels; None leaves them in float32.

    Raises:
        UnsupportedModelError: if a part of the model has no exact counterpart.
    """
    onednn = OneDNNPacker()
    if packer is not None:
        logger.info("layers     %d as one native operator each", fuse_layers(model, packer))
        if (head := model.get_output_embeddings()) is not None:  # type: ignore[no-untyped-call]
            pack_weights(head, packer.in_int8, onednn)
    pack: Packer = packer or onednn
    try:
        pack_experts(model, pack, None if packer is None else partial(make_native_experts, packer))
        replace_activations(model)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    pack_weights(model, pack, onednn)


def _weight_bytes(shape: ModelShape, kind: WeightKind | None) -> int:
    num_all = shape.num_parameters + shape.num_shared
    if kind is None:
        return num_all * torch.float32.itemsize
    return (num_all - shape.num_multiplied) * torch.float32.itemsize + shape.packed_bytes(kind)


def resolve_quantization(quantization: str, kernels: Kernels | None) -> Literal["int8", "int4"] | None:
    """The type that weights are packed in; None leaves them in float32.

    Raises:
        ValueError: if the requested type is not supported here.
    """
    if quantization == "none":
        return None
    if quantization == "auto":
        return None if kernels is None else "int8"
    if quantization == "fp8":
        raise ValueError("quantization fp8 is only supported on CUDA; use int8 or int4 on CPU")
    if kernels is None:
        raise ValueError(
            f"quantization {quantization} needs the native kernels, but building them failed (see the warning above)"
        )
    return "int4" if quantization == "int4" else "int8"


def resolve_rows(rows: Rows, weights: Literal["int8", "int4"] | None, kernels: Kernels | None) -> WeightKind | None:
    """The kind of packed weights for this rounding of inputs.

    Raises:
        ValueError: if the weights' type leaves no choice, but `rows` is set.
    """
    if weights == "int8" and kernels is not None:
        kinds: dict[Rows, WeightKind] = {"auto": kernels.int8_kind, "int8": "int8_rotated", "int16": "int8"}
        return kinds[rows]
    if rows != "auto":
        always = "int16" if weights == "int4" else "float32"
        raise ValueError(
            f"rows {rows} needs int8 weights; {weights or 'float32'} weights always use {always}; remove --rows"
        )
    return weights


def _load_kernels(threads: int) -> Kernels | None:
    """The native kernels; None, with a warning, if they cannot be built."""
    try:
        return Kernels(build_kernels(cache_folder()), threads)
    except NoKernelsError as error:
        logger.warning("Building the native kernels failed; the server runs in float32, much slower: %s", error)
        return None
