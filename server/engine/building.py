"""Builds engines in the engine process: imports what they need, plans their memory, loads them.

It is the only server module that uses the runner. It imports the runner inside functions, so importing this module does
not load torch.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from model_runner.config import RunnerConfig
from model_runner.encoders.folder import find_encoder
from model_runner.kernels.background_build import build_early
from model_runner.model_needs import ModelNeeds
from model_runner.processes import private_memory, without_collecting
from model_runner.runner_interface import RunnerInfo
from scheduler.block_pool import blocks_for
from scheduler.prefix_cache import CacheLog
from server.engine.beam_stop_strings import StopStringWatches
from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig, Plan

if TYPE_CHECKING:
    from model_runner.encoders.runner import EncoderRunner
    from model_runner.runner import ModelRunner
    from server.text.tokenizer import Tokenizer

_SNAPSHOT_EVERY = 2048
"""A state of Qwen3.5-0.8B takes as much memory as the keys and values of 1,600 tokens."""

_WARM = ("model_runner.planning", "model_runner.runner", "scheduler.engine", "scheduler.scheduler")
"""Modules that bring what most models need."""


@cache
def warm() -> int:
    """Import what most models need, and load nothing. Returns the private memory of the process afterwards, in bytes.

    It does not touch a GPU.
    """
    with without_collecting():
        for module in _WARM:
            import_module(module)
    return private_memory()


def plan(asked: Plan) -> ModelNeeds:
    """Memory that an engine will need. Raises ValueError or OSError, whose message tells the user why it cannot run."""
    imported = warm()
    runner = asked.config.runner
    encoder = find_encoder(runner.model)
    if encoder is None:
        from model_runner.planning import plan_model  # noqa: PLC0415

        return plan_model(runner, imported, asked.budgets, asked.cache_share)
    from model_runner.encoders.runner import plan_encoder  # noqa: PLC0415

    return plan_encoder(runner, encoder, imported, asked.budgets.get("cpu"))


def load(config: EngineConfig) -> LoadedEngine:
    """Load an engine. Raises ValueError or OSError, with a message for the user, if the model cannot be served."""
    start = time.perf_counter()
    with without_collecting():
        from model_runner.hub.repository import cache_folder  # noqa: PLC0415

        build_early(cache_folder(), config.runner.device)
        load_runner = _loader(config.runner)
        from scheduler.engine import Engine  # noqa: PLC0415
        from scheduler.interface import SchedulerConfig  # noqa: PLC0415
        from scheduler.scheduler import Scheduler  # noqa: PLC0415

    imports_s = time.perf_counter() - start
    runner = load_runner()
    check_speculation(config.runner, runner.info.speculation_methods)
    scheduler_config = SchedulerConfig(
        block_size=runner.info.block_size,
        max_num_seqs=runner.info.max_num_seqs,
        max_num_batched_tokens=runner.info.max_num_batched_tokens,
        max_model_len=runner.info.max_model_len,
        policy=config.policy,
        prefix_caching=config.prefix_caching and runner.info.has_kv_cache,
        sees_images=runner.info.sees_images,
        snapshot_every=snapshot_interval(config.snapshot_every, runner.info),
    )
    info = replace(runner.info, started_in=(("imports", imports_s), *runner.info.started_in))
    watches = StopStringWatches(partial(_load_tokenizer, config.runner.model))
    cache_log = CacheLog() if config.kv_events else None
    scheduler = Scheduler(
        scheduler_config, runner.num_blocks, watches, cache_log, groups=runner.groups, images=runner.images
    )
    return LoadedEngine(Engine(scheduler, runner), info, runner.close, cache_log)


def _loader(config: RunnerConfig) -> "Callable[[], ModelRunner | EncoderRunner]":
    """The function that loads the runner for the model's kind. Brings torch."""
    encoder = find_encoder(config.model)
    if encoder is None:
        from model_runner.runner import ModelRunner  # noqa: PLC0415

        return partial(ModelRunner.load, config)
    from model_runner.encoders.runner import EncoderRunner  # noqa: PLC0415

    return partial(EncoderRunner.load, config, encoder)


def snapshot_interval(asked: int | None, info: RunnerInfo) -> int:
    """Tokens of a prompt between kept states of recurrent layers, in whole blocks; 0 for none.

    Args:
        asked: the setting; None for the default, which grows where a step would keep too many states.
        info: of the loaded runner.

    Raises:
        ValueError: if the model has no such layers, or a step would keep more states than there is room for.
    """
    pages = next((group for group in info.groups if group.kind == "page"), None)
    if pages is None:
        if asked is not None:
            raise ValueError("state_snapshot_every needs a model with recurrent layers; remove --state-snapshot-every")
        return 0
    block, budget = info.block_size, info.max_num_batched_tokens
    running = pages.most_held(
        width=info.max_num_seqs, length=info.max_model_len, budget=budget, block_size=block, snapshot_every=0
    )
    spare = pages.num_blocks - running
    least = blocks_for(budget // (spare + 1) + 1, block) * block
    if asked is None:
        return max(_SNAPSHOT_EVERY, least)
    every = blocks_for(asked, block) * block
    if 0 < every < least:
        raise ValueError(
            f"state_snapshot_every {asked} is too small: a step of {budget} tokens would keep more states than the "
            f"{spare} that fit with those of running choices; set at least {least}, or more --kv-cache-gib"
        )
    return every


def _load_tokenizer(folder: Path) -> "Tokenizer":
    from server.text.tokenizer import Tokenizer  # noqa: PLC0415  (brings jinja2)

    return Tokenizer.from_folder(folder)


def check_speculation(config: RunnerConfig, methods: tuple[str, ...]) -> None:
    """Raises ValueError if the loaded model does not support the configured speculation method."""
    if config.speculation not in ("off", "auto", *methods):
        raise ValueError(
            f"speculation {config.speculation!r} is not available here; use one of {', '.join(('off', *methods))}"
        )
