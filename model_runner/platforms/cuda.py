"""CUDA platform: Triton kernels, and CUDA graphs for small steps."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import triton
from torch import nn
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.triton import TritonAttention
from model_runner.batch import prompt_batch
from model_runner.config import LogprobsMode, RunnerConfig, Sizes
from model_runner.contract import CacheGroup
from model_runner.cuda.graphs import GraphedTarget, GraphMaker, graph_sizes
from model_runner.cuda.layer import CudaDecoderLayer, compile_layers, replace_layers, replace_norms
from model_runner.cuda.linear import (
    GROUPED_EXPERTS_NAME,
    GpuWeightKind,
    group_experts,
    make_product,
    register_grouped_experts,
    tile_shapes_agree,
)
from model_runner.features import Feature, decoder_layers
from model_runner.kernels.triton.linear import FP8
from model_runner.kernels.triton.pick import pick
from model_runner.kernels.vector_math import prepare_vector_math
from model_runner.kv_cache import KVCache, KVShape, resolve_kv_dtype
from model_runner.model_needs import DoesNotFitError
from model_runner.modules.linears import pack_weights
from model_runner.modules.loading import load_config, load_model
from model_runner.modules.target import HFTargetModel
from model_runner.platforms.memory import GIB, DeviceMemory, Measured, StorageTypes
from model_runner.platforms.platform import Platform
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.recurrence.states import StateCache
from model_runner.recurrence.triton import TritonRecurrence
from model_runner.refusal import UnsupportedModelError
from model_runner.sampling.sampler import Sampler
from model_runner.sampling.triton_draw import TritonDraw
from model_runner.spec.model_shape import ModelShape
from model_runner.target import LoadedModel, TargetModel, modules_of
from model_runner.weights.checkpoint_quantization import is_quantized

logger = logging.getLogger("samewise.runner")

_CACHE_SHARE = 0.92
"""Share of the memory left by weights and the largest step; the rest is for graphs and fragmentation."""
_BYTES: Mapping[GpuWeightKind, float] = {"fp8": 1.0, "int4": 0.53}
"""Bytes per weight, including its share of the scales."""
_CONTEXT_BYTES = 600 << 20
"""A rough estimate of the memory of a process on a GPU, with its loaded kernels."""
_HIDDEN_COPIES = 16
"""A rough estimate of a layer's temporaries, as multiples of the hidden states."""
_MOST_GRAPHED = 512
"""Rows of the largest graph: enough for 256 choices without drafts, or fewer with drafts."""
_LARGE = 40 * GIB
"""GPUs with at least this much memory get larger steps."""


class CudaPlatform(Platform):
    """Everything in the checkpoint's type, unless weights or KV cache are quantised."""

    is_async = True
    measures_steps = True
    kernels = f"triton {triton.__version__}"

    def __init__(
        self,
        config: RunnerConfig,
        device: torch.device,
        make_graphs: Callable[[], GraphMaker] | None,
        num_programs: int | None = None,
    ) -> None:
        """Raises ValueError for settings that CUDA does not support.

        Args:
            config: the configuration.
            device: the CUDA device.
            make_graphs: returns a maker of CUDA graphs for each model; None runs all steps without graphs.
            num_programs: how many programs of a kernel run at once; None: as many as the device can run.
        """
        prepare_vector_math()
        self.device = device
        self.max_model_len = config.max_model_len
        if config.threads is not None:
            raise ValueError("threads only applies to CPU kernels; remove --threads on CUDA")
        if config.activation_type != "auto":
            raise ValueError("rows only applies to CPU kernels; remove --rows on CUDA")
        compute = _compute_type(config)
        self._weights = _weight_kind(config)
        kv = resolve_kv_dtype(config.kv_cache_dtype, compute, torch.device("cuda"), quantized_weights=False)
        self.types = StorageTypes(compute, self._weights, kv)
        self.activation_type = "fp8" if self._weights == "fp8" else str(compute).removeprefix("torch.")
        self.exact = config.exact
        self._num_programs = num_programs
        self._one_shape = self.exact and not self._shapes_agree()
        self._make_graphs = make_graphs
        self._graph_sizes = graph_sizes(min(_MOST_GRAPHED, self.sizes(config).max_num_batched_tokens))

    @property
    def hardware(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def sizes(self, config: RunnerConfig) -> Sizes:
        is_large = torch.cuda.mem_get_info(self.device)[1] >= _LARGE
        seqs, tokens = (256, 8192) if is_large else (128, 2048)
        return Sizes(config.max_num_seqs or seqs, config.max_num_batched_tokens or tokens)

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(str(self.device), torch.cuda.mem_get_info(self.device)[0], _CACHE_SHARE)

    def process_bytes(self, imported: int, shape: ModelShape) -> int:
        return _CONTEXT_BYTES

    def step_bytes(self, shape: ModelShape, sizes: Sizes) -> int:
        logits = shape.vocab_size * (self.types.compute.itemsize + torch.float32.itemsize)
        return sizes.max_num_batched_tokens * (logits + _HIDDEN_COPIES * shape.hidden * self.types.compute.itemsize)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Memory of a model's weights. Embeddings, norms and the head keep their type."""
        return self._bytes(shape, self._weights)

    def _bytes(self, shape: ModelShape, weights: GpuWeightKind | None) -> int:
        itemsize = self.types.compute.itemsize
        if weights is None:
            return shape.num_parameters * itemsize
        num_packed = shape.num_groupable if weights == "int4" else shape.num_inner
        return (shape.num_parameters - num_packed) * itemsize + int(num_packed * _BYTES[weights])

    def int4_bytes(self, shape: ModelShape) -> int | None:
        return None if self._weights == "int4" else self._bytes(shape, "int4")

    def load(self, folder: Path, shape: ModelShape) -> PreTrainedModel:
        register_grouped_experts()
        config = self.read_config(folder)
        if is_quantized(config):  # transformers packs and multiplies these in its own way
            return load_model(folder, config, self.types.compute, device=self.device, unused=shape.unused)
        model = load_model(folder, config, self.types.compute, GROUPED_EXPERTS_NAME, self.device, shape.unused)
        self._prepare(model)
        return model

    def may_mix(self, model: LoadedModel) -> bool:
        # Known layers compute by rows. A trial shows whether they also do so exactly on this GPU.
        layers = decoder_layers(cast("PreTrainedModel", model))
        return self.exact or not all(isinstance(layer, CudaDecoderLayer) for layer in layers)

    def make_cache(
        self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, groups: Sequence[CacheGroup] = ()
    ) -> KVCache:
        return KVCache(shapes, num_blocks, block_size, self.types.kv, self.device, whole_keys=True, groups=groups)

    def attention(self, cache: KVCache) -> AttentionBackend[Any]:
        num_heads = max((shape.num_heads * shape.group for shape in cache.shapes), default=1)
        num_programs = self._num_programs if cache.shapes else 1  # Mamba never calls it
        return TritonAttention(cache, exact=self.exact, num_heads=num_heads, num_programs=num_programs)

    def recurrence(self, states: StateCache) -> RecurrenceBackend[Any]:
        return TritonRecurrence(states)

    def make_target(
        self,
        model: LoadedModel,
        attention: AttentionBackend[Any],
        max_model_len: int,
        needs: Collection[Feature] = (),
        recurrence: RecurrenceBackend[Any] | None = None,
    ) -> TargetModel:
        target = HFTargetModel(modules_of(model), attention, needs, pick, recurrence)
        if self._make_graphs is None or recurrence is not None:  # a graph would keep the plan of recurrences
            return target
        assert isinstance(attention, TritonAttention)
        return GraphedTarget(target, attention, self._graph_sizes, self._make_graphs(), max_model_len)

    def prepare_heads(self, heads: nn.Module) -> None:
        """Move draft heads to the device. They compute in float32; drafts do not affect answers."""
        heads.to(self.device)

    def make_sampler(self, logprobs_mode: LogprobsMode) -> Sampler:
        return Sampler(TritonDraw(divides=logprobs_mode == "raw"), logprobs_mode)  # processed: of divided logits

    @torch.inference_mode()
    def measure(self, model: LoadedModel, shape: ModelShape, sizes: Sizes) -> Measured:
        """Measure memory while prompts fill a whole step, with the logits of every token.

        It is the model's first run, so it raises UnsupportedModelError if weights are used in an unsupported way.
        """
        block_size = 32
        length = min(sizes.max_num_batched_tokens, shape.max_model_len)
        prompts = [[0] * length] * (sizes.max_num_batched_tokens // length)
        num_blocks = len(prompts) * -(-length // block_size)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            target = HFTargetModel(modules_of(model), self.attention(self.make_cache(shape.kv, num_blocks, block_size)))
            before = torch.cuda.memory_allocated(self.device)
            target.forward(prompt_batch(prompts, block_size))
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                f"a step of {sizes.max_num_batched_tokens:,} tokens does not fit into the memory left by the weights; "
                "lower --max-num-batched-tokens"
            ) from error
        except NotImplementedError as error:
            raise UnsupportedModelError(str(error)) from error
        taken = torch.cuda.max_memory_allocated(self.device) - before
        del target
        torch.cuda.empty_cache()
        return Measured(torch.cuda.mem_get_info(self.device)[0], taken)

    def _prepare(self, model: PreTrainedModel) -> None:
        """Convert the weights to the form that they are multiplied in.

        The head is never quantised, because its error would reach every logit. Its product also accepts float32 rows,
        which draft heads use.
        """
        make = partial(make_product, kind=self._weights, exact=self.exact, one_shape=self._one_shape)
        make_dense = partial(make_product, kind=None, exact=self.exact, one_shape=self._one_shape)
        logger.info("layers     %d as fused operators", replace_layers(model, make))
        try:
            group_experts(model, self._weights, one_shape=self._one_shape)
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        if self.exact:
            _replace_norms(model)
        if (head := model.get_output_embeddings()) is not None:  # type: ignore[no-untyped-call]
            pack_weights(head, make_dense, make_dense)
        if self.exact or self._weights is not None:
            pack_weights(model, make, make_dense)
        else:
            compile_layers(model)

    def _shapes_agree(self) -> bool:
        """Whether products may use tiles of different shapes; logs a warning if not, as products are slower then."""
        products = {self.types.compute, FP8 if self._weights == "fp8" else self.types.compute}
        if all(tile_shapes_agree(self.device, dtype) for dtype in products - {torch.float32}):
            return True
        logger.warning("Tile shapes round differently on %s: all products use one shape, which is slower", self.device)
        return False


def _replace_norms(model: PreTrainedModel) -> None:
    if varying := replace_norms(model).varying:
        raise UnsupportedModelError(
            f"{model.config.model_type} models have norms ({', '.join(sorted(varying))}) whose results depend on the "
            "batch on CUDA; allow that with --no-exact"
        )


def _compute_type(config: RunnerConfig) -> torch.dtype:
    """The configured type, or the checkpoint's."""
    name = load_config(config.model).dtype or "bfloat16" if config.dtype == "auto" else config.dtype
    compute: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return compute


def _weight_kind(config: RunnerConfig) -> GpuWeightKind | None:
    if config.quantization == "int8":
        raise ValueError("quantization int8 is only supported on CPU; use fp8 or int4 on CUDA")
    return config.quantization if config.quantization in ("fp8", "int4") else None
