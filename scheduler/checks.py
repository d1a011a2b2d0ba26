"""Admission checks: rejects malformed requests and requests that could not run even alone."""

from collections.abc import Sequence

from model_runner.contract import CacheGroup
from model_runner.image import Image
from scheduler.block_pool import blocks_for
from scheduler.interface import EngineRequest, SchedulerConfig


def check_request(
    request: EngineRequest,
    config: SchedulerConfig,
    num_blocks: int,
    groups: Sequence[CacheGroup] = (),
    *,
    takes_images: bool = False,
) -> None:
    """Raise ValueError, with the values that conflict, if the request can never run."""
    _check_choices(request)
    if request.images:
        _check_images(request, takes_images=takes_images)
    if config.sees_images:
        _check_spans(request, config.max_num_batched_tokens)
    _check_context(request, config)
    _check_strategy(request)
    _check_step(request, config)
    _check_blocks(request, config, num_blocks)
    _check_groups(request, config, groups)


def _check_choices(request: EngineRequest) -> None:
    name, max_tokens = request.request_id, request.max_tokens
    if max_tokens < 0:
        raise ValueError(f"request {name!r}: max_tokens must be at least 0, not {max_tokens}")
    indices = [choice.index for choice in request.choices]
    if not indices or len(set(indices)) < len(indices) or min(indices) < 0:
        raise ValueError(f"request {name!r}: choice indices must be distinct and non-negative, not {indices}")
    longest = max(len(choice.output) for choice in request.choices)
    if longest > max_tokens:
        raise ValueError(
            f"request {name!r} is resumed with {longest} output tokens, more than its max_tokens of {max_tokens}"
        )
    needs_state = request.sampling.mirostat is not None
    if any(needs_state and choice.output and choice.sampler_state is None for choice in request.choices):
        raise ValueError(f"request {name!r} uses mirostat and is resumed without sampler_state")


def _check_images(request: EngineRequest, *, takes_images: bool) -> None:
    name, sampling = request.request_id, request.sampling
    if not takes_images:
        raise ValueError(f"request {name!r} has images, but this runner takes none")
    if sampling.pooling is not None or sampling.contrastive is not None:
        how = "pooling" if sampling.pooling is not None else "an auxiliary model"
        raise ValueError(f"request {name!r}: images cannot be combined with {how}")
    places = [place for image in request.images for run in image.runs for place in (run.place, run.place + run.length)]
    rows = [row for image in request.images for row in _row_bounds(image)]
    if not all(image.runs for image in request.images) or places != sorted(places) or any(rows):
        raise ValueError(f"request {name!r}: the rows of its images are not in order, or some are missing")
    if places[0] < 0 or places[-1] > len(request.prompt):
        raise ValueError(f"request {name!r} has image rows outside of its {len(request.prompt)} prompt tokens")


def _check_spans(request: EngineRequest, budget: int) -> None:
    for image in request.images:
        if len(image.runs) > 1 or image.end == len(request.prompt):
            raise ValueError(f"request {request.request_id!r}: an image must be followed by text, and be in one run")
        if image.num_rows > budget:
            raise ValueError(
                f"request {request.request_id!r} has an image of {image.num_rows} tokens, which are computed in one "
                f"step, but max_num_batched_tokens is {budget}"
            )


def _row_bounds(image: Image) -> list[int]:
    """For each run of an image, how many rows are missing before it; all 0 if it is complete and in order."""
    ends = [0, *(run.row + run.length for run in image.runs)]
    return [run.row - end if run.length > 0 else 1 for run, end in zip(image.runs, ends, strict=False)]


def _check_context(request: EngineRequest, config: SchedulerConfig) -> None:
    if not request.prompt:
        raise ValueError(f"request {request.request_id!r} has an empty prompt")
    num_prompt = max(len(request.prompt), len(request.guide))
    total = num_prompt + request.max_tokens
    if total > config.max_model_len:
        raise ValueError(
            f"request {request.request_id!r} needs {num_prompt} prompt + {request.max_tokens} output tokens = {total}, "
            f"but the context holds {config.max_model_len}"
        )


def _check_strategy(request: EngineRequest) -> None:
    name, search = request.request_id, request.beam_search
    if bool(request.guide) != (request.sampling.guidance is not None):
        raise ValueError(f"request {name!r} must have both a guide and a guidance scale, or neither")
    if request.sampling.num_candidates and (search is not None or request.speculation is not None):
        raise ValueError(f"request {name!r}: contrastive search cannot be combined with beam search or speculation")
    continues = request.max_tokens > 0 or request.speculation is not None or search is not None
    if request.sampling.pooling is not None and (continues or request.width * len(request.choices) != 1):
        raise ValueError(f"request {name!r}: pooling takes one choice, max_tokens 0 and no decoding options")
    if search is None:
        return
    if search.groups < 1 or search.width < 1 or search.width % search.groups:
        raise ValueError(f"request {name!r}: {search.width} beams cannot be split into {search.groups} equal groups")
    if max(choice.index for choice in request.choices) >= search.width:
        raise ValueError(f"request {name!r} asks for more sequences than its {search.width} beams")
    if request.max_tokens < 1 or request.speculation is not None or request.guide:
        raise ValueError(f"request {name!r}: beam search needs max_tokens of at least 1, no speculation and no guide")


def _check_step(request: EngineRequest, config: SchedulerConfig) -> None:
    """Tokens that must be computed together must fit into one step."""
    name, width, num_candidates = request.request_id, request.width, request.sampling.num_candidates
    if width > config.max_num_seqs:
        raise ValueError(f"request {name!r} needs {width} slots at a time, but max_num_seqs is {config.max_num_seqs}")
    if width + num_candidates > config.max_num_batched_tokens:
        extra = f" and {num_candidates} candidates" if num_candidates else ""
        raise ValueError(
            f"request {name!r} computes {width} token{'s' if width > 1 else ''}{extra} in one step, "
            f"but max_num_batched_tokens is {config.max_num_batched_tokens}"
        )


def _check_blocks(request: EngineRequest, config: SchedulerConfig, num_blocks: int) -> None:
    num_prompt, num_candidates = len(request.prompt), request.sampling.num_candidates
    lengths = [num_prompt, len(request.guide)] if request.guide else [num_prompt + num_candidates] * request.width
    needed = sum(blocks_for(length + request.max_tokens, config.block_size) for length in lengths)
    if needed > num_blocks:
        extra = f" and {num_candidates} candidates" if num_candidates else ""
        each = f", {len(lengths)} times" if len(lengths) > 1 else ""
        raise ValueError(
            f"request {request.request_id!r} needs {needed} KV blocks of {config.block_size} tokens for {num_prompt} "
            f"prompt + {request.max_tokens} output tokens{extra}{each}, but the cache has {num_blocks}"
        )


def _check_groups(request: EngineRequest, config: SchedulerConfig, groups: Sequence[CacheGroup]) -> None:
    """Blocks of cache groups are given back as a choice goes on, so only what it holds at a time must fit."""
    length = max(len(request.prompt), len(request.guide)) + request.max_tokens
    for group in groups:
        needed = group.most_held(
            width=request.width,
            length=length,
            budget=config.max_num_batched_tokens,
            block_size=config.block_size,
            extra=request.sampling.num_candidates,
            snapshot_every=config.snapshot_every,
        )
        if needed > group.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} needs up to {needed} {group.kind} blocks for its {request.width} "
                f"sequences, but the cache has {group.num_blocks}"
            )
