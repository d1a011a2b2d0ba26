"""A server's parts, put together from its settings: an engine in a process of its own, and the application before it.

`samewise serve` listens with them, a replica on Ray is called.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from model_runner.config import RunnerConfig
from server.checkpoints import Checkpoints
from server.config import Settings
from server.engine.client import EngineClient
from server.engine.messages import EngineConfig
from server.engine.process import EngineProcess
from server.engine.supervisor import EngineLimits

if TYPE_CHECKING:
    from fastapi import FastAPI


class StartError(Exception):
    """The server cannot start or go on; the message is one line for the user."""


def make_engine(
    settings: Settings, checkpoints: Checkpoints, publish: Callable[[bytes], None] | None = None
) -> EngineProcess:
    """The engine, not started yet. `publish` gets its KV events."""
    limits = EngineLimits(settings.max_waiting, settings.engine_timeout_s)
    return EngineProcess(engine_config(settings, checkpoints), limits, publish)


def make_app(engine: EngineClient, settings: Settings, checkpoints: Checkpoints) -> "FastAPI":
    """The application. Takes seconds: to be called in a thread, so that the engine starts meanwhile.

    Raises StartError.
    """
    from server.api.body_worker import WorkerPool  # noqa: PLC0415
    from server.app import create_app  # noqa: PLC0415  (the framework takes a second)
    from server.text.tokenizer import Tokenizer  # noqa: PLC0415

    try:
        tokenizer = Tokenizer.from_folder(checkpoints.model.path)
        return create_app(engine, tokenizer, settings, checkpoints.model, checkpoints.aux_model, workers=WorkerPool())
    except OSError as error:
        raise StartError(describe_error(error)) from None
    except ValueError as error:
        raise StartError(str(error)) from None


def describe_error(error: OSError) -> str:
    """In one line, with the file that it is about."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def engine_config(settings: Settings, checkpoints: Checkpoints) -> EngineConfig:
    """What the engine process has to know of the settings."""
    runner = RunnerConfig(
        model=checkpoints.model.path,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        rows=settings.rows,
        exact=settings.exact,
        cuda_graphs=settings.cuda_graphs,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_gib=settings.kv_cache_gib,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        logprobs_mode=settings.logprobs,
        threads=settings.threads,
        speculation=settings.speculation,
        num_draft_tokens=settings.num_draft_tokens,
        draft_model=checkpoints.draft_model,
        heads=checkpoints.heads,
        learn=settings.learn,
        learn_threads=settings.learn_threads,
        learn_memory_gib=settings.learn_memory,
        aux_model=None if checkpoints.aux_model is None else checkpoints.aux_model.path,
    )
    return EngineConfig(
        runner,
        settings.policy,
        settings.prefix_caching,
        settings.log_level,
        settings.log_format,
        kv_events=settings.kv_events is not None,
    )
