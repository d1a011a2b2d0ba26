"""Builds a runner's parts from a configuration."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model_runner.attention.backend import AttentionBackend
from model_runner.config import RunnerConfig, Sizes
from model_runner.contract import CacheGroup, smallest_group
from model_runner.image_reader import LoadedReader
from model_runner.kv_cache import BlockCache, KVCache
from model_runner.learning.learning import NO_LEARNING, Learning
from model_runner.learning.link import ProcessLink
from model_runner.learning.wiring import MakeLink, fresh_proposer, make_learning
from model_runner.mixing_probe import ProbedCache, mixes_tokens, tolerance_of
from model_runner.planning import Blueprint, Shapes
from model_runner.platforms.choose import choose_platform
from model_runner.platforms.memory import MemoryPlan
from model_runner.platforms.platform import Platform
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.recurrence.states import StateCache
from model_runner.refusal import SEE_MODELS, UnsupportedModelError, describe_model
from model_runner.runner_interface import RunnerInfo
from model_runner.sampling.rows import SamplingState
from model_runner.scoring.contrastive_search import ContrastiveSearch
from model_runner.scoring.early_exit import EarlyExit
from model_runner.scoring.pooler import Pooler, load_classification_head
from model_runner.scoring.transforms import ContrastiveDecoding, Guidance, LayerContrast, ScoreTransform, Scoring
from model_runner.spec.model_shape import ModelShape
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.draft_kv import BlockGenerations, TargetBlocks
from model_runner.speculative.draft_model import LIMITS
from model_runner.speculative.grammar import GrammarProposer
from model_runner.speculative.heads import BY_WORTH, HeadsContext, make_heads_proposer
from model_runner.speculative.methods import make_proposers
from model_runner.speculative.speculator import Speculator
from model_runner.speculative.verify import Verifier
from model_runner.state import RunnerState
from model_runner.target import LoadedModel, OtherVocabulary, TargetModel

if TYPE_CHECKING:
    from model_runner.sampling.grammar import Grammars

logger = logging.getLogger("samewise.runner")


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The parts of a runner; tests replace some with fakes."""

    target: TargetModel
    caches: Sequence[BlockCache]
    """Caches of the target and the auxiliary model, and its recurrent states."""
    state: RunnerState
    speculator: Speculator
    controller: SpeculationController
    verifier: Verifier
    search: ContrastiveSearch
    grammars: "Grammars | None"
    """None if the package llguidance is not installed."""
    scoring: Scoring = field(default_factory=Scoring)
    pooler: Pooler = field(default_factory=Pooler)
    is_async: bool = False
    """Whether the host can work while the device computes (`Platform.is_async`)."""
    drafter: TargetModel | None = None
    """The draft model, if there is one; kept here to be warmed up."""
    learning: Learning = NO_LEARNING
    images: LoadedReader | None = None
    """None if prompts have no images."""


def assemble(
    config: RunnerConfig, platform: Platform | None = None, make_link: MakeLink = ProcessLink
) -> tuple[RunnerParts, RunnerInfo]:
    """Plan the memory, load the models and build all parts; `platform` defaults to the configured one.

    `make_link` connects to the process that trains heads; it is only called if heads are trained.

    Raises:
        DoesNotFitError: if weights and cache do not fit in memory.
        UnsupportedModelError: if the architecture is not supported, or heads do not fit the model.
        ValueError: if this platform does not support a setting, or a draft or auxiliary model does not fit the model.
    """
    platform = platform or choose_platform(config)
    blueprint = Blueprint.of(config, platform)
    shapes, sizes, needs = blueprint.shapes, blueprint.sizes, blueprint.needs
    plan = blueprint.before_measuring().fit(platform.device_memory())
    start = time.perf_counter()
    loaded = _load(config, platform, shapes.distinct)
    images = None if blueprint.reader is None else blueprint.reader.load(config, platform)
    weights_s = time.perf_counter() - start
    if (measured := platform.measure(loaded.target, shapes.target, sizes)) is not None:
        device_memory = replace(platform.device_memory(), free=measured.free + needs.model_bytes)
        needs = replace(needs, loading_bytes=0, step_bytes=measured.step_bytes)
        plan = replace(blueprint, needs=needs).fit(device_memory)
    for line in plan.lines():
        logger.info(line)
    generations = BlockGenerations(plan.num_blocks)
    blocks = TargetBlocks(plan.num_blocks, config.block_size, plan.max_num_seqs, generations, plan.groups)
    heads_context = HeadsContext(platform, blocks)
    parts, num_early_exits = _put_together(config, heads_context, plan, shapes, loaded, make_link, images)
    info = _describe(platform, plan, sizes, shapes.target, num_early_exits)
    if images is not None:
        max_rows = images.features.max_rows
        info = replace(info, takes_images=True, sees_images=images.sees_images, max_image_rows=max_rows)
    return parts, replace(info, speculation_methods=parts.speculator.methods, started_in=(("weights", weights_s),))


@dataclass(frozen=True, slots=True)
class _Weights:
    """The loaded models. Models from the same folder share their weights."""

    target: LoadedModel
    draft: LoadedModel | None
    aux: LoadedModel | None


def _load(config: RunnerConfig, platform: Platform, shapes: Mapping[Path, ModelShape]) -> _Weights:
    """Load every folder once; `shapes` are by resolved folder."""
    loaded: dict[Path, LoadedModel] = {}

    def load(folder: Path) -> LoadedModel:
        place = folder.resolve()
        if (first := loaded.get(place)) is not None:
            return platform.load_again(first)
        return loaded.setdefault(place, platform.load(folder, shapes[place]))

    target = load(config.model)
    draft = None if config.draft_model is None else load(config.draft_model)
    aux = None if config.aux_model is None else load(config.aux_model)
    return _Weights(target, draft, aux)


def _put_together(
    config: RunnerConfig,
    context: HeadsContext,
    plan: MemoryPlan,
    shapes: Shapes,
    loaded: _Weights,
    make_link: MakeLink,
    images: LoadedReader | None,
) -> tuple[RunnerParts, int]:
    """Build the parts; also returns how many early exits the model has."""
    platform, blocks = context.platform, context.blocks
    target = _with_cache(platform, loaded.target, shapes.target, blocks, blocks.num_blocks, blocks.groups)
    states, recurrence = _make_states(platform, shapes.target, plan)
    draft = _with_cache(platform, loaded.draft, shapes.draft, blocks, blocks.num_with_scratch(LIMITS.num_extended))
    aux = _with_cache(platform, loaded.aux, shapes.aux, blocks, blocks.num_blocks)
    assert target is not None
    grammars = _make_grammars(config.model, shapes.target.vocab_size)
    sampling = SamplingState(blocks.max_num_seqs, shapes.target.vocab_size, platform.device, grammars)
    sampler = platform.make_sampler(config.logprobs_mode)
    controller = SpeculationController()
    drafter = _companion(target, draft, platform, plan.max_model_len + blocks.scratch_tokens(LIMITS.num_extended))
    with_heads = dict(make_heads_proposer(one, target.model, context) for one in shapes.heads)
    learning: Learning = NO_LEARNING
    fresh = None
    if (learned := shapes.learned) is not None:
        if learned.folder is None:
            fresh = learned.method
            with_heads[fresh] = fresh_proposer(learned, target.model)
        learning = make_learning(config, learned, with_heads[learned.method], controller, platform, make_link)
    proposers = make_proposers(blocks, drafter, platform.sizes(config).max_num_batched_tokens) | with_heads
    trained = next((method for method in BY_WORTH if method in proposers and method != fresh), fresh)
    proposers["grammar"] = GrammarProposer(sampling.matcher)
    speculator = Speculator(proposers, controller, config.num_draft_tokens, trained, matcher_of=sampling.matcher)
    needs = learning.needs.union(*(proposer.needs for proposer in proposers.values()))
    search = ContrastiveSearch(sampling, sampler, plan.max_model_len)
    amateur = _companion(target, aux, platform, plan.max_model_len)
    early_exit = platform.find_early_exit(target.model)
    caches: tuple[BlockCache | None, ...] = (target.kv_cache, None if aux is None else aux.kv_cache, states)
    parts = RunnerParts(
        target=platform.make_target(target.model, target.attention, plan.max_model_len, needs, recurrence),
        caches=[cache for cache in caches if cache is not None],
        state=RunnerState(blocks, sampling, speculator, search, learning, images),
        speculator=speculator,
        controller=controller,
        verifier=Verifier(sampling, sampler, platform.sample_allowed),
        search=search,
        grammars=grammars,
        scoring=_make_scoring(amateur, early_exit, ties_embeddings=shapes.target.num_shared > 0),
        pooler=Pooler(load_classification_head(config.model, target.model.config)),
        is_async=platform.is_async,
        drafter=drafter,
        learning=learning,
        images=images,
    )
    _refuse_mixing(platform, target.model, parts.target, parts.state, plan)
    if aux is not None and amateur is not None:
        _refuse_mixing(platform, aux.model, amateur, parts.state, plan)
    return parts, 0 if early_exit is None else early_exit.num_layers


def _make_grammars(folder: Path, vocab_size: int) -> "Grammars | None":
    """None if llguidance is missing: tests and measurements on GPU machines run without it."""
    if find_spec("llguidance") is None:
        logger.warning("Structured outputs are not available: the package llguidance is not installed")
        return None
    from model_runner.sampling.grammar import Grammars  # noqa: PLC0415

    return Grammars(lambda: str((folder / "tokenizer.json").resolve(strict=True)), vocab_size)


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: LoadedModel
    kv_cache: KVCache
    attention: AttentionBackend[Any]


def _with_cache(
    platform: Platform,
    model: LoadedModel | None,
    shape: ModelShape | None,
    blocks: TargetBlocks,
    num_blocks: int,
    groups: Sequence[CacheGroup] = (),
) -> _Loaded | None:
    """The model with its own KV cache of so many blocks; the cache groups of `groups` have their own."""
    if model is None or shape is None:
        return None
    kv_cache = platform.make_cache(shape.kv, num_blocks, blocks.block_size, groups)
    attention = platform.attention(kv_cache)
    platform.try_attention(attention, kv_cache)
    return _Loaded(model, kv_cache, attention)


def _make_states(
    platform: Platform, shape: ModelShape, plan: MemoryPlan
) -> tuple[StateCache, RecurrenceBackend[Any]] | tuple[None, None]:
    """The recurrent states of the target, and their backend. Scratch blocks follow the rows blocks."""
    sizes = {group.kind: (number, group.num_blocks) for number, group in enumerate(plan.groups, 1)}
    if "rows" not in sizes:
        return None, None
    (number, num_rows), (_, num_pages) = sizes["rows"], sizes["page"]
    if not platform.shares_scratch:
        num_rows += plan.num_scratch
    of_model = shape.recurrences, shape.convolutions
    states = StateCache(*of_model, num_rows, num_pages, platform.device, number, shape.scans)
    if platform.shares_scratch:
        states.add_scratch(plan.num_scratch)
    return states, platform.recurrence(states)


def _refuse_mixing(
    platform: Platform, model: LoadedModel, target: TargetModel, state: RunnerState, plan: MemoryPlan
) -> None:
    """Raises UnsupportedModelError if the model's results would depend on other requests.

    Args:
        platform: the platform.
        model: the target, or the auxiliary model; a draft model affects no answer.
        target: the model on its cache.
        state: lays out steps.
        plan: the size of the cache.
    """
    if not platform.may_mix(model):
        return
    cache = ProbedCache(smallest_group(plan.num_blocks, plan.groups), plan.block_size, plan.max_model_len)
    tolerance = tolerance_of(platform.activation_type, exact=platform.exact)
    if mixes_tokens(target, state, cache, model.get_input_embeddings().num_embeddings, tolerance):
        raise UnsupportedModelError(
            f"{describe_model(model.config)} computes other logits in chunks next to another request than alone: its "
            f"layers mix tokens outside of attention, or its positions are not those of the request; {SEE_MODELS}"
        )


def _companion(target: _Loaded, other: _Loaded | None, platform: Platform, max_model_len: int) -> TargetModel | None:
    """A draft or auxiliary model, ready to run on the target's tokens."""
    if other is None:
        return None
    model = platform.make_target(other.model, other.attention, max_model_len)
    num_tokens, target_tokens = (one.model.get_input_embeddings().num_embeddings for one in (other, target))
    return model if num_tokens == target_tokens else OtherVocabulary(model, num_tokens, target_tokens)


def _make_scoring(amateur: TargetModel | None, early_exit: EarlyExit | None, *, ties_embeddings: bool) -> Scoring:
    """The score transforms that the loaded models support."""
    transforms: list[ScoreTransform] = [Guidance()]
    if amateur is not None:
        transforms.append(ContrastiveDecoding(amateur))
    if early_exit is not None:
        transforms.append(LayerContrast(early_exit, ties_embeddings=ties_embeddings))
    return Scoring(transforms)


def _describe(
    platform: Platform, plan: MemoryPlan, sizes: Sizes, shape: ModelShape, num_early_exits: int
) -> RunnerInfo:
    return RunnerInfo(
        vocab_size=shape.vocab_size,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        kernels=platform.kernels,
        activation_type=platform.activation_type,
        hardware=platform.hardware,
        software=f"torch {torch.__version__}, transformers {version('transformers')}",
        hidden_size=shape.hidden,
        num_early_exits=num_early_exits,
        groups=plan.groups,
    )
