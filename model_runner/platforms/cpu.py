"""CPU platform: native kernels, for whole models of known families and for parts of the others."""

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.config import InputType, LogprobsMode, RunnerConfig, Sizes
from model_runner.contract import CacheGroup
from model_runner.features import Feature
from model_runner.heads.hydra import HydraHeads
from model_runner.hub.repository import cache_folder
from model_runner.images.layouts import Layout
from model_runner.kernels.background_build import kernels_library
from model_runner.kernels.build import NoKernelsError, detect_isas
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.kernels.vector_math import prepare_vector_math
from model_runner.kv_cache import KVCache, KVShape, resolve_kv_dtype
from model_runner.modules.linears import OneDNNPacker, pack_weights
from model_runner.native.model import NativeEarlyExit, NativeModel, NativeTargetModel, embedding_bytes
from model_runner.native.packed_cache import cached
from model_runner.native.packer import SLAB_BYTES, NativePacker
from model_runner.platforms.memory import GIB, DeviceMemory, StorageTypes
from model_runner.platforms.platform import Platform
from model_runner.processes import available_cores, can_start_threads, free_memory
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.recurrence.cpu import NativeRecurrence
from model_runner.recurrence.states import StateCache
from model_runner.sampling.sampler import NativeDraw, Sampler, pick, sample_allowed
from model_runner.sampling.truncations import NativeTruncations
from model_runner.scoring.early_exit import EarlyExit
from model_runner.spec.known_config import KnownConfig, MissingEntryError, read_known_config
from model_runner.spec.model_folder import Listing, open_checkpoint
from model_runner.spec.model_shape import ModelShape
from model_runner.spec.model_spec import ModelSpec, read_model_spec
from model_runner.spec.rotary import fix_long_rope
from model_runner.target import LoadedModel, TargetModel, modules_of
from model_runner.weights.checkpoint import Checkpoint, TensorCheckpoint
from model_runner.weights.checkpoint_quantization import has_plain_tensors, native_reader
from model_runner.weights.damage import naming_damage
from model_runner.weights.interleaved_experts import deinterleave_experts
from model_runner.weights.quantized_linears import LinearReader

if TYPE_CHECKING:
    from model_runner.images.tower import Tower, TowerShape

logger = logging.getLogger("samewise.runner")

_DEVICE = torch.device("cpu")
_CACHE_LIMIT = 4 * GIB
"""Upper limit of the KV cache's default size: other programs need memory, too."""
_CACHE_SHARE = 0.5
_RUNNING_BYTES = 30 << 20
"""Memory of a process besides tensors once it has run steps: 17 to 40 MiB measured."""
_TRANSFORMERS_BYTES = 160 << 20
"""Memory in addition with transformers imported: 157 MiB measured."""
_TOKEN_BYTES = 850
"""Memory of a token in the vocabulary for grammars: 34 MiB measured with 49,152 tokens, 222 MiB with 262,144."""
_LOGITS_COPIES = 7
"""Logits of the rows that are sampled, in the longest way: with penalties, truncation and logprobs."""
_HIDDEN_COPIES = 24
"""Temporaries of a layer of transformers, as multiples of the hidden states."""
_TEAMS = 4
"""Upper limit of threads that use torch with further threads of their own."""


class CpuPlatform(Platform):
    """Everything in float32, except weights, keys and values."""

    device = _DEVICE
    exact = True
    takes_indexers = True
    is_async = False

    def __init__(self, config: RunnerConfig) -> None:
        """Builds the native kernels at first use.

        Raises:
            ValueError: for settings that the CPU does not support, or if the kernels cannot be built.
        """
        if config.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype {config.dtype} is not supported on CPU; use float32 or auto")
        if not config.exact:
            raise ValueError("the CPU always computes exactly; remove --no-exact")
        self.max_model_len = config.max_model_len
        prepare_vector_math()
        threads = config.threads or available_cores()
        self._kernels = _load_kernels(threads)
        # OpenMP ends the process if it cannot start a thread, and starts as many for each thread that uses torch.
        torch.set_num_threads(threads if can_start_threads(_TEAMS * threads) else 1)
        weights = resolve_quantization(config.quantization)
        kind = resolve_activation_type(config.activation_type, weights, self._kernels)
        multiplies_stored_blocks = (
            config.multiplies_stored_blocks and config.quantization == "auto" and config.activation_type == "auto"
        )
        self._packer = (
            None
            if kind is None
            else NativePacker(self._kernels, kind, multiplies_stored_blocks=multiplies_stored_blocks)
        )
        kv = resolve_kv_dtype(config.kv_cache_dtype, torch.float32, _DEVICE, quantized_weights=weights is not None)
        self.types = StorageTypes(torch.float32, weights, kv)
        self.sample_allowed = partial(sample_allowed, self._kernels)
        self.activation_type = "float32" if kind is None else "int8" if kind == "int8_rotated" else "int16"
        self.kernels = self._kernels.isa

    @property
    def packer(self) -> NativePacker | None:
        """Packs weights for the native kernels; None if they stay in float32."""
        return self._packer

    @property
    def hardware(self) -> str:
        return torch.backends.cpu.get_cpu_capability()

    def sizes(self, config: RunnerConfig) -> Sizes:
        return Sizes(config.max_num_seqs or 64, config.max_num_batched_tokens or 512)

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory("cpu", free_memory(), _CACHE_SHARE, _CACHE_LIMIT)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Memory of a model's weights. A head that is shared with the embedding is also packed, as a copy."""
        if shape.spec is not None and self._packer is not None:
            return _spec_bytes(shape.spec, self._packer)
        return _weight_bytes(shape, None if self._packer is None else self._packer.kind)

    def process_bytes(self, imported: int, shape: ModelShape) -> int:
        needs_transformers = shape.spec is None or not isinstance(shape.spec.config, KnownConfig)
        vocabulary = shape.vocab_size * _TOKEN_BYTES
        return imported + _RUNNING_BYTES + vocabulary + (_TRANSFORMERS_BYTES if needs_transformers else 0)

    def step_bytes(self, shape: ModelShape, sizes: Sizes) -> int:
        row = _HIDDEN_COPIES * shape.hidden * torch.float32.itemsize if shape.spec is None else shape.spec.row_bytes
        rows = sizes.max_num_batched_tokens + _LOGITS_COPIES * sizes.max_num_seqs
        return sizes.max_num_batched_tokens * row + rows * shape.vocab_size * torch.float32.itemsize

    def loading_bytes(self, shape: ModelShape) -> int:
        if shape.spec is None:
            return super().loading_bytes(shape)
        largest = max(linear.outputs * linear.inputs for linear in shape.spec.linears) * torch.float32.itemsize
        return self.weight_bytes(shape) + min(SLAB_BYTES, largest)

    def weights_name(self, shape: ModelShape) -> str:
        if shape.spec is None or self._packer is None:
            return super().weights_name(shape)
        return ", ".join(sorted(set().union(*map(self._packer.names, shape.spec.linears))))

    def int4_bytes(self, shape: ModelShape) -> int | None:
        if self.types.weights == "int4":
            return None
        if shape.spec is not None:
            return _spec_bytes(shape.spec, NativePacker(self._kernels, "int4"))
        return _weight_bytes(shape, "int4")

    def inspect(self, folder: Path) -> ModelShape:
        listing = Listing.of(folder)
        with naming_damage(folder):
            spec = None if self._packer is None else self._read_spec(folder)
        return super().inspect(folder) if spec is None else replace(spec.shape(), listing=listing)

    def load(self, folder: Path, shape: ModelShape) -> LoadedModel:
        spec = shape.spec
        if spec is None or shape.listing is None or self._packer is None:
            return self._load_modules(folder, shape)
        logger.info("forward    as one native call")
        if any(map(self._packer.keeps, spec.linears)):
            self.activation_type = "int16"
        with cached(self._packer, spec, shape.listing, cache_folder()) as packer:
            return NativeModel(packer, spec)

    def inspect_tower(self, folder: Path, layout: Layout) -> "TowerShape":
        shape = super().inspect_tower(folder, layout)
        return shape if self._packer is None else replace(shape, packed_as=self._packer.in_int8.kind)

    def load_tower(self, folder: Path, layout: Layout) -> "Tower":
        tower = super().load_tower(folder, layout)
        if self._packer is not None:
            tower.pack(self._packer.in_int8)
        return tower

    def load_again(self, loaded: LoadedModel) -> LoadedModel:
        if isinstance(loaded, NativeModel):
            return loaded.twin()
        return super().load_again(loaded)

    def _read_spec(self, folder: Path) -> ModelSpec | None:
        """The model as plain data, to be packed as it is read; None if it needs transformers' modules."""
        known: Any = read_known_config(folder)
        if known is not None:
            with suppress(MissingEntryError):
                fix_long_rope(known, self.max_model_len)
                if (checkpoint := _open_natively(folder, known, native_reader(folder, known))) is not None:
                    return read_model_spec(known, checkpoint)
        from model_runner.modules.loading import load_config  # noqa: PLC0415 - transformers takes seconds

        config = load_config(folder)
        fix_long_rope(config, self.max_model_len)
        if (reader := native_reader(folder, config)) is None:
            config = self.read_config(folder)  # refuses a quantisation that is not supported
        checkpoint = _open_natively(folder, config, reader)
        return None if checkpoint is None else read_model_spec(config, checkpoint)

    def _load_modules(self, folder: Path, shape: ModelShape) -> LoadedModel:
        """Load transformers' modules, and replace as many of them as possible."""
        from model_runner.modules.experts import EXPERTS_NAME, register_experts  # noqa: PLC0415
        from model_runner.modules.loading import load_model  # noqa: PLC0415 - transformers takes seconds
        from model_runner.modules.packing import prepare  # noqa: PLC0415

        register_experts()
        model = load_model(folder, self.read_config(folder), torch.float32, EXPERTS_NAME, unused=shape.unused)
        if self._packer is not None:
            spec = read_model_spec(model.config, deinterleave_experts(TensorCheckpoint(model.state_dict())))
            if spec is not None:
                return NativeModel(self._packer, spec)
        prepare(model, self._packer)
        return model

    def may_mix(self, model: LoadedModel) -> bool:
        return not isinstance(model, NativeModel)  # every part of a native model is known, and computes by rows

    def make_cache(
        self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, groups: Sequence[CacheGroup] = ()
    ) -> KVCache:
        return KVCache(shapes, num_blocks, block_size, self.types.kv, _DEVICE, self._kernels, groups=groups)

    def attention(self, cache: KVCache) -> AttentionBackend[Any]:
        return NativeAttention(self._kernels, cache)

    @property
    def shares_scratch(self) -> bool:
        return True

    def recurrence(self, states: StateCache) -> RecurrenceBackend[Any]:
        return NativeRecurrence(self._kernels, states)

    def make_target(
        self,
        model: LoadedModel,
        attention: AttentionBackend[Any],
        max_model_len: int,
        needs: Collection[Feature] = (),
        recurrence: RecurrenceBackend[Any] | None = None,
    ) -> TargetModel:
        if isinstance(model, NativeModel):
            assert isinstance(attention, NativeAttention), "the kernels that packed the model also attend"
            assert recurrence is None or isinstance(recurrence, NativeRecurrence)
            return NativeTargetModel(model, attention, needs, recurrence)
        from model_runner.modules.target import HFTargetModel  # noqa: PLC0415 - transformers takes seconds

        return HFTargetModel(modules_of(model), attention, needs, partial(pick, self._kernels), recurrence)

    def find_early_exit(self, model: LoadedModel) -> EarlyExit | None:
        return NativeEarlyExit(model) if isinstance(model, NativeModel) else super().find_early_exit(model)

    def prepare_heads(self, heads: nn.Module) -> None:
        packer = replace(self._packer or NativePacker(self._kernels, "int8"), packing_kernels=self._kernels.copy())
        pack_weights(heads, packer.in_int8, OneDNNPacker())
        if isinstance(heads, HydraHeads):
            heads.make_native(self._kernels)

    def make_sampler(self, logprobs_mode: LogprobsMode) -> Sampler:
        divides = logprobs_mode == "raw"  # processed logprobs need divided logits
        return Sampler(NativeDraw(self._kernels, divides), logprobs_mode, NativeTruncations(self._kernels))


def _open_natively(folder: Path, config: Any, reader: LinearReader | None) -> Checkpoint | None:
    """The weights of a folder; None if transformers has to read them, as it does to dequantise some."""
    if reader is None and not has_plain_tensors(config):
        return None
    return open_checkpoint(folder, reader)


def _spec_bytes(spec: ModelSpec, packer: NativePacker) -> int:
    table = embedding_bytes(spec.embedding)
    layers = sum(map(packer.num_bytes, spec.linears[:-1])) + packer.in_int8.num_bytes(spec.head)
    return layers + table + spec.num_small * torch.float32.itemsize


def _weight_bytes(shape: ModelShape, kind: WeightKind | None) -> int:
    num_all = shape.num_parameters + shape.num_shared
    if kind is None:
        return num_all * torch.float32.itemsize
    return (num_all - shape.num_multiplied) * torch.float32.itemsize + shape.packed_bytes(kind)


def resolve_quantization(quantization: str) -> Literal["int8", "int4"] | None:
    """The type that weights are packed in; None leaves them in float32.

    Raises:
        ValueError: if the requested type is not supported here.
    """
    if quantization == "none":
        return None
    if quantization == "fp8":
        raise ValueError("quantization fp8 is only supported on CUDA; use int8 or int4 on CPU")
    return "int4" if quantization == "int4" else "int8"


def resolve_activation_type(
    wanted: InputType, weights: Literal["int8", "int4"] | None, kernels: Kernels
) -> WeightKind | None:
    """The kind of packed weights for this rounding of inputs.

    Raises:
        ValueError: if the weights' type leaves no choice, but `wanted` is set.
    """
    if weights == "int8":
        kinds: dict[InputType, WeightKind] = {"auto": kernels.int8_kind, "int8": "int8_rotated", "int16": "int8"}
        return kinds[wanted]
    if wanted != "auto":
        always = "int16" if weights == "int4" else "float32"
        raise ValueError(
            f"rows {wanted} needs int8 weights; {weights or 'float32'} weights always use {always}; remove --rows"
        )
    return weights


def _load_kernels(threads: int) -> Kernels:
    """The native kernels. Raises ValueError if they cannot be built or loaded."""
    try:
        library = kernels_library(cache_folder())
        kernels = Kernels(library, threads)
    except NoKernelsError as error:
        raise ValueError(
            f"the CPU kernels cannot be built: {error}; install a C++ compiler (g++ or clang++), or a wheel of this "
            "package, which has them compiled"
        ) from error
    if (isas := detect_isas()) and kernels.isa != isas[0]:
        logger.warning(
            "The kernels for %s could not be compiled, so those for %s serve, which are slower; to compile again, "
            "update the compiler or remove %s",
            isas[0],
            kernels.isa,
            library,
        )
    return kernels
