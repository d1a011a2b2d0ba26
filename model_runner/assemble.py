"""What a runner is made of, and putting it together from a configuration."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.config import RunnerConfig
from model_runner.cores import available_cores
from model_runner.kernels.build import NoKernelsError, build_kernels
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, KVCaches, cache_structs, resolve_kv_dtype
from model_runner.memory import MemoryPlan, StorageTypes, plan_memory
from model_runner.models.early_exit import EarlyExit, find_early_exit
from model_runner.models.features import Feature
from model_runner.models.fused import bind_layers
from model_runner.models.heads.base import Heads, TargetShape
from model_runner.models.heads.loading import load_heads
from model_runner.models.inspection import ModelShape, inspect_model
from model_runner.models.loading import (
    check_tokenizers,
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
    resolve_quantization,
)
from model_runner.models.native import NativePacker
from model_runner.models.repository import cache_folder
from model_runner.models.target import HFTargetModel, TargetModel
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.scoring.contrastive import ContrastiveDecoding
from model_runner.scoring.dola import LayerContrast
from model_runner.scoring.transform import ScoreTransform, Scoring
from model_runner.speculative.budget import Budget
from model_runner.speculative.heads import BY_WORTH, HeadsRoom, heads_size, make_heads_proposer
from model_runner.speculative.methods import Blocks, DraftModel, make_proposers
from model_runner.speculative.proposer import Proposer
from model_runner.speculative.speculator import Speculator
from model_runner.speculative.verify import Verifier
from model_runner.state import RunnerState

logger = logging.getLogger("samewise.runner")


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner can do."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    """Of the weights in products."""
    kv_dtype: str
    kernels: str
    """The instruction set of the native kernels, "none" without them."""
    speculation_methods: tuple[str, ...] = ()
    """Methods that a request can name."""
    num_early_exits: int = 0
    """Layers before which the model can be asked for the next token; 0 if it cannot."""
    weights_s: float = 0.0
    """Seconds that reading and packing the weights took."""
    first_step_s: float = 0.0
    """Seconds that the warm-up took."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of; tests put fakes in place of some."""

    target: TargetModel
    attention: AttentionBackend[Any]
    kv_cache: KVCache | KVCaches
    state: RunnerState
    speculator: Speculator
    budget: Budget
    verifier: Verifier
    scoring: Scoring = field(default_factory=Scoring)


def assemble(config: RunnerConfig) -> tuple[RunnerParts, RunnerInfo]:
    """Plan the memory, load the models and make everything around them.

    Raises:
        DoesNotFitError: if weights and cache do not fit in memory.
        UnsupportedModelError: if the architecture cannot be served, or heads do not fit it.
        ValueError: if device or dtype cannot be had, or a draft or auxiliary model does not go with the model.
    """
    device = resolve_device(config.device)
    threads = config.threads or available_cores()
    torch.set_num_threads(threads)
    kernels = _load_kernels(threads) if device.type == "cpu" else None
    hf_config = load_config(config.model)
    types = _resolve_types(config, resolve_dtype(config.dtype, hf_config, device), device, kernels)
    shape = inspect_model(hf_config)
    draft_shape = _inspect_beside(config, config.draft_model, "draft")
    aux_shape = _inspect_beside(config, config.aux_model, "auxiliary")
    others = [other for other in (draft_shape, aux_shape) if other is not None]
    heads = [load_heads(folder, TargetShape.of(hf_config)) for folder in config.heads]
    plan = plan_memory(shape, config, types, device, others, [heads_size(one, device) for one in heads])
    for line in plan.lines():
        logger.info(line)
    if aux_shape is not None:
        _check_length(plan, aux_shape)

    start = time.perf_counter()
    loader = _Loader(types, device, kernels, Blocks(plan.num_blocks, config.block_size, config.max_num_seqs))
    target = loader.load(config.model, shape)
    draft = loader.load_beside(config.draft_model, draft_shape)
    aux = loader.load_beside(config.aux_model, aux_shape)
    weights_s = time.perf_counter() - start
    sampling = SamplingState(config.max_num_seqs, shape.vocab_size, device)
    sampler = Sampler(shape.vocab_size, device, config.logprobs_mode, kernels)
    budget = Budget()
    proposers = _make_proposers(loader, target, draft, heads)
    trained = next((method for method in BY_WORTH if method in proposers), None)
    speculator = Speculator(proposers, budget, config.num_draft_tokens, trained)
    needs = frozenset[Feature]().union(*(proposer.needs for proposer in proposers.values()))
    early_exit = find_early_exit(target.model)
    parts = RunnerParts(
        target=HFTargetModel(target.model, device, needs),
        attention=target.attention,
        kv_cache=target.kv_cache if aux is None else KVCaches(target.kv_cache, aux.kv_cache),
        state=RunnerState(config.max_num_seqs, config.block_size, sampling, speculator, device),
        speculator=speculator,
        budget=budget,
        verifier=Verifier(sampling, sampler),
        scoring=_make_scoring(shape, early_exit, aux),
    )
    info = _describe(plan, shape.vocab_size, "none" if kernels is None else kernels.isa)
    return parts, replace(
        info,
        speculation_methods=speculator.methods,
        num_early_exits=0 if early_exit is None else early_exit.num_layers,
        weights_s=weights_s,
    )


def _inspect_beside(config: RunnerConfig, folder: Path | None, role: str) -> ModelShape | None:
    """The shape of a model that goes with the target, which must have the same tokens."""
    if folder is None:
        return None
    check_tokenizers(config.model, folder, role)
    return inspect_model(load_config(folder))


def _check_length(plan: MemoryPlan, aux: ModelShape) -> None:
    if aux.max_model_len < plan.max_model_len:
        raise ValueError(
            f"the auxiliary model's context holds {aux.max_model_len:,} tokens and the model's {plan.max_model_len:,}; "
            f"lower max_model_len to {aux.max_model_len}, or name another auxiliary model"
        )


def _make_proposers(
    loader: "_Loader", target: "_Loaded", draft: "_Loaded | None", heads: Sequence[Heads]
) -> dict[str, Proposer]:
    """Everybody who can guess tokens, by the names of the methods."""
    blocks = loader.blocks
    drafter = None if draft is None else DraftModel(HFTargetModel(draft.model, loader.device), draft.attention)
    proposers = make_proposers(target.model, target.attention, blocks, drafter)
    room = HeadsRoom(loader.kernels, loader.types.kv, blocks.num_blocks, blocks.block_size, blocks.max_num_seqs)
    return proposers | dict(make_heads_proposer(one, target.model, room) for one in heads)


def _make_scoring(shape: ModelShape, early_exit: EarlyExit | None, aux: "_Loaded | None") -> Scoring:
    """The transforms that the loaded models make possible."""
    transforms: list[ScoreTransform] = []
    if aux is not None:
        transforms.append(ContrastiveDecoding(HFTargetModel(aux.model, aux.model.device), aux.attention))
    if early_exit is not None:
        transforms.append(LayerContrast(early_exit, ties_embeddings=shape.num_shared > 0))
    return Scoring(transforms)


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: PreTrainedModel
    kv_cache: KVCache
    attention: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads models onto a device, each with a cache of its own."""

    types: StorageTypes
    device: torch.device
    kernels: Kernels | None
    blocks: Blocks

    def load(self, folder: Path, shape: ModelShape) -> _Loaded:
        packer = NativePacker(self.kernels, self.types.weights) if self.kernels and self.types.weights else None
        model = load_model(folder, load_config(folder), self.types.compute, self.device, packer)
        sizes = self.blocks.with_scratch, self.blocks.block_size
        kv_cache = KVCache(shape.kv, *sizes, self.types.kv, self.device, self.kernels)
        if self.kernels is None:
            return _Loaded(model, kv_cache, ReferenceAttention(kv_cache))
        if packer is not None:
            bind_layers(model, cache_structs(kv_cache))
        return _Loaded(model, kv_cache, NativeAttention(self.kernels, kv_cache))

    def load_beside(self, folder: Path | None, shape: ModelShape | None) -> _Loaded | None:
        """Another model, if there is one."""
        return None if folder is None or shape is None else self.load(folder, shape)


def _describe(plan: MemoryPlan, vocab_size: int, isa: str) -> RunnerInfo:
    return RunnerInfo(
        vocab_size=vocab_size,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        kernels=isa,
    )


def _load_kernels(threads: int) -> Kernels | None:
    """The native kernels; None, with a warning, where they cannot be built."""
    try:
        return Kernels(build_kernels(cache_folder()), threads)
    except NoKernelsError as error:
        logger.warning("no native kernels, so the server runs several times slower, in float32: %s", error)
        return None


def _resolve_types(
    config: RunnerConfig, compute: torch.dtype, device: torch.device, kernels: Kernels | None
) -> StorageTypes:
    weights = resolve_quantization(config.quantization, device, kernels)
    kv = resolve_kv_dtype(config.kv_cache_dtype, compute, device, quantized_weights=weights is not None)
    return StorageTypes(compute, weights, kv)
