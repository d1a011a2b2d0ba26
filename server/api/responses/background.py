"""Responses that are made whether or not their clients wait for them, and after a restart of the server if need be."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from server.api.endpoint import start_run
from server.api.jobs import Work
from server.api.responses import store
from server.api.responses.following import Following
from server.api.responses.intake import Occasion, TakenResponse, take_in_response
from server.api.responses.intent import Found
from server.api.responses.store import Origin
from server.api.responses.stream import ResponseStream
from server.api.responses.telling import Head, Telling, failure_of
from server.api.services import Services
from server.engine.client import EngineUnavailableError
from server.errors import RETRY_AFTER_S, ApiError, RateLimitError, UnavailableError
from server.generation.run import Run
from server.http.middleware import report_of
from server.http.request_id import new_request_id
from server.storage.rows import Row
from server.storage.storage import NotStoredError, Storage
from server.telemetry.request_trace import RequestTrace, Sender

_logger = logging.getLogger("samewise.jobs")


class BackgroundResponse:
    """One of them (a Job)."""

    def __init__(self, run: Run, telling: Telling, origin: Origin, storage: Storage, record: RequestTrace) -> None:
        self.telling = telling
        self.followers: set[Following] = set()
        self.num_told = 0
        self.has_ended = False
        self._run = run
        self._origin = origin
        self._storage = storage
        self._record = record
        self._is_unwanted = False
        self._is_lost = False
        """It could not be stored, and that is still to be written down."""
        self._end = asyncio.Event()
        self._stream = ResponseStream(run, telling, self._keep, self._report)
        self._stream.begin()
        self.num_told = len(self.frames)

    @property
    def client(self) -> str:
        """See Job."""
        return self._origin.client

    @property
    def frames(self) -> Sequence[bytes]:
        """See Followed."""
        return self._stream.frames

    async def run(self) -> None:
        """See Job."""
        try:
            while await self._stream.wait():
                if self._is_unwanted:
                    await self._stream.cancel()
                for _ in self._stream.take():
                    pass
                self._told()
        except UnavailableError as error:
            _logger.info("left for the next start: %s", error.message, extra=self._record.ids)
        finally:
            self.close()
        while self._is_lost:  # and found here meanwhile
            await asyncio.sleep(RETRY_AFTER_S)
            await self._write_loss()

    def close(self) -> None:
        """See Job."""
        self._run.close()
        self.has_ended = True
        self._end.set()
        self._wake()

    async def cancel(self) -> None:
        """Make no more of it; returns when that is written down."""
        self._is_unwanted = True
        self._stream.wake()
        await self._end.wait()

    async def _keep(self, telling: Telling, frames: Sequence[bytes]) -> bool:
        """See Keep. What cannot be stored has failed: nothing else is left of it."""
        try:
            await self._storage.run(lambda rows: store.fulfil(rows, telling.response(), self._origin, frames))
        except NotStoredError as error:
            telling.lose(report_of(error, self._record))
            self._is_lost = True
            await self._write_loss()
            return False
        return True

    async def _write_loss(self) -> None:
        try:
            await self._storage.run(lambda rows: store.fulfil(rows, self.telling.response(), self._origin, ()))
        except NotStoredError as error:
            _logger.info("its failure is not written down yet: %s", error.message, extra=self._record.ids)
        else:
            self._is_lost = False

    def _report(self, error: Exception) -> ApiError:
        """A server that ends has not failed: the response is made when it is there again."""
        if isinstance(error, UnavailableError):
            raise error
        return report_of(error, self._record)

    def _told(self) -> None:
        self.num_told = len(self.frames)
        self._wake()

    def _wake(self) -> None:
        for follower in self.followers:
            follower.wake()


@dataclass(frozen=True, slots=True)
class _Promise:
    """All that it takes to make a response again, as it would have been."""

    body: str
    stored: Found | None
    """What the body names."""
    seed: int
    created: int


def written_promise(body: bytes, found: Found | None, seed: int, created: int) -> bytes:
    """The promise of the response to this body."""
    return msgspec.json.encode(_Promise(body.decode(), found, seed, created))


async def resume(services: Services) -> Work:
    """Finds the responses that were promised before the server was started, to be made again. See Dialect."""
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
        except Exception:  # those behind it are made all the same
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
            return  # it ends again
        except Exception as error:  # noqa: BLE001  (told to the client)
            await _give_up(row, report_of(error, record), services)
        return


async def _give_up(row: Row, error: ApiError, services: Services) -> None:
    failure = failure_of(error)
    await services.storage.run(lambda rows: store.give_up(rows, row.id, row.client, failure))


async def _start_again(row: Row, record: RequestTrace, services: Services) -> None:
    promise = msgspec.json.decode(row.body, type=_Promise)
    occasion = Occasion(row.id, row.client, promise.created, Sender(row.client), promise.seed)
    info, body = services.info(), promise.body.encode()
    taken = await services.intake.run(
        take_in_response, body, info, occasion, promise.stored, sender=occasion.sender, num_bytes=len(row.body)
    )
    assert isinstance(taken, TakenResponse), "all that it names is given"
    head = await with_fingerprint(taken.head, services)
    if not await _is_promised(row, services):
        return
    run = await start_run(taken.plan, record, services)
    job = BackgroundResponse(run, Telling(head, services.tokenizer), taken.origin, services.storage, record)
    services.jobs.start(row.id, job)
    if not await _is_promised(row, services):  # it was cancelled or deleted before there was a job to be told
        await job.cancel()


async def _is_promised(row: Row, services: Services) -> bool:
    return await services.storage.run(lambda rows: store.is_promised(rows, row.id, row.client))


async def with_fingerprint(head: Head, services: Services) -> Head:
    """The head with the server's fingerprint."""
    fingerprint = await services.fingerprint.of(services.info())
    return replace(head, fields={**head.fields, "system_fingerprint": fingerprint})
