"""The way of every request that generates, whatever API it comes through."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from server.api.admission import admit
from server.api.generation_api import Answering, GenerationApi, Taken, take_in
from server.api.intake import read_as
from server.api.services import Services
from server.errors import InvalidRequestError
from server.generation.notices import as_headers
from server.generation.planning.plan import Plan
from server.generation.result import collect
from server.generation.run import Run
from server.http.disconnect import wait_unless_gone
from server.http.event_stream import EventStream, StreamLimits
from server.http.middleware import record_of, sender_of
from server.http.responses import json_response
from server.storage.usage import Used
from server.telemetry.request_trace import RequestTrace
from server.tenants.accounts import Account
from server.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=BaseModel)
_BACKGROUND_TIMEOUT_S = 86400.0
"""Of what waits for room that others leave; whoever asked for it knows earlier that it is too late."""


async def from_body(request: Request, services: Services, work: Callable[..., _T], *args: Any) -> _T:
    """Read a request's body and return what the work makes of it, as Intake.run does.

    Raises ApiError and ClientDisconnect.
    """
    body = await services.bodies.read_json(request)
    return await services.intake.run(work, body, services.info(), *args, sender=sender_of(request))


async def body_as(schema: type[_Body], request: Request, services: Services) -> _Body:
    """Read a request's body and validate it; needs no engine. Raises ApiError and ClientDisconnect."""
    body = await services.bodies.read_json(request)
    return await services.intake.run(read_as, body, None, schema, sender=sender_of(request))


async def respond(api: GenerationApi, request: Request, services: Services) -> Response:
    """Take the request in, run it, and answer whole or in a stream. Raises ApiError and ClientDisconnect."""
    return await answer(api, await from_body(request, services, take_in, api), request, services)


async def answer(api: GenerationApi, taken: Taken, request: Request, services: Services) -> Response:
    """Run what was taken in, and answer as `respond` does."""
    plan, record = taken.plan, record_of(request)
    check_whole(record, stream=plan.stream)
    fingerprint = await services.fingerprint.of(services.info())
    run = await start_run(plan, record, services)
    try:
        answering = Answering(run, services.tokenizer, fingerprint, int(time.time()), record.request_id)
        frames = api.answer(answering, taken.options)
    except BaseException:
        run.close()
        raise
    if plan.stream:
        limits = StreamLimits(services.settings.keepalive_s, services.settings.request_timeout_s)
        return EventStream(run, frames, limits, headers=as_headers(plan.notices))
    try:
        choices = await unless_gone(request, collect(run))
    finally:
        run.close()
    content = await asyncio.to_thread(frames.whole, choices)  # many logprobs take a while
    return json_response(content, as_headers(plan.notices))


def check_whole(record: RequestTrace, **asked: bool) -> None:
    """Raise InvalidRequestError for a line of a batch with one of these fields: its answer comes as a whole."""
    for name, is_asked in asked.items():
        if is_asked and record.is_background:
            message = f"Unsupported value: '{name}' does not support true in a batch. Only false is supported."
            raise InvalidRequestError(message, param=name, code="unsupported_value")


async def start_run(plan: Plan, record: RequestTrace, services: Services) -> Run:
    """The plan, submitted, with its trace running. Raises ApiError if the engine does not take it, and LimitError if
    the limits of its client's key do not allow it.
    """
    plan, account = await admit(plan, record, services)
    try:
        return await _run(plan, account, record, services)
    except BaseException:
        account.close(Used())  # unless it has begun, and counts itself
        raise


async def _run(plan: Plan, account: Account, record: RequestTrace, services: Services) -> Run:
    settings = services.settings
    record.headers |= account.headers
    record.answer_id = plan.id
    record.tokens_in, record.tokens_out = sum(len(one.prompt) for one in plan.requests), 0
    if settings.log_prompts:
        record.prompt = await asyncio.to_thread(_prompt_of, plan, services.tokenizer)
        record.output = ""
    trace = services.timelines.begin(record)
    timeout_s = _BACKGROUND_TIMEOUT_S if record.is_background else settings.request_timeout_s
    run = Run(services.engine, services.tokenizer, plan, trace, account.close, timeout_s=timeout_s)
    await run.submit()
    return run


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of the work, which is cancelled if the client leaves; raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    await wait_unless_gone(request, task)
    return await task


def _prompt_of(plan: Plan, tokenizer: Tokenizer) -> str:
    return "\n".join(tokenizer.decode(one.prompt, skip_special_tokens=False) for one in plan.requests)
