"""The services of one model, for as long as the server runs."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from model_runner.models.repository import ModelFolder
from model_runner.runner_interface import RunnerInfo
from server.api.body_worker import BodyWorker, WorkerPool
from server.config import Settings
from server.engine.client import EngineClient, EngineState, EngineUnavailableError
from server.errors import UnavailableError
from server.generation.fingerprint import Fingerprint
from server.generation.output_formats import ModelFormats
from server.generation.planning.planner import Planner
from server.generation.served_model import ServedModel
from server.generation.settings import DRY_BREAKERS
from server.telemetry.metrics import Metrics
from server.telemetry.recent_requests import Observer, RecentRequests
from server.text.tokenizer import Tokenizer

_TAKES_WORK = frozenset({EngineState.READY, EngineState.RESTARTING})


class Residence(Protocol):
    """Decides how long a model stays loaded."""

    def use(self, num_bytes: int, *, is_background: bool) -> AbstractAsyncContextManager[None]:
        """Context in which the model is loaded. See ModelServices.in_use."""
        ...

    def hold(self) -> Callable[[], None]:
        """Keep the loaded model; returns the function that ends that, which may be called several times."""
        ...


class Permanent:
    """The residence of a model that is loaded once and for all: nothing waits for it."""

    @asynccontextmanager
    async def use(self, num_bytes: int, *, is_background: bool) -> AsyncIterator[None]:
        yield

    def hold(self) -> Callable[[], None]:
        return _nothing


def _nothing() -> None:
    """Ends a hold that kept nothing."""


PERMANENT = Permanent()


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What the services of a model are made of."""

    engine: EngineClient
    tokenizer: Tokenizer
    settings: Settings
    """The server's settings, with the model's own in place of the general ones."""
    folder: ModelFolder
    aux: ModelFolder | None = None
    """The auxiliary model."""
    residence: Residence = PERMANENT


@dataclass(frozen=True, slots=True)
class ModelServices:
    """What the server has for one of its models."""

    engine: EngineClient
    residence: Residence
    """Keeps the model loaded while it is in use."""
    tokenizer: Tokenizer
    model: ServedModel
    settings: Settings
    """The server's settings, with the model's own in place of the general ones."""
    metrics: Metrics
    timelines: RecentRequests
    fingerprint: Fingerprint
    body_worker: BodyWorker

    @classmethod
    def make(cls, parts: "ModelParts", workers: WorkerPool, observers: Sequence[Observer]) -> "ModelServices":
        """Read the model's folder. `workers` check costly bodies; `observers` see all requests that have ended.

        Raises OSError or ValueError if the model's configuration cannot be read.
        """
        tokenizer, settings, folder, aux = parts.tokenizer, parts.settings, parts.folder, parts.aux
        names = settings.served_model_name or (folder.name,)
        formats = ModelFormats.of(tokenizer.chat_template, settings.tool_parser, settings.reasoning_parser)
        aux_name = None if aux is None else aux.name
        model = ServedModel.from_folder(
            folder.path, tokenizer, *names, formats=formats, aux_model=aux_name, score_tokens=settings.score_tokens
        )
        tokenizer.spell_breakers(DRY_BREAKERS, tokenizer.vocab_size)  # now, so that the first request does not wait
        metrics = Metrics(parts.engine, model.name, settings.metrics_prefix)
        return cls(
            engine=parts.engine,
            residence=parts.residence,
            tokenizer=tokenizer,
            model=model,
            settings=settings,
            metrics=metrics,
            timelines=RecentRequests(parts.engine, model.name, metrics, observers),
            fingerprint=_fingerprint(settings, tokenizer, [folder] if aux is None else [folder, aux]),
            body_worker=BodyWorker(tokenizer, folder.path, model, settings, workers),
        )

    @property
    def takes_work(self) -> bool:
        """Whether the engine accepts requests."""
        return self.engine.state in _TAKES_WORK

    @asynccontextmanager
    async def in_use(self, num_bytes: int, *, is_background: bool) -> AsyncIterator["ModelServices"]:
        """Context in which the model is loaded; entering it may wait for that. `num_bytes` are held meanwhile.

        Raises UnavailableError, and RateLimitError if too many requests wait.
        """
        async with self.residence.use(num_bytes, is_background=is_background):
            yield self

    def info(self) -> RunnerInfo:
        """The engine's information about the model. Raises UnavailableError while the engine accepts no work."""
        if not self.takes_work:
            raise UnavailableError(f"The engine is {self.engine.state.value}. Please try again later.")
        try:
            return self.engine.info
        except EngineUnavailableError:
            raise UnavailableError("The engine is starting. Please try again later.") from None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered right now."""
        return self.engine.state is EngineState.READY and self.fingerprint.is_known

    def check_ready(self) -> None:
        """Raise UnavailableError with the reason, unless `is_ready`."""
        if self.engine.state is not EngineState.READY:
            raise UnavailableError(f"The engine is {self.engine.state.value}. Please try again later.")
        if not self.fingerprint.is_known:
            raise UnavailableError("The server is starting: it hashes the model's files. Please try again later.")

    def planner(self) -> Planner:
        """Plans generation requests. Raises UnavailableError while the engine accepts no work."""
        return Planner(self.tokenizer, self.model, self.info(), self.settings)

    async def warm_up(self) -> None:
        """Start a worker process for costly bodies once the engine is ready."""
        with suppress(EngineUnavailableError, UnavailableError):
            await self.engine.wait_ready()
            await self.body_worker.warm_up(self.info())


def _fingerprint(settings: Settings, tokenizer: Tokenizer, folders: Sequence[ModelFolder]) -> Fingerprint:
    """Raises OSError."""
    replaced = settings.chat_template is not None and tokenizer.chat_template is not None
    template = tokenizer.chat_template.source if replaced and tokenizer.chat_template is not None else ""
    return Fingerprint([folder.path for folder in folders], settings, template)
