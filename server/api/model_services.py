"""The services of one model, for as long as the server runs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from model_runner.hub.repository import ModelFolder
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
from server.models.residence import Permanent, Residence
from server.telemetry.metrics import Metrics
from server.telemetry.recent_requests import Observer, RecentRequests
from server.text.tokenizer import Tokenizer

_TAKES_WORK = frozenset({EngineState.READY, EngineState.RESTARTING})


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts from which the services of a model are made."""

    engine: EngineClient
    tokenizer: Tokenizer
    settings: Settings
    """The server's settings, with the model's own in place of the general ones."""
    folder: ModelFolder
    aux: ModelFolder | None = None
    """The auxiliary model."""
    residence: Residence | None = None
    """Decides how long the model stays loaded; None: for ever."""


@dataclass(frozen=True, slots=True)
class ModelServices:
    """The engine of one model, and everything that serves it."""

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
    def make(
        cls, parts: "ModelParts", workers: WorkerPool, observers: Sequence[Observer], *, is_only: bool
    ) -> "ModelServices":
        """Read the model's folder. `workers` check costly bodies; `observers` see all requests that have ended.

        The server has no other model if `is_only`.

        Raises OSError or ValueError if the model's configuration cannot be read.
        """
        tokenizer, settings, folder, aux = parts.tokenizer, parts.settings, parts.folder, parts.aux
        names = settings.served_model_name or (folder.name,)
        formats = ModelFormats.of(tokenizer.chat_template, settings.tool_parser, settings.reasoning_parser)
        aux_name = None if aux is None else aux.name
        model = ServedModel.from_folder(
            folder.path,
            tokenizer,
            *names,
            formats=formats,
            aux_model=aux_name,
            score_tokens=settings.score_tokens,
            is_only=is_only,
        )
        model = replace(model, takes_any_name=settings.any_model_name)
        tokenizer.spell_breakers(DRY_BREAKERS, tokenizer.vocab_size)  # now, so that the first request does not wait
        metrics = Metrics(parts.engine, model.name, settings.metrics_prefix)
        return cls(
            engine=parts.engine,
            residence=parts.residence or Permanent(parts.engine),
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

    @property
    def is_on_demand(self) -> bool:
        """Whether a request may have the model loaded."""
        return not self.residence.is_permanent

    @property
    def known_info(self) -> RunnerInfo | None:
        """The engine's information about the model, loaded or not; None before its first load."""
        try:
            return self.engine.info
        except EngineUnavailableError:
            return None

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images. Before its first load, as far as its files and settings say."""
        if self.model.images is None:
            return False
        return self.settings.images if (info := self.known_info) is None else info.takes_images

    def check_loaded(self) -> None:
        """Raise UnavailableError with the reason, unless a request would be answered right now."""
        if self.engine.state is EngineState.UNLOADED:
            failure = self.residence.status.failure
            why = "is not loaded." if failure is None else f"is not available: {failure}"
            raise UnavailableError(f"The model `{self.model.name}` {why}", code="model_unavailable")
        self.check_ready()

    def described(self) -> RunnerInfo:
        """The same for the description of a model. Raises UnavailableError before the first load of the model."""
        if not self.is_on_demand:
            return self.info()
        if (info := self.known_info) is None:
            message = f"The model `{self.model.name}` has not been loaded since the server's start, so this is not "
            message += "known yet. A request to the model loads it, and so does POST /v1/models/load."
            raise UnavailableError(message, code="model_unavailable")
        return info

    def context_length(self) -> int:
        """Maximum length of prompt and output together, in tokens. Raises UnavailableError while it is not known."""
        length = self.residence.status.max_model_len if self.is_on_demand else self.info().max_model_len
        return self.described().max_model_len if length is None else length

    def info(self) -> RunnerInfo:
        """The engine's information about the model. Raises UnavailableError while the engine accepts no work."""
        if not self.takes_work:
            raise UnavailableError(f"The engine is {self.engine.state.value}. Please try again later.")
        try:
            return self.engine.info
        except EngineUnavailableError:
            raise UnavailableError("The engine is starting. Please try again later.") from None

    def text_info(self) -> RunnerInfo | None:
        """The facts with which texts become tokens, known without a load; None: the model must be loaded for that.

        Raises UnavailableError as `info` does, for the only model of a server.
        """
        return self.known_info or self.residence.planned if self.is_on_demand else self.info()

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered right now."""
        return self.engine.state is EngineState.READY and self.fingerprint.is_known

    def check_ready(self) -> None:
        """Raise UnavailableError with the reason, unless `is_ready`, or the model was unloaded and can be loaded."""
        status, name = self.residence.status, self.model.name
        if self.is_on_demand and status.failure is not None:
            message = f"The model `{name}` is not available: {status.failure}"
            raise UnavailableError(message, code="model_unavailable")
        if not self.residence.is_ready:
            which = f"The model `{name}`" if self.is_on_demand else "The engine"
            raise UnavailableError(f"{which} is {self.engine.state.value}. Please try again later.")
        if not self.fingerprint.is_known:
            raise UnavailableError("The server is starting: it hashes the model's files. Please try again later.")

    def planner(self) -> Planner:
        """Plans generation requests. Raises UnavailableError as `described` does."""
        return Planner(self.tokenizer, self.model, self.described(), self.settings)

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
