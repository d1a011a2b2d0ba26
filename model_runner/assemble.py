"""What a runner is made of, and putting it together from a configuration."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.config import RunnerConfig
from model_runner.contrastive_search import ContrastiveSearch
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
from model_runner.sampling.draw import Draw, NativeDraw, TorchDraw
from model_runner.sampling.picks import PickPlan, Prepicks
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.scoring.contrastive import ContrastiveDecoding
from model_runner.scoring.dola import LayerContrast
from model_runner.scoring.guidance import Guidance
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
    search: ContrastiveSearch
    scoring: Scoring = field(default_factory=Scoring)
    pick: Callable[[Tensor, PickPlan], Prepicks] | None = None
    """Finds tokens in a step's logits, all at once, where the device can."""


def assemble(config: RunnerConfig) -> tuple[RunnerParts, RunnerInfo]:
    """Plan the memory, load the models and make everything around them.

    Raises:
        DoesNotFitError: if weights and cache do not fit in memory.
        UnsupportedModelError: if the architecture cannot be served, or heads do not fit it.
        ValueError: if device or dtype cannot be had, or a draft or auxiliary model does not go with the model.
    """
    layout = _lay_out(config)
    start = time.perf_counter()
    models = _load_models(config, layout)
    weights_s = time.perf_counter() - start
    target, device, vocab_size = models.target, layout.device, layout.shape.vocab_size
    sampling = SamplingState(config.max_num_seqs, vocab_size, device)
    draw, pick = _make_draw(config, layout)
    sampler = Sampler(draw, config.logprobs_mode)
    budget = Budget()
    proposers = _make_proposers(config, layout, models)
    trained = next((method for method in BY_WORTH if method in proposers), None)
    speculator = Speculator(proposers, budget, config.num_draft_tokens, trained)
    needs = frozenset[Feature]().union(*(proposer.needs for proposer in proposers.values()))
    search = ContrastiveSearch(sampling, sampler, layout.plan.max_model_len)
    early_exit = find_early_exit(target.model)
    parts = RunnerParts(
        target=HFTargetModel(target.model, device, needs),
        attention=target.attention,
        kv_cache=target.kv_cache if models.aux is None else KVCaches(target.kv_cache, models.aux.kv_cache),
        state=RunnerState(config.max_num_seqs, config.block_size, sampling, speculator, search),
        speculator=speculator,
        budget=budget,
        verifier=Verifier(sampling, sampler),
        search=search,
        scoring=_make_scoring(layout, models.aux, early_exit),
        pick=pick,
    )
    num_early_exits = 0 if early_exit is None else early_exit.num_layers
    return parts, _describe(layout, speculator.methods, num_early_exits, weights_s)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What is known before any weights of models are read."""

    device: torch.device
    kernels: Kernels | None
    types: StorageTypes
    shape: ModelShape
    draft: ModelShape | None
    aux: ModelShape | None
    heads: Sequence[Heads]
    plan: MemoryPlan


def _lay_out(config: RunnerConfig) -> _Layout:
    """Look at the machine and at the models, and share out the memory."""
    device = resolve_device(config.device)
    threads = config.threads or available_cores()
    torch.set_num_threads(threads)
    kernels = _load_kernels(threads) if device.type == "cpu" else None
    hf_config = load_config(config.model)
    types = _resolve_types(config, resolve_dtype(config.dtype, hf_config, device), device, kernels)
    shape = inspect_model(hf_config)
    draft = _inspect_beside(config, config.draft_model, "draft")
    aux = _inspect_beside(config, config.aux_model, "auxiliary")
    heads = [load_heads(folder, TargetShape.of(hf_config)) for folder in config.heads]
    others = [other for other in (draft, aux) if other is not None]
    plan = plan_memory(shape, config, types, device, others, [heads_size(one, device) for one in heads])
    for line in plan.lines():
        logger.info(line)
    if aux is not None:
        _check_length(plan, aux)
    return _Layout(device, kernels, types, shape, draft, aux, heads, plan)


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


def _make_proposers(config: RunnerConfig, layout: _Layout, models: "_Models") -> dict[str, Proposer]:
    """Everybody who can guess tokens, by the names of the methods."""
    target, draft = models.target, models.draft
    drafter = None if draft is None else DraftModel(HFTargetModel(draft.model, layout.device), draft.attention)
    proposers = make_proposers(target.model, target.attention, _blocks(config, layout), drafter)
    sizes = layout.plan.num_blocks, config.block_size, config.max_num_seqs
    room = HeadsRoom(layout.kernels, layout.types.kv, *sizes)
    return proposers | dict(make_heads_proposer(one, target.model, room) for one in layout.heads)


def _make_draw(config: RunnerConfig, layout: _Layout) -> tuple[Draw, Callable[[Tensor, PickPlan], Prepicks] | None]:
    """What draws tokens, and what finds them beforehand, if the device has it."""
    divides = config.logprobs_mode == "raw"  # processed logprobs need what is divided
    if layout.device.type == "cuda":
        from model_runner.sampling.triton_draw import TritonDraw, picks_of  # noqa: PLC0415  (brings triton)

        return TritonDraw(divides), picks_of
    if layout.kernels is not None:
        return NativeDraw(layout.kernels, divides), None
    return TorchDraw(layout.shape.vocab_size, layout.device), None


def _make_scoring(layout: _Layout, aux: "_Loaded | None", early_exit: EarlyExit | None) -> Scoring:
    """The transforms that the loaded models make possible."""
    transforms: list[ScoreTransform] = [Guidance()]
    if aux is not None:
        transforms.append(ContrastiveDecoding(HFTargetModel(aux.model, layout.device), aux.attention))
    if early_exit is not None:
        transforms.append(LayerContrast(early_exit, ties_embeddings=layout.shape.num_shared > 0))
    return Scoring(transforms)


def _blocks(config: RunnerConfig, layout: _Layout) -> Blocks:
    return Blocks(layout.plan.num_blocks, config.block_size, config.max_num_seqs)


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: PreTrainedModel
    kv_cache: KVCache
    attention: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class _Models:
    target: _Loaded
    draft: _Loaded | None
    aux: _Loaded | None


def _load_models(config: RunnerConfig, layout: _Layout) -> _Models:
    """All models on the device, each with a cache of its own."""
    blocks = _blocks(config, layout)

    def load(folder: Path | None, shape: ModelShape | None) -> _Loaded | None:
        return None if folder is None or shape is None else _load(folder, shape, layout, blocks)

    return _Models(
        _load(config.model, layout.shape, layout, blocks),
        load(config.draft_model, layout.draft),
        load(config.aux_model, layout.aux),
    )


def _load(folder: Path, shape: ModelShape, layout: _Layout, blocks: Blocks) -> _Loaded:
    kernels, types = layout.kernels, layout.types
    packer = NativePacker(kernels, types.weights) if kernels and types.weights else None
    model = load_model(folder, load_config(folder), types.compute, layout.device, packer)
    kv_cache = KVCache(shape.kv, blocks.with_scratch, blocks.block_size, types.kv, layout.device, kernels)
    if kernels is None:
        return _Loaded(model, kv_cache, ReferenceAttention(kv_cache))
    if packer is not None:
        bind_layers(model, cache_structs(kv_cache))
    return _Loaded(model, kv_cache, NativeAttention(kernels, kv_cache))


def _describe(layout: _Layout, methods: tuple[str, ...], num_early_exits: int, weights_s: float) -> RunnerInfo:
    plan = layout.plan
    return RunnerInfo(
        vocab_size=layout.shape.vocab_size,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        kernels="none" if layout.kernels is None else layout.kernels.isa,
        speculation_methods=methods,
        num_early_exits=num_early_exits,
        weights_s=weights_s,
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
