"""Assembles a server from its settings: the models, the engine process and the application."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from model_runner.config import RunnerConfig
from model_runner.encoders.folder import is_encoder
from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.repository import ModelFolder, resolve_heads, resolve_model
from model_runner.json_files import find_object
from model_runner.processes import free_memory
from model_runner.refusal import one_line
from server.config import Settings
from server.engine.client import EngineClient
from server.engine.messages import EngineConfig
from server.engine.process import EngineProcess
from server.engine.supervisor import EngineLimits
from server.model_settings import NOT_OF_ENCODERS, ModelSettings
from server.models.host import ModelHost
from server.models.hosted_model import HostedModel, Residency
from server.models.ledger import Ledgers
from server.models.source import ProcessSource
from server.models.spare import SpareWorker

if TYPE_CHECKING:
    from fastapi import FastAPI


_logger = logging.getLogger("samewise.server")
_CACHE_SHARE = 0.5
"""Share of the memory that weights leave free that goes to the caches of all models together."""
_HEAD_METHODS = ("auto", "eagle", "hydra", "medusa")
"""Speculation methods that can use trained heads."""


class StartError(Exception):
    """The server cannot start or continue. The message is one line of bounded length for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Local folders of the models that the settings name."""

    model: ModelFolder
    draft_model: Path | None
    heads: tuple[Path, ...]
    """The draft heads that the settings name, otherwise the model's own."""
    aux_model: ModelFolder | None = None
    chat_template: str | None = None
    """Source of the template that replaces the model's own."""


def find_checkpoints(settings: Settings, console: Console) -> Checkpoints:
    """Find all models; download or convert them on first use.

    Raises ModelNotFoundError, and StartError if the chat template cannot be used.
    """
    template = _read_chat_template(settings.chat_template)
    token = None if settings.hub_token is None else settings.hub_token.get_secret_value()
    hub = HubAccess(token, max_bytes=free_memory() if _is_on_cpu(settings) else None)
    model = resolve_model(settings.model, console, replace(hub, revision=settings.revision))
    with _setting("draft_model"):
        draft = None if settings.draft_model is None else resolve_model(settings.draft_model, console, hub).path
    with _setting("heads"):
        named = tuple(resolve_heads(name, console, hub) for name in settings.heads)
    with _setting("aux_model"):
        aux = None if settings.aux_model is None else resolve_model(settings.aux_model, console, hub)
    return Checkpoints(model, draft, named or model.heads, aux, template)


def find_models(settings: Settings, console: Console) -> list[tuple[Settings, Checkpoints]]:
    """Find each model that the settings name, in their order; download or convert it on first use.

    Returns the settings of a server with this model alone, and its folders. Without `models` there is one.

    Raises ModelNotFoundError, and StartError if a chat template cannot be used. They name the model if there are
    several.
    """
    if not settings.models:
        return [(settings, find_checkpoints(settings, console))]
    found = []
    for entry in settings.models:
        own = settings.of_model(entry)
        try:
            checkpoints = find_checkpoints(own, console)
            found.append((_applicable(own, entry, checkpoints.model.path), checkpoints))
        except (ModelNotFoundError, StartError) as error:
            raise type(error)(f"models: {entry.name}: {error}") from error
    return found


def _applicable(own: Settings, entry: ModelSettings, folder: Path) -> Settings:
    """An entry's settings without the defaults for all models that do not apply to an encoder, which are logged."""
    if not is_encoder(find_object(folder / "config.json")):
        return own
    fields = Settings.model_fields
    others = {name: fields[name].default for name in NOT_OF_ENCODERS} | (
        {} if own.device != "cuda" else {"device": "cpu"}
    )
    skipped = {
        name: value for name, value in others.items() if name not in entry.overrides and getattr(own, name) != value
    }
    if skipped:
        names = ", ".join(sorted(skipped))
        _logger.warning(
            "%s is an encoder, to which these settings do not apply: %s. It is served without.", entry.name, names
        )
    return own.model_copy(update=skipped)


def _is_on_cpu(settings: Settings) -> bool:
    """Whether the model certainly runs from this machine's own memory; without a driver there is no GPU."""
    return settings.device == "cpu" or (settings.device == "auto" and not Path("/dev/nvidiactl").exists())


@contextmanager
def _setting(name: str) -> Iterator[None]:
    """Context in which a ModelNotFoundError gets the setting's name."""
    try:
        yield
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{name}: {error}") from error


def make_engine(
    settings: Settings, checkpoints: Checkpoints, publish: Callable[[bytes], None] | None = None
) -> EngineProcess:
    """Make the engine, without starting it; `publish` receives its KV events."""
    return EngineProcess(engine_config(settings, checkpoints), limits_of(settings), publish)


def limits_of(settings: Settings) -> EngineLimits:
    """The limits of an engine with these settings."""
    return EngineLimits(settings.max_waiting, settings.engine_timeout_s)


def budget_of(settings: Settings) -> int | None:
    """Bytes that the models on a device may take together; None: most of what is free there.

    Warns if this machine has less than the settings allow.
    """
    if settings.memory_gib is None:
        return None
    budget, free = int(settings.memory_gib * (1 << 30)), free_memory()
    if budget > free and all(_is_on_cpu(settings.of_model(entry)) for entry in settings.models):
        _logger.warning(
            "memory_gib is %g, but only %.1f GiB are free: loading models may run out of memory. Lower memory_gib.",
            settings.memory_gib,
            free / (1 << 30),
        )
    return budget


def host_models(
    settings: Settings,
    found: Sequence[tuple[Settings, Checkpoints]],
    publish: Sequence[Callable[[bytes], None] | None],
) -> tuple[ModelHost, "list[ModelOnEngine]"]:
    """Make the host of several models, without starting it; each of `publish` receives the KV events of a model."""
    ledgers = Ledgers(budget_of(settings))
    spare = SpareWorker()
    host = ModelHost(ledgers, spare)
    models = []
    for entry, (own, checkpoints), events in zip(settings.models, found, publish, strict=True):
        share = _CACHE_SHARE / len(found) if own.kv_cache_gib is None else None
        source = ProcessSource(engine_config(own, checkpoints), limits_of(own), spare, ledgers, share, events)
        residency = Residency(
            is_loaded_at_start=entry.load == "start",
            is_pinned=entry.pinned,
            idle_s=entry.idle_s,
            max_waiting=own.max_waiting,
            load_timeout_s=settings.load_timeout_s,
        )
        hosted = host.add(entry.name, source, residency)
        models.append(ModelOnEngine(hosted, own, checkpoints, hosted))
    return host, models


@dataclass(frozen=True, slots=True)
class ModelOnEngine:
    """A model, and the engine that runs it, which may come and go."""

    engine: EngineClient
    settings: Settings
    """The settings of a server with this model alone."""
    checkpoints: Checkpoints
    hosted: HostedModel | None = None
    """The same engine as one of several; None for the only one."""


def make_app(models: Sequence[ModelOnEngine], settings: Settings) -> "FastAPI":
    """Make the application. This takes seconds: call it in a thread while the engines start.

    Raises StartError.
    """
    from server.api.model_services import ModelParts  # noqa: PLC0415
    from server.app import create_app  # noqa: PLC0415  (the framework takes a second)
    from server.text.chat_template import TemplateSources  # noqa: PLC0415
    from server.text.tokenizer import Tokenizer  # noqa: PLC0415

    def parts_of(model: ModelOnEngine) -> ModelParts:
        checkpoints = model.checkpoints
        replaced = None if checkpoints.chat_template is None else TemplateSources(checkpoints.chat_template)
        tokenizer = Tokenizer.from_folder(checkpoints.model.path, replaced)
        folders = checkpoints.model, checkpoints.aux_model
        return ModelParts(model.engine, tokenizer, model.settings, *folders, model.hosted)

    try:
        return create_app([parts_of(model) for model in models], settings)
    except OSError as error:
        raise StartError(f"{_setting_of(error, settings)}{describe_error(error)}") from None
    except ValueError as error:
        raise StartError(str(error)) from None


def _setting_of(error: OSError, settings: Settings) -> str:
    """The setting that names the error's file, with a colon; empty if none does."""
    for name in ("api_keys_file", "data_dir"):
        path: Path | None = getattr(settings, name)
        if path is not None and error.filename and Path(error.filename).is_relative_to(path):
            return f"{name}: "
    return ""


def _read_chat_template(path: Path | None) -> str | None:
    """The template's source, checked. Raises StartError if there is no such file, or it is not a template."""
    if path is None:
        return None
    from server.text.chat_template import TemplateLineError, check_template  # noqa: PLC0415  (brings jinja2)

    try:
        source = path.read_text(encoding="utf-8")
        check_template(source)
    except UnicodeDecodeError:
        raise StartError(f"chat_template: {path} is not UTF-8 text; give a file with a Jinja template") from None
    except OSError as error:
        raise StartError(f"chat_template: {path}: {error.strerror}; give a file with a Jinja template") from None
    except TemplateLineError as error:
        raise StartError(f"chat_template: {path}, line {error.line}: {error}") from None
    return source


def describe_error(error: OSError) -> str:
    """The error in one line, with its file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def engine_config(settings: Settings, checkpoints: Checkpoints) -> EngineConfig:
    """The settings of the engine process."""
    runner = RunnerConfig(
        model=checkpoints.model.path,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        # The embedded model is small enough that int8 costs little memory, and its prompts are faster.
        multiplies_stored_blocks=settings.model is not None,
        activation_type=settings.rows,
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
        images=settings.images,
        max_image_pixels=int(settings.max_image_megapixels * 1_000_000),
        image_cache_gib=settings.image_cache_gib,
    )
    return EngineConfig(
        runner,
        settings.policy,
        settings.prefix_caching,
        settings.log_level,
        settings.log_format,
        kv_events=settings.kv_events is not None,
        snapshot_every=settings.state_snapshot_every,
    )


def warn_if_open(settings: Settings, address: str, remedy: str) -> None:
    """Warn that other machines can use a server without keys. `remedy` says what to do."""
    if not settings.has_keys:
        _logger.warning(
            "The server listens on %s without an API key: anyone who can reach it can use it. %s", address, remedy
        )


def warn_if_unused(settings: Settings) -> None:
    """Warn if heads learn that few requests use. This is allowed because requests can choose their method."""
    if settings.learn and settings.speculation not in _HEAD_METHODS:
        _logger.warning(
            "learn is on, but speculation is %s: only requests that choose another method use the trained heads. Set "
            "speculation to one of %s, or turn learn off.",
            settings.speculation,
            ", ".join(_HEAD_METHODS),
        )
