"""Plans a runner's memory from the models' files, before any weights are read."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from model_runner.config import RunnerConfig, Sizes
from model_runner.heads.base import Heads, TargetShape
from model_runner.heads.loading import load_heads
from model_runner.heads.mtp import comes_with_mtp
from model_runner.image_reader import ImageReader, find_reader
from model_runner.learning.wiring import Learned, choose_learned
from model_runner.model_needs import ModelNeeds
from model_runner.platforms.cache_plan import StateBytes
from model_runner.platforms.choose import choose_platform
from model_runner.platforms.memory import GIB, DeviceMemory, MemoryPlan, Needs, plan_memory
from model_runner.platforms.platform import Platform
from model_runner.recurrence.states import BLOCK, scratch_bytes, state_bytes
from model_runner.refusal import refused
from model_runner.spec.model_folder import check_tokenizers
from model_runner.spec.model_shape import ModelShape
from model_runner.speculative.heads import heads_bytes, heads_kv, method_of
from model_runner.weights.size_check import check_folder

logger = logging.getLogger("samewise.runner")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of all models."""

    target: ModelShape
    draft: ModelShape | None
    aux: ModelShape | None
    heads: Sequence[Heads]
    distinct: Mapping[Path, ModelShape]
    """By the resolved folders of models, whose weights are loaded once."""
    learned: Learned | None

    def models(self) -> list[ModelShape]:
        """Shapes of the models that have a KV cache."""
        return [shape for shape in (self.target, self.draft, self.aux) if shape is not None]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that is known of a runner before weights are read."""

    config: RunnerConfig
    platform: Platform
    shapes: Shapes
    sizes: Sizes
    reader: ImageReader | None
    """None if prompts have no images."""
    needs: Needs

    @classmethod
    def of(cls, config: RunnerConfig, platform: Platform) -> "Blueprint":
        """Inspect the models' files.

        Raises:
            UnsupportedModelError: if the architecture is not supported, or heads do not fit the model.
            ValueError: if this platform does not support a setting, or a draft or auxiliary model does not fit.
        """
        shapes = _inspect(config, platform)
        if shapes.target.states and config.block_size != BLOCK:
            raise ValueError(f"a model with recurrent layers needs blocks of {BLOCK} tokens; set --block-size {BLOCK}")
        sizes = platform.sizes(config)
        reader = find_reader(config, platform)
        needs = replace(_needs(shapes, platform), step_bytes=_step_bytes(shapes, platform, config, sizes))
        if reader is not None:
            loading_bytes = max(needs.loading_bytes, needs.model_bytes + reader.loading_bytes)
            needs = replace(needs, image_bytes=reader.num_bytes, loading_bytes=loading_bytes)
        return cls(config, platform, shapes, sizes, reader, needs)

    def before_measuring(self) -> "Blueprint":
        """Without a step's memory if that will be measured: an estimate must not refuse what fits."""
        is_known = not self.platform.measures_steps
        return self if is_known else replace(self, needs=replace(self.needs, step_bytes=0))

    def fit(self, device_memory: DeviceMemory) -> MemoryPlan:
        """The memory plan for this room. Raises the errors of `plan_memory`."""
        plan = plan_memory(self.needs, device_memory, self.config, self.sizes, self.platform.types)
        if (aux := self.shapes.aux) is not None and aux.max_model_len < plan.max_model_len:
            raise ValueError(
                f"the auxiliary model supports {aux.max_model_len:,} tokens, but max_model_len is "
                f"{plan.max_model_len:,}; set --max-model-len {aux.max_model_len}, or use another auxiliary model"
            )
        return plan


def plan_model(
    config: RunnerConfig, imported: int, budgets: Mapping[str, int], cache_share: float | None = None
) -> ModelNeeds:
    """Plan the memory of an engine process with these models. Reads no weights.

    Args:
        config: the configuration. A KV cache without a size gets the default of the platform.
        imported: private memory of a process that has only imported its modules, on the host.
        budgets: bytes that the process may take in all, by the kind of its device; without an entry, what is free.
        cache_share: share of the memory that the weights leave free that goes to the cache; None: the platform's.

    Raises:
        DoesNotFitError: if weights and cache do not fit.
        UnsupportedModelError, ValueError: as for `Blueprint.of`.
    """
    with refused(f"{config.model} cannot be served", ValueError, OSError):
        platform = choose_platform(config)
        blueprint = Blueprint.of(config, platform)
        process_bytes = platform.process_bytes(imported, blueprint.shapes.target)
        device_memory, budget = platform.device_memory(), budgets.get(platform.device.type)
        given = replace(
            device_memory,
            free=device_memory.free if budget is None else budget - process_bytes,
            cache_share=device_memory.cache_share if cache_share is None else cache_share,
        )
        plan = blueprint.fit(given)
    return ModelNeeds(
        device=plan.device,
        free_bytes=device_memory.free,
        weight_bytes=plan.weight_bytes,
        loading_bytes=blueprint.needs.loading_bytes,
        step_bytes=blueprint.needs.step_bytes,
        cache_bytes=plan.cache_bytes,
        image_bytes=plan.image_bytes,
        learning_bytes=plan.learning_bytes,
        process_bytes=process_bytes,
        max_model_len=plan.max_model_len,
        num_tokens=plan.num_tokens,
        vocab_size=blueprint.shapes.target.vocab_size,
        kv_cache_gib=plan.cache_room / GIB,
    )


def _inspect(config: RunnerConfig, platform: Platform) -> Shapes:
    check_folder(config.model)
    target = platform.inspect(config.model)
    fitting = TargetShape(target.hidden, target.vocab_size, target.num_layers)
    heads = [load_heads(folder, fitting) for folder in config.heads]
    _check_methods(config.heads, heads)
    if not heads and config.speculation != "off" and comes_with_mtp(config.model):
        logger.info("heads      the model's own module for multi-token prediction drafts with --heads %s", config.model)
    draft = _inspect_companion(config, platform, config.draft_model, "draft")
    aux = _inspect_companion(config, platform, config.aux_model, "auxiliary")
    folders = config.model, config.draft_model, config.aux_model
    distinct = {
        folder.resolve(): shape for folder, shape in zip(folders, (target, draft, aux), strict=True) if folder and shape
    }
    learned = choose_learned(config, heads, fitting) if config.learn else None
    return Shapes(target, draft, aux, heads, distinct, learned)


def _check_methods(folders: Sequence[Path], heads: Sequence[Heads]) -> None:
    """Refuse two sets of heads with the same method: a request chooses heads by the method's name."""
    taken: dict[str, Path] = {}
    for folder, one in zip(folders, heads, strict=True):
        method = method_of(one.kind)
        if method in taken:
            raise ValueError(f"the heads in {taken[method]} and {folder} both draft by {method}; remove one")
        taken[method] = folder


def _inspect_companion(config: RunnerConfig, platform: Platform, folder: Path | None, role: str) -> ModelShape | None:
    """The shape of a draft or auxiliary model, which must have the target's tokenizer."""
    if folder is None:
        return None
    check_folder(folder)
    check_tokenizers(config.model, folder, role)
    shape = platform.inspect(folder)
    if shape.states:
        raise ValueError(f"the {role} model {folder} has recurrent layers, which only the served model can have")
    return shape


def _state_bytes(target: ModelShape, platform: Platform) -> StateBytes:
    """The memory of the target's recurrent states."""
    states = target.states
    rows, page = state_bytes(states)
    return StateBytes(rows, page, scratch_bytes(states) if platform.shares_scratch else rows)


def _step_bytes(shapes: Shapes, platform: Platform, config: RunnerConfig, sizes: Sizes) -> int:
    """Memory of the largest step, with a scratch block of each choice for each drafter that has a cache."""
    drafters = [
        *(() if shapes.draft is None else shapes.draft.kv),
        *(kv for one in shapes.heads for kv in heads_kv(one)),
    ]
    scratch = sizes.max_num_seqs * config.block_size * sum(kv.num_bytes(platform.types.kv) for kv in drafters)
    return max(platform.step_bytes(shape, sizes) for shape in shapes.models()) + scratch


def _needs(shapes: Shapes, platform: Platform) -> Needs:
    """The needs of all models, but not what steps and images need."""
    models, heads, learned = shapes.models(), shapes.heads, shapes.learned
    spare_bytes = 0 if learned is None else learned.spare_bytes
    of_heads = [kv for one in heads for kv in heads_kv(one)]
    in_int4 = [platform.int4_bytes(model) for model in shapes.distinct.values()]
    return Needs(
        model_bytes=sum(platform.weight_bytes(model) for model in shapes.distinct.values()),
        heads_bytes=sum(heads_bytes(one, platform.device) for one in heads) + spare_bytes,
        loading_bytes=sum(platform.loading_bytes(model) for model in shapes.distinct.values()),
        weights_name=platform.weights_name(shapes.target),
        kv=(*shapes.target.kv, *(replace(kv, window=None) for model in models[1:] for kv in model.kv), *of_heads),
        max_model_len=shapes.target.max_model_len,
        states=_state_bytes(shapes.target, platform),
        learning_bytes=learned.planned_bytes if learned is not None and platform.device.type == "cpu" else 0,
        int4_bytes=None if None in in_int4 else sum(filter(None, in_int4)),
    )
