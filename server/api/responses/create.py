"""The way of a request for a response."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from server.api.endpoint import check_whole, start_run, unless_gone
from server.api.responses import store
from server.api.responses.background import BackgroundResponse, with_fingerprint, written_promise
from server.api.responses.following import Following
from server.api.responses.intake import Occasion, TakenResponse, take_in_response
from server.api.responses.intent import Found, References
from server.api.responses.remembered import LANE, Lane
from server.api.responses.stream import ResponseStream, run_out
from server.api.responses.telling import Telling
from server.api.responses.window import compaction, count_tokens, take_in_compaction
from server.api.services import Services
from server.errors import ApiError
from server.generation.notices import Notice, as_headers
from server.generation.result import collect
from server.generation.run import Run
from server.http.event_stream import EventStream, StreamLimits
from server.http.middleware import record_of, report, sender_of
from server.http.responses import json_response
from server.storage.storage import NotStoredError

_T = TypeVar("_T")


async def respond(request: Request, services: Services) -> Response:
    """Take the request in, run it, and answer whole or in a stream. Raises ApiError and ClientDisconnect."""
    body = await services.bodies.read_json(request)
    occasion = occasion_of(request)
    lane = lane_of(request)
    taken, found = await taken_in(take_in_response, body, occasion, services, lane)
    check_whole(record_of(request), stream=taken.plan.stream, background=taken.is_background)
    telling = Telling(await with_fingerprint(taken.head, services), services.tokenizer)
    run = await start_run(taken.plan, record_of(request), services)
    answering = _Answering(request, services, taken, found, telling, run)
    if taken.is_background:
        return await answering.in_background(
            lambda: written_promise(body, found, taken.plan.seed, occasion.created)  # much to write, in its own thread
        )
    return answering.streamed() if taken.plan.stream else await answering.whole()


@dataclass(frozen=True, slots=True)
class _Answering:
    """A request whose answer is being made."""

    request: Request
    services: Services
    taken: TakenResponse
    found: Found | None
    """What the body names."""
    telling: Telling
    run: Run

    async def in_background(self, promise: Callable[[], bytes]) -> Response:
        """The answer that it will be made, when that is written down with the promise."""
        services, origin, record = self.services, self.taken.origin, record_of(self.request)
        job = BackgroundResponse(self.run, self.telling, origin, services.storage, record)
        response = self.telling.response()
        try:
            await services.storage.run(lambda rows: store.promise(rows, response, origin, promise()))
        except BaseException:
            self.run.close()
            raise
        services.jobs.start(self.taken.plan.id, job)
        if self.taken.plan.stream:
            return event_stream(Following(job, 0), services, self._headers)
        return json_response(msgspec.json.encode(response), self._headers)

    def streamed(self) -> Response:
        """The answer as it is made."""
        stream = ResponseStream(self.run, self.telling, self._keep, self._report)
        return event_stream(stream, self.services, self._headers)

    async def whole(self) -> Response:
        """The answer when it is made."""
        try:
            await unless_gone(self.request, run_out(self.run, self.telling))
        finally:
            self.run.close()
        await self._keep(self.telling, ())
        content = await asyncio.to_thread(msgspec.json.encode, self.telling.response())  # many logprobs take a while
        return json_response(content, self._headers)

    @property
    def _headers(self) -> Mapping[str, str]:
        return as_headers([*self.taken.plan.notices, *self.telling.late_notices])

    async def _keep(self, telling: Telling, frames: Sequence[bytes]) -> bool:
        """See Keep. The answer is there whether or not it can be stored."""
        is_kept = await self._store(telling, frames)
        lane, response = lane_of(self.request), telling.response()
        if lane is not None and self.taken.origin.conversation is None and telling.status != "failed":
            items = [*self.taken.origin.items, *response["output"]]
            written = await asyncio.to_thread(lambda: [msgspec.Raw(msgspec.json.encode(item)) for item in items])
            lane.keep(response["id"], [*(self.found.context if self.found else ()), *written])
        return is_kept

    async def _store(self, telling: Telling, frames: Sequence[bytes]) -> bool:
        origin = self.taken.origin
        wanted = {"store": origin.is_stored, "conversation": origin.conversation is not None}
        if not any(wanted.values()):
            return True
        try:
            await self.services.storage.run(lambda rows: store.keep(rows, telling.response(), origin, frames))
        except NotStoredError as error:
            known = report(error, self.request.scope)
            telling.warn(*(Notice(path, f"Not kept: {known.message}") for path, wants in wanted.items() if wants))
            return False
        return True

    def _report(self, error: Exception) -> ApiError:
        known = report(error, self.request.scope)
        record_of(self.request).stream_error = known.status
        return known


async def count_input(request: Request, services: Services) -> Response:
    """The tokens of an input. Raises ApiError."""
    body = await services.bodies.read_json(request)
    (content, headers), _ = await taken_in(count_tokens, body, occasion_of(request), services)
    return json_response(content, headers)


async def compact(request: Request, services: Services) -> Response:
    """A conversation in short. Raises ApiError and ClientDisconnect."""
    body = await services.bodies.read_json(request)
    occasion = occasion_of(request)
    plan, _ = await taken_in(take_in_compaction, body, occasion, services)
    run = await start_run(plan, record_of(request), services)
    try:
        (choice,) = await unless_gone(request, collect(run))
    finally:
        run.close()
    return json_response(*compaction(plan, choice, run.usage, occasion.created))


def occasion_of(request: Request) -> Occasion:
    """What this request has beside its body."""
    answer_id, client, created = f"resp_{uuid.uuid4().hex}", record_of(request).client, int(time.time())
    return Occasion(answer_id, client, created, sender_of(request), is_event=lane_of(request) is not None)


def lane_of(request: Request) -> Lane | None:
    """Where the request came through a websocket, the lane."""
    lane: Lane | None = request.scope["state"].get(LANE)
    return lane


async def taken_in(
    work: Callable[..., _T | References],
    body: bytes,
    occasion: Occasion,
    services: Services,
    lane: Lane | None = None,
) -> tuple[_T, Found | None]:
    """What the work makes of the body, and what was found of what that names. Raises ApiError."""
    made = await services.intake.run(work, body, services.info(), occasion, sender=occasion.sender)
    if not isinstance(made, References):
        return made, None
    found = await _find(made, occasion, services, lane)
    num_bytes = len(body) + found.num_bytes
    made = await services.intake.run(
        work, body, services.info(), occasion, found, sender=occasion.sender, num_bytes=num_bytes
    )
    assert not isinstance(made, References), "all that it names is given"
    return made, found


async def _find(names: References, occasion: Occasion, services: Services, lane: Lane | None) -> Found:
    """What is named, as far as the connection remembers it, and otherwise as it is stored. Raises ApiError."""
    remembered = None if lane is None or names.response is None else lane.memory.find(names.response)
    rest = names if remembered is None else replace(names, response=None)
    found = await services.storage.run(lambda rows: store.find(rows, rest, occasion.client))
    if remembered is None:
        return found
    return replace(found, context=remembered, num_bytes=found.num_bytes + sum(map(len, remembered)))


def event_stream(stream: ResponseStream | Following, services: Services, headers: Mapping[str, str]) -> Response:
    """The stream of a response."""
    limits = StreamLimits(services.settings.keepalive_s, services.settings.request_timeout_s)
    return EventStream(stream, stream, limits, headers=headers)
