"""Responses that are made whether or not their clients wait, and after a restart of the server if need be."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from server.api.endpoint import start_run
from server.api.jobs import Work
from server.api.responses import store
from server.api.responses.intent import PlannedResponse, plan_response
from server.api.responses.references import IncomingBody, Occasion
from server.api.responses.response_builder import ResponseBuilder, response_failure
from server.api.responses.store import Found, Origin
from server.api.responses.stream import EventReplay, ResponseStream
from server.api.services import Services
from server.engine.client import EngineUnavailableError
from server.errors import RETRY_AFTER_S, ApiError, RateLimitError, UnavailableError
from server.generation.run import Run
from server.http.connection import new_request_id
from server.http.middleware import report_of
from server.storage.rows import Row
from server.storage.storage import NotStoredError, Storage
from server.telemetry.request_trace import RequestTrace, Sender

_logger = logging.getLogger("samewise.jobs")


async def start_response(
    planned: PlannedResponse, record: RequestTrace, services: Services
) -> tuple[Run, ResponseBuilder]:
    """Start to make a response; returns its run, and what builds it from the run's events. Raises ApiError."""
    fingerprint = await services.fingerprint.of(services.info())
    run = await start_run(planned.plan, record, services)
    return run, ResponseBuilder(planned.fields, fingerprint, services.tokenizer)


class BackgroundResponse:
    """A response in the background: a Job, and Replayable."""

    def __init__(
        self, run: Run, builder: ResponseBuilder, origin: Origin, storage: Storage, record: RequestTrace
    ) -> None:
        self.builder = builder
        self.followers: set[EventReplay] = set()
        self.has_ended = False
        self._run = run
        self._origin = origin
        self._storage = storage
        self._record = record
        self._is_unwanted = False
        self._is_lost = False
        """It could not be stored, and its failure is not written down yet."""
        self._end = asyncio.Event()
        self._stream = ResponseStream(run, builder, self._keep, self._report)
        self._stream.begin()
        self.num_ready = len(self.frames)

    @property
    def client(self) -> str:
        return self._origin.client

    @property
    def frames(self) -> Sequence[bytes]:
        return self._stream.frames

    async def run(self) -> None:
        try:
            while await self._stream.wait():
                if self._is_unwanted:
                    await self._stream.cancel()
                for _ in self._stream.take():
                    pass
                self.num_ready = len(self.frames)
                self._wake()
        except UnavailableError as error:
            _logger.info("left for the next start: %s", error.message, extra=self._record.ids)
        finally:
            self.close()
        while self._is_lost:  # and found here meanwhile
            await asyncio.sleep(RETRY_AFTER_S)
            await self._write_loss()

    def close(self) -> None:
        self._run.close()
        self.has_ended = True
        self._end.set()
        self._wake()

    async def cancel(self) -> None:
        """End it; returns when that is written down."""
        self._is_unwanted = True
        self._stream.wake()
        await self._end.wait()

    async def _keep(self, builder: ResponseBuilder, frames: Sequence[bytes]) -> bool:
        """A Keep. A response that cannot be stored has failed, because nothing else is left of it."""
        try:
            await self._storage.run(lambda rows: store.fulfil(rows, builder.response(), self._origin, frames))
        except NotStoredError as error:
            builder.lose(report_of(error, self._record))
            self._is_lost = True
            await self._write_loss()
            return False
        return True

    async def _write_loss(self) -> None:
        try:
            await self._storage.run(lambda rows: store.fulfil(rows, self.builder.response(), self._origin, ()))
        except NotStoredError as error:
            _logger.info("its failure is not written down yet: %s", error.message, extra=self._record.ids)
        else:
            self._is_lost = False

    def _report(self, error: Exception) -> ApiError:
        """A Report. A server that stops has not failed: it makes the response after its restart."""
        if isinstance(error, UnavailableError):
            raise error
        return report_of(error, self._record)

    def _wake(self) -> None:
        for follower in self.followers:
            follower.wake()


def job_of(response_id: str, client: str, services: Services) -> BackgroundResponse | None:
    """The client's response of this id, while it is made in the background."""
    job = services.jobs.get(response_id, client)
    return job if isinstance(job, BackgroundResponse) else None


@dataclass(frozen=True, slots=True)
class _Promise:
    """All that it takes to make a response again, as it would have been. Stored as JSON."""

    body: str
    stored: Found | None
    """The objects that the body refers to."""
    seed: int
    created: int


def written_promise(incoming: IncomingBody, seed: int) -> bytes:
    """The promise of the response to this body."""
    assert isinstance(incoming.found, Found), "its check would have failed"
    return msgspec.json.encode(_Promise(incoming.body.decode(), incoming.found, seed, incoming.occasion.created))


async def resume(services: Services) -> Work:
    """Find the responses that were promised before the server was started, to be made again. See Dialect."""
    rows = await services.storage.run(store.unfinished)
    return lambda: _make_again(rows, services)


async def _make_again(rows: Sequence[Row], services: Services) -> None:
    if not rows:
        return
    try:
        await services.engine.wait_ready()
    except EngineUnavailableError:
        return
    for row in rows:
        try:
            await _resume(row, services)
        except Exception:  # the other responses are made all the same
            _logger.exception("a response was left as it is", extra={"response_id": row.id})


async def _resume(row: Row, services: Services) -> None:
    record = RequestTrace(
        new_request_id(), "/v1/responses", client=row.client, status=200, answered_at=time.perf_counter()
    )
    while True:
        try:
            await _start_again(row, record, services)
        except RateLimitError:
            await asyncio.sleep(RETRY_AFTER_S)
            continue
        except UnavailableError:
            return  # the server stops again
        except Exception as error:  # noqa: BLE001 - the response says it
            await _give_up(row, report_of(error, record), services)
        return


async def _give_up(row: Row, error: ApiError, services: Services) -> None:
    failure = response_failure(error)
    await services.storage.run(lambda rows: store.give_up(rows, row.id, row.client, failure))


async def _start_again(row: Row, record: RequestTrace, services: Services) -> None:
    promise = msgspec.json.decode(row.body, type=_Promise)
    occasion = Occasion(row.id, row.client, promise.created, Sender(row.client), promise.seed)
    incoming = IncomingBody(promise.body.encode(), occasion, promise.stored or Found())
    planned = await incoming.check(plan_response, services)
    if not await _is_promised(row, services):
        return
    run, builder = await start_response(planned, record, services)
    job = BackgroundResponse(run, builder, planned.origin, services.storage, record)
    services.jobs.start(row.id, job)
    if not await _is_promised(row, services):  # it was cancelled or deleted before the job could be found
        await job.cancel()


async def _is_promised(row: Row, services: Services) -> bool:
    return await services.storage.run(lambda rows: store.is_promised(rows, row.id, row.client))
