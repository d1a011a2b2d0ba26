"""Background responses: they are generated without a waiting client, and again after a restart of the server."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from server.api.endpoint import start_run
from server.api.fields.images import data_url, from_base64
from server.api.jobs import Work
from server.api.model_services import ModelServices
from server.api.responses import store
from server.api.responses.intent import PlannedResponse, plan_response
from server.api.responses.references import IncomingBody, RequestMeta
from server.api.responses.response_builder import ResponseBuilder, response_failure
from server.api.responses.store import Found, Origin
from server.api.responses.stream import MAX_KEPT_BYTES, LiveFrames, ResponseStream
from server.api.services import Services, peek
from server.engine.client import EngineUnavailableError
from server.errors import RETRY_AFTER_S, ApiError, RateLimitError, UnavailableError
from server.generation.run import Run
from server.generation.sent_images import UploadedFile
from server.http.auth import check_submitter
from server.http.connection import new_request_id
from server.http.middleware import report_of
from server.storage.rows import Row
from server.storage.storage import NotStoredError
from server.telemetry.request_trace import RequestTrace, Sender

_logger = logging.getLogger("samewise.jobs")


async def start_response(
    planned: PlannedResponse, record: RequestTrace, services: Services, served: ModelServices
) -> tuple[Run, ResponseBuilder]:
    """Start a response. Returns its run, and the builder that turns the run's events into it. Raises ApiError."""
    fingerprint = await served.fingerprint.of(served.info())
    run = await start_run(planned.plan, record, services, served)
    return run, ResponseBuilder(planned.fields, fingerprint, served.tokenizer)


class BackgroundResponse:
    """A background response, which is a Job."""

    def __init__(
        self, run: Run, builder: ResponseBuilder, origin: Origin, services: Services, record: RequestTrace
    ) -> None:
        self.builder = builder
        self.frames = LiveFrames(origin.client, services.responses, MAX_KEPT_BYTES)
        self._origin = origin
        self._services = services
        self._storage = services.storage
        self._record = record
        self._is_cancelled = False
        self._is_lost = False
        """Whether it could not be stored, and its failure is not stored yet either."""
        self._end = asyncio.Event()
        self._stream = ResponseStream(run, builder, self._keep, self._report, self.frames)
        self._stream.begin()

    @property
    def client(self) -> str:
        return self._origin.client

    async def run(self) -> None:
        try:
            while await self._stream.wait():
                if self._is_cancelled:
                    await self._stream.cancel()
                for _ in self._stream.take():
                    pass
                await asyncio.sleep(0)  # followers read these events before the next ones are made
        except UnavailableError as error:
            _logger.info("background response continues later: %s", error.message, extra=self._record.ids)
            self._services.jobs.spawn(self._continue)
        finally:
            self.close()
        while self._is_lost:  # until then, clients find the failure in this job
            await asyncio.sleep(RETRY_AFTER_S)
            await self._write_loss()

    async def _continue(self) -> None:
        """Generate it again once its model is loaded again; after the next start if the server is stopping."""
        name = self.builder.response().id
        rows = await self._storage.run(store.pending_jobs)
        await _resume_all([row for row in rows if row.id == name], self._services)

    def close(self) -> None:
        self._stream.close()
        self._end.set()

    async def cancel(self) -> None:
        """End the response; returns when that is stored."""
        self._is_cancelled = True
        self._stream.wake()
        await self._end.wait()

    async def _keep(self, builder: ResponseBuilder, frames: Sequence[bytes]) -> bool:
        """Implements Keep. A response that cannot be stored has failed, because no client would get it."""
        try:
            await self._storage.run(lambda rows: store.finish_pending(rows, builder.response(), self._origin, frames))
        except NotStoredError as error:
            builder.lose(report_of(error, self._record))
            self._is_lost = True
            await self._write_loss()
            return False
        return True

    async def _write_loss(self) -> None:
        try:
            await self._storage.run(lambda rows: store.finish_pending(rows, self.builder.response(), self._origin, ()))
        except NotStoredError as error:
            _logger.info("cannot store the response's failure, will retry: %s", error.message, extra=self._record.ids)
        else:
            self._is_lost = False

    def _report(self, error: Exception) -> ApiError:
        """Implements Report. A stopping server is no failure: the response is generated after its restart."""
        if isinstance(error, UnavailableError):
            raise error
        return report_of(error, self._record)


def job_of(response_id: str, client: str, services: Services) -> BackgroundResponse | None:
    """The client's response with this id, while it is generated in the background."""
    job = services.jobs.get(response_id, client)
    return job if isinstance(job, BackgroundResponse) else None


@dataclass(frozen=True, slots=True)
class _PendingJob:
    """Everything that is needed to generate a response again identically. Stored as JSON."""

    body: str
    stored: Found | None
    """The objects that the body refers to."""
    seed: int
    created: int
    files: dict[str, str] = field(default_factory=dict)
    """Images that the body names, as data URLs, by file ids and URLs."""


def encode_job(incoming: IncomingBody, planned: PlannedResponse) -> bytes:
    """The stored form of the pending response to this body."""
    assert isinstance(incoming.found, Found), "its check would have failed"
    files = {name: data_url(file.content) for name, file in planned.files.items()}
    job = _PendingJob(incoming.body.decode(), incoming.found, planned.plan.seed, incoming.meta.created, files)
    return msgspec.json.encode(job)


def _file_in(url: str) -> UploadedFile:
    content = from_base64(url.partition(",")[2]) or b""
    return UploadedFile(content, len(content))


async def resume(services: Services) -> Work:
    """Find pending responses of an earlier run. Returns the work that generates them again."""
    rows = await services.storage.run(store.pending_jobs)
    return lambda: _generate_again(rows, services)


async def _generate_again(rows: Sequence[Row], services: Services) -> None:
    if not rows:
        return
    try:
        await services.models.wait_open()
    except EngineUnavailableError:
        return
    by_model: dict[str | None, list[Row]] = {}
    for row in rows:
        by_model.setdefault(_model_of(row), []).append(row)
    # Side by side: a model that is not loaded may have to wait for free memory.
    await asyncio.gather(*(_resume_all(of_model, services) for of_model in by_model.values()))


def _model_of(row: Row) -> str | None:
    """The model that a pending response names; None if it names none, or is damaged."""
    try:
        return peek(msgspec.json.decode(row.body, type=_PendingJob).body.encode()).model
    except (msgspec.DecodeError, UnicodeError):
        return None


async def _resume_all(rows: Sequence[Row], services: Services) -> None:
    for row in rows:
        try:
            await _resume(row, services)
        except Exception:  # the other responses are still generated
            _logger.exception("cannot continue a background response", extra={"response_id": row.id})


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
        except UnavailableError as error:
            if error.code == "model_unavailable" and await _is_pending(row, services):
                await asyncio.sleep(RETRY_AFTER_S)  # the model is tried again
                continue
            return  # the server is stopping
        except Exception as error:  # noqa: BLE001 - stored as the response's error
            await _give_up(row, report_of(error, record), services)
        return


async def _give_up(row: Row, error: ApiError, services: Services) -> None:
    failure = response_failure(error)
    await services.storage.run(lambda rows: store.fail_pending(rows, row.id, row.client, failure))


async def _start_again(row: Row, record: RequestTrace, services: Services) -> None:
    check_submitter(row.client, services.accounts.keys)
    pending = msgspec.json.decode(row.body, type=_PendingJob)
    meta = RequestMeta(row.id, row.client, pending.created, Sender(row.client), pending.seed)
    files = {name: _file_in(url) for name, url in pending.files.items()}
    incoming = IncomingBody(pending.body.encode(), meta, pending.stored or Found(), files)
    served = incoming.served(services, record)
    async with served.residence.use(len(incoming.body), is_background=True):
        planned = await incoming.check(plan_response, services, served)
        if not await _is_pending(row, services):
            return
        run, builder = await start_response(planned, record, services, served)
    job = BackgroundResponse(run, builder, planned.origin, services, record)
    services.jobs.start(row.id, job)
    if not await _is_pending(row, services):  # it was cancelled or deleted before the job could be found
        await job.cancel()


async def _is_pending(row: Row, services: Services) -> bool:
    return await services.storage.run(lambda rows: store.is_pending(rows, row.id, row.client))
