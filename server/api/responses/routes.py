"""Endpoints of /v1/responses."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.endpoint import check_whole, loaded, start_run, text_info, when_loaded
from server.api.openai.pages import query_of
from server.api.openapi import GENERATION_ERRORS, answers, documented_errors, takes
from server.api.responses import store
from server.api.responses.background import BackgroundResponse, encode_job, job_of, resume, start_response
from server.api.responses.intent import PlannedResponse, count_tokens, plan_compaction, plan_response
from server.api.responses.objects import Compaction, Deleted, InputTokens, ItemList, ResponseEvent, ResponseObject
from server.api.responses.references import CompactNames, ResponseNames, incoming_body
from server.api.responses.response_builder import ResponseBuilder, compaction
from server.api.responses.schema import CompactResponse, CountInputTokens, CreateResponse, ItemsQuery, RetrieveQuery
from server.api.responses.stream import (
    MAX_KEPT_BYTES,
    EventReplay,
    LiveFrames,
    Replayable,
    ResponseStream,
    StoredFrames,
    run_to_end,
    stream_error,
)
from server.api.responses.websocket import Session, lane_of
from server.api.services import Services, ServicesDep
from server.errors import ApiError, UpgradeError
from server.generation.notices import Notice, as_headers
from server.generation.result import collect
from server.generation.run import Run
from server.http.event_stream import EventStream
from server.http.handshake import is_handshake
from server.http.middleware import record_of, report
from server.http.responses import json_response, unless_gone
from server.storage.storage import NotStoredError

_ALL = "/v1/responses"
_ONE = "/v1/responses/{response_id}"
_STORED_ERRORS = (400, 401, 404, 500)

router = APIRouter(tags=["OpenAI"])


@router.post(
    _ALL,
    responses=answers(ResponseObject, *GENERATION_ERRORS, events=ResponseEvent),
    openapi_extra=takes(CreateResponse),
)
async def create_response(request: Request, services: ServicesDep) -> Response:
    """Answer a text or the items of a conversation."""
    incoming = await incoming_body(request, services, ResponseNames)
    record = record_of(request)
    served = incoming.served(services, record)

    async def work() -> Response:
        planned = await incoming.check(plan_response, services, served)
        check_whole(record, stream=planned.plan.stream, background=planned.is_background)
        run, builder = await start_response(planned, record, services, served)
        answer = _Answer(request, services, planned, incoming.context, builder, run)
        if planned.is_background:
            return await answer.in_background(lambda: encode_job(incoming, planned))
        return answer.streamed() if planned.plan.stream else await answer.whole()

    return await when_loaded(served, request, services, incoming.body, work)


@router.get(_ALL, responses=documented_errors(401, 426, 503))
async def open_websocket(request: Request, services: ServicesDep) -> Response:
    """Open a websocket. Each event `response.create` on it requests a response, with the fields of POST."""
    if not is_handshake(request):
        raise UpgradeError(
            "GET /v1/responses accepts only websocket handshakes, and this request is none, or a proxy removed its "
            "Upgrade header. Use POST for plain HTTP."
        )
    services.models_of(record_of(request).client).check_open()
    return Session(request, services.websockets)


@router.post(
    f"{_ALL}/input_tokens",
    responses=answers(InputTokens, *GENERATION_ERRORS),
    openapi_extra=takes(CountInputTokens),
)
async def count_input_tokens(request: Request, services: ServicesDep) -> Response:
    """Count the tokens of an input, after the chat template."""
    incoming = await incoming_body(request, services, ResponseNames)
    served = incoming.served(services, record_of(request))
    async with text_info(served, request, len(incoming.body)) as info:
        return json_response(*await incoming.check(count_tokens, services, served, info=info))


@router.post(
    f"{_ALL}/compact",
    responses=answers(Compaction, *GENERATION_ERRORS),
    openapi_extra=takes(CompactResponse),
)
async def compact_response(request: Request, services: ServicesDep) -> Response:
    """Summarize a conversation with the model, as an item with which to continue it."""
    incoming = await incoming_body(request, services, CompactNames)
    record = record_of(request)
    served = incoming.served(services, record)
    async with loaded(served, request, len(incoming.body)):
        plan = await incoming.check(plan_compaction, services, served)
        run = await start_run(plan, record, services, served)
    try:
        (choice,) = await unless_gone(request, collect(run))
    finally:
        run.close()
    return json_response(*compaction(plan, choice, run.usage, incoming.meta.created))


@router.get(_ONE, responses=answers(ResponseObject, *_STORED_ERRORS))
async def retrieve_response(response_id: str, request: Request, services: ServicesDep) -> Response:
    """Retrieve a stored response; with `stream`, its events after `starting_after`."""
    client = record_of(request).client
    asked = query_of(RetrieveQuery, request)
    job = job_of(response_id, client, services)
    if asked.stream:
        replayed: Replayable
        if job is not None:
            replayed = job.frames
        else:
            replayed = StoredFrames(await services.storage.run(lambda rows: store.events_of(rows, response_id, client)))
        start = 0 if asked.starting_after is None else asked.starting_after + 1
        return _event_stream(EventReplay(replayed, start), services, {})
    if job is not None:
        return json_response(job.builder.response())
    return json_response(await services.storage.run(lambda rows: store.find_response(rows, response_id, client)))


@router.delete(_ONE, responses=answers(Deleted, *_STORED_ERRORS))
async def delete_response(response_id: str, request: Request, services: ServicesDep) -> Response:
    """Delete a stored response."""
    client = record_of(request).client
    if (job := job_of(response_id, client, services)) is not None:
        await job.cancel()
    await services.storage.run(lambda rows: store.delete_response(rows, response_id, client))
    return json_response(Deleted(id=response_id, object="response"))


@router.post(f"{_ONE}/cancel", responses=answers(ResponseObject, *_STORED_ERRORS))
async def cancel_response(response_id: str, request: Request, services: ServicesDep) -> Response:
    """Cancel a background response."""
    client = record_of(request).client
    if (job := job_of(response_id, client, services)) is not None:
        await job.cancel()
    return json_response(await services.storage.run(lambda rows: store.cancel(rows, response_id, client)))


@router.get(f"{_ONE}/input_items", responses=answers(ItemList, *_STORED_ERRORS))
async def list_input_items(response_id: str, request: Request, services: ServicesDep) -> Response:
    """List the items of a response's own input, a page at a time."""
    client = record_of(request).client
    asked = query_of(ItemsQuery, request)
    return json_response(await services.storage.run(lambda rows: store.input_page(rows, response_id, client, asked)))


@dataclass(frozen=True, slots=True)
class _Answer:
    """The three ways to answer a request for a response: in the background, in a stream, or whole."""

    request: Request
    services: Services
    planned: PlannedResponse
    context: Sequence[msgspec.Raw]
    """The items of the conversation before this response."""
    builder: ResponseBuilder
    run: Run

    async def in_background(self, encode: Callable[[], bytes]) -> Response:
        """Answer with the pending response, once it is stored; another thread calls `encode` to encode it."""
        services, planned = self.services, self.planned
        job = BackgroundResponse(self.run, self.builder, planned.origin, services, record_of(self.request))
        response = self.builder.response()
        try:
            await services.storage.run(lambda rows: store.add_pending(rows, response, planned.origin, encode()))
        except BaseException:
            job.close()
            raise
        services.jobs.start(planned.plan.id, job)
        if planned.plan.stream:
            return _event_stream(EventReplay(job.frames, 0), services, self._headers)
        return json_response(response, self._headers)

    def streamed(self) -> Response:
        """Answer with the events of the response as they are generated."""
        origin = self.planned.origin
        frames = LiveFrames(origin.client, self.services.responses, MAX_KEPT_BYTES if origin.is_stored else 0)
        stream = ResponseStream(self.run, self.builder, self._keep, self._report, frames)
        return _event_stream(stream, self.services, self._headers)

    async def whole(self) -> Response:
        """Answer with the whole response."""
        try:
            await unless_gone(self.request, run_to_end(self.run, self.builder))
        finally:
            self.run.close()
        await self._keep(self.builder, ())
        content = await asyncio.to_thread(
            msgspec.json.encode, self.builder.response()
        )  # many logprobs take long to encode
        return json_response(content, self._headers)

    @property
    def _headers(self) -> Mapping[str, str]:
        return as_headers([*self.planned.plan.notices, *self.builder.late_notices])

    async def _keep(self, builder: ResponseBuilder, frames: Sequence[bytes]) -> bool:
        """Implements Keep. The answer is sent even if it cannot be stored."""
        is_kept = await self._store(builder, frames)
        lane, origin, response = lane_of(self.request), self.planned.origin, builder.response()
        if lane is not None and origin.conversation is None and builder.status != "failed":
            items = [*origin.items, *response.output]
            written = await asyncio.to_thread(lambda: [msgspec.Raw(msgspec.json.encode(item)) for item in items])
            lane.keep(response.id, [*self.context, *written])
        return is_kept

    async def _store(self, builder: ResponseBuilder, frames: Sequence[bytes]) -> bool:
        origin = self.planned.origin
        wanted = {"store": origin.is_stored, "conversation": origin.conversation is not None}
        if not any(wanted.values()):
            return True
        try:
            await self.services.storage.run(lambda rows: store.keep(rows, builder.response(), origin, frames))
        except NotStoredError as error:
            known = report(error, self.request.scope)
            builder.warn(*(Notice(path, f"Not stored: {known.message}") for path, wants in wanted.items() if wants))
            return False
        return True

    def _report(self, error: Exception) -> ApiError:
        known = report(error, self.request.scope)
        record_of(self.request).stream_error = known.status
        return known


def _event_stream(stream: ResponseStream | EventReplay, services: Services, headers: Mapping[str, str]) -> Response:
    return EventStream(stream, stream, services.settings.keepalive_s, headers=headers)


DIALECT = Dialect(
    router,
    requests={
        _ALL: CreateResponse,
        f"{_ALL}/input_tokens": CountInputTokens,
        f"{_ALL}/compact": CompactResponse,
    },
    stream_error=stream_error,
    websockets=(_ALL,),
    resume=resume,
)
