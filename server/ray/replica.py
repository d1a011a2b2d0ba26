"""A replica: an engine process and the same application as in `samewise serve`."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from ray import serve
from rich.console import Console
from starlette.types import Message

from server.assembly import ModelOnEngine, find_checkpoints, make_app, make_engine
from server.config import Settings
from server.engine.client import EngineState
from server.engine.process import EngineProcess
from server.logs import configure_logging
from server.ray.exchange import Accepted, AnswerStreams, ForwardedRequest

if TYPE_CHECKING:
    from server.api.services import Services


class Replica:
    """A server without a port, whose methods Ray calls."""

    async def __init__(self, settings: Settings, server: Settings) -> None:  # type: ignore[misc]  # awaited by Ray
        """Start the engine and wait until it is ready; Ray sends no requests before that.

        `settings` are of a server with this model alone, and `server` of all models together.

        Raises StartError, ModelNotFoundError and EngineUnavailableError.
        """
        configure_logging(settings.log_format, settings.log_level)
        self._name = serve.get_replica_context().replica_tag
        self._grace_s = settings.drain_grace_s
        self._engine: EngineProcess | None = None
        self._parts = AsyncExitStack()
        checkpoints = await asyncio.to_thread(find_checkpoints, settings, Console(stderr=True))
        self._engine = make_engine(settings, checkpoints)
        await self._engine.start()
        app = await asyncio.to_thread(make_app, [ModelOnEngine(self._engine, settings, checkpoints)], server)
        await self._parts.enter_async_context(app.router.lifespan_context(app))
        self._services: Services = app.state.services
        self._model = self._services.models.default
        self._answers = AnswerStreams(app)
        await asyncio.gather(self._engine.wait_ready(), self._model.fingerprint.wait_known())

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[Accepted | Message]:
        """Yield that the request was accepted, then the application's messages."""
        yield Accepted(self._name)
        async with aclosing(self._answers.to(request)) as messages:
            async for message in messages:
                yield message

    async def metrics(self) -> tuple[str, Sequence[Metric]]:
        """The replica's name and its current metrics."""
        return self._name, self._services.collect()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed permanently, so that Ray replaces the replica.

        An engine that restarts keeps its streams, so then the replica stays.
        """
        if self._model.engine.state is EngineState.FAILED:
            raise RuntimeError("the engine failed and could not be restarted; see the log for the reason")

    def record_routing_stats(self) -> dict[str, bool]:
        """For PromptStartRouter: whether the replica is ready, as GET /ready reports."""
        return {"is_ready": self._model.is_ready}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For LoadPolicy: running and waiting choices divided by max_num_seqs."""
        engine = self._model.engine
        num_choices = engine.stats.num_running + engine.stats.num_waiting + engine.num_held
        return {"load": num_choices / engine.info.max_num_seqs}

    async def __del__(self) -> None:
        """Drain the engine and close. Ray awaits this after the last request. Background work can resume later."""
        if self._engine is not None:
            await self._engine.drain(self._grace_s)
        await self._parts.aclose()
