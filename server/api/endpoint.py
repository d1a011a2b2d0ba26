"""Shared handler for all generation endpoints."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from model_runner.runner_interface import RunnerInfo
from scheduler.interface import BACKGROUND, EngineRequest
from server.api.body_worker import read_as
from server.api.dialect import AnswerContext, Dialect, GenerationApi, PlannedRequest, plan_body
from server.api.image_files import uploaded_files
from server.api.model_services import ModelServices
from server.api.services import Finder, Services, peek
from server.errors import InvalidRequestError
from server.generation.image_room import HeldImages
from server.generation.notices import as_headers
from server.generation.planning.plan import Plan
from server.generation.result import collect
from server.generation.run import Run
from server.http.event_stream import EventStream
from server.http.loading_stream import LoadingStream, Waiting
from server.http.middleware import record_of, sender_of
from server.http.responses import json_response, unless_gone
from server.storage.usage import Used
from server.telemetry.request_trace import RequestTrace
from server.tenants.accounts import Account
from server.tenants.keys import Tenant
from server.tenants.rate_limits import Cost
from server.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=BaseModel)
_BACKGROUND_TIMEOUT_S = 86400.0
"""Timeout of background requests, which wait for idle capacity."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to one of the models, which is loaded."""

    http: Request
    body: bytes
    services: Services
    served: ModelServices
    """The services of the model."""

    async def run(self, work: Callable[..., _T], *args: Any, info: RunnerInfo | None = None) -> _T:
        """Run the work on the body, as BodyWorker.run does, by default with the engine's info. Raises ApiError."""
        files = await uploaded_files([self.body], record_of(self.http).client, self.services, self.served)
        info, sender = info or self.served.info(), sender_of(self.http)
        return await self.served.body_worker.run(work, self.body, info, *args, sender=sender, files=files)


async def named_model(request: Request, services: Services, find: Finder | None = None) -> ModelRequest:
    """Read a request's body, and find the model that it names, which may have to be loaded first; `find` is as in
    ServedModels.of_body.

    Raises ApiError and ClientDisconnect.
    """
    body = await services.bodies.read_json(request)
    record = record_of(request)
    served = services.models_of(record.client).of_body(body, find)
    record.model = served.model.name
    return ModelRequest(request, body, services, served)


@asynccontextmanager
async def loaded(served: ModelServices, request: Request, num_bytes: int) -> AsyncIterator[ModelServices]:
    """Context in which the model is loaded, for a request with a body of this size. A client that leaves waits no more.

    Entering it raises ApiError and ClientDisconnect.
    """
    async with AsyncExitStack() as stack:
        entering = stack.enter_async_context(_use(served, request, num_bytes))
        await (entering if served.residence.is_open else unless_gone(request, entering))
        yield served


def _use(served: ModelServices, request: Request, num_bytes: int) -> AbstractAsyncContextManager[None]:
    record = record_of(request)
    return served.residence.use(num_bytes, is_background=record.is_background, wish=lambda: record.keep_s)


@asynccontextmanager
async def model_request(
    request: Request, services: Services, find: Finder | None = None
) -> AsyncIterator[ModelRequest]:
    """Read a request's body, and keep the model that it names loaded; `find` is as in ServedModels.of_body.

    Raises ApiError and ClientDisconnect.
    """
    asked = await named_model(request, services, find)
    async with loaded(asked.served, request, len(asked.body)):
        yield asked


@asynccontextmanager
async def text_info(served: ModelServices, request: Request, num_bytes: int) -> AsyncIterator[RunnerInfo]:
    """Context with what turning texts into tokens needs to know. The model is loaded only if that is not known yet.

    Entering it raises ApiError and ClientDisconnect.
    """
    if (known := served.text_info()) is not None:
        yield known
        return
    async with loaded(served, request, num_bytes):
        yield served.info()


async def tokens_of_body(request: Request, services: Services, work: Callable[..., _T]) -> _T:
    """Read a request's body and run the work on it, as BodyWorker.run does. The work only turns texts into tokens.

    Raises ApiError and ClientDisconnect.
    """
    asked = await named_model(request, services)
    async with text_info(asked.served, request, len(asked.body)) as info:
        return await asked.run(work, info=info)


async def body_as(schema: type[_Body], request: Request, services: Services) -> _Body:
    """Read a request's body and validate it; needs no engine. Raises ApiError and ClientDisconnect."""
    body = await services.bodies.read_json(request)
    worker = next(iter(services.models)).body_worker
    return await worker.run(read_as, body, None, schema, sender=sender_of(request))


async def respond(api: GenerationApi, request: Request, services: Services) -> Response:
    """Plan and run a request, and answer it, streamed or not. Raises ApiError and ClientDisconnect."""
    asked = await named_model(request, services)

    async def work() -> Response:
        return await answer(api, await asked.run(plan_body, api), asked)

    return await when_loaded(asked.served, request, services, asked.body, work)


async def when_loaded(
    served: ModelServices,
    request: Request,
    services: Services,
    body: bytes,
    work: Callable[[], Awaitable[Response]],
    waiting: Waiting | None = None,
) -> Response:
    """The response that the work makes once the model is loaded.

    If it will be a stream, and the load takes long, the stream begins meanwhile, as `waiting` says; by default, streams
    are of events, and have `stream: true`. Raises ApiError and ClientDisconnect.
    """
    if not served.residence.is_open:
        waiting = waiting or Waiting(streams=peek(body).streams)
        if waiting.streams and not record_of(request).is_background:
            use = _use(served, request, len(body))
            dialect: Dialect = request.app.state.dialect_of(request.scope["path"])
            stream = LoadingStream(use, work, services.settings.keepalive_s, dialect.stream_error, waiting)
            return await stream.begin(request)
    async with loaded(served, request, len(body)):
        return await work()


async def answer(api: GenerationApi, planned: PlannedRequest, asked: ModelRequest) -> Response:
    """Run a planned request, and answer it, streamed or not. Raises ApiError and ClientDisconnect."""
    plan, record, served = planned.plan, record_of(asked.http), asked.served
    check_whole(record, stream=plan.stream)
    fingerprint = await served.fingerprint.of(served.info())
    run = await start_run(plan, record, asked.services, served)
    try:
        answering = AnswerContext(run, served.tokenizer, fingerprint, int(time.time()), record.request_id)
        frames = api.answer(answering, planned.options)
    except BaseException:
        run.close()
        raise
    if plan.stream:
        headers = as_headers(plan.notices)
        keepalive_s = asked.services.settings.keepalive_s
        return EventStream(run, frames, keepalive_s, headers=headers, media_type=api.media_type)
    try:
        choices = await unless_gone(asked.http, collect(run))
    finally:
        run.close()
    content = await asyncio.to_thread(frames.whole, choices)  # many logprobs take long to encode
    return json_response(content, as_headers(plan.notices))


def check_whole(record: RequestTrace, **asked: bool) -> None:
    """Raise InvalidRequestError if a line of a batch asks for one of these fields: its answer is never streamed."""
    for name, is_asked in asked.items():
        if is_asked and record.is_background:
            message = f"Unsupported value: '{name}' does not support true in a batch. Only false is supported."
            raise InvalidRequestError(message, param=name, code="unsupported_value")


async def start_run(plan: Plan, record: RequestTrace, services: Services, served: ModelServices) -> Run:
    """Submit a plan to the model's engine, and begin its trace.

    Raises ApiError if the engine does not accept it, and LimitError at a limit of the client's key.
    """
    images = services.image_room.hold(plan)
    try:
        plan, account = await admit(plan, record, services, served)
        try:
            return await _run(plan, account, images, record, served)
        except BaseException:
            account.close(Used())  # a run that has begun closes its account itself
            raise
    except BaseException:
        images.release()
        raise


async def _run(plan: Plan, account: Account, images: HeldImages, record: RequestTrace, served: ModelServices) -> Run:
    settings = served.settings
    record.headers |= account.headers
    record.answer_id = plan.id
    record.tokens_in, record.tokens_out = sum(len(one.prompt) for one in plan.requests), 0
    if settings.log_prompts:
        record.prompt = await asyncio.to_thread(_prompt_of, plan, served.tokenizer)
        record.output = ""
    trace = served.timelines.begin(record)
    timeout_s = _BACKGROUND_TIMEOUT_S if record.is_background else settings.request_timeout_s

    release = served.residence.hold(lambda: record.keep_s)

    def close(used: Used) -> None:
        release()
        images.release()
        account.close(used)

    run = Run(served.engine, served.tokenizer, plan, trace, close, timeout_s=timeout_s)
    await run.submit()
    return run


def _prompt_of(plan: Plan, tokenizer: Tokenizer) -> str:
    return "\n".join(tokenizer.decode(one.prompt, skip_special_tokens=False) for one in plan.requests)


async def admit(plan: Plan, record: RequestTrace, services: Services, served: ModelServices) -> tuple[Plan, Account]:
    """The plan with its tenant's name, weight and tier, and its account. Raises LimitError at a limit."""
    cost, metrics = cost_of(plan), served.metrics
    account = await services.accounts.open(record.client, cost, metrics, is_background=record.is_background)
    tier = BACKGROUND if record.is_background else account.tenant.priority
    return of_tenant(plan, account.tenant, tier, isolates=services.settings.isolate_keys), account


def of_tenant(plan: Plan, tenant: Tenant, tier: int, *, isolates: bool) -> Plan:
    """The plan with the tenant's name, weight and tier for the engine."""
    if tenant == Tenant() and not tier:
        return plan
    requests = [replace(one, client=tenant.name, weight=tenant.weight, tier=tier) for one in plan.requests]
    return replace(plan, requests=tuple(_isolated(one) for one in requests) if isolates else tuple(requests))


def _isolated(request: EngineRequest) -> EngineRequest:
    """The request with names of cached blocks and compiled grammars that no other client shares."""
    sampling = request.sampling
    if sampling.grammar is not None:
        sampling = replace(sampling, grammar=f"{sampling.grammar}// {request.client.encode().hex()}\n")
    return replace(request, sampling=sampling, cache_salt=f"{request.client}/{request.cache_salt}")


def cost_of(plan: Plan) -> Cost:
    """The most tokens and choices that the plan may use."""
    num_choices = sum(request.num_drawn for request in plan.requests)
    return Cost(
        num_prompt=sum(request.num_input for request in plan.requests),
        num_output=sum(request.num_drawn * request.max_tokens for request in plan.requests),
        num_choices=num_choices if plan.at_a_time is None else min(num_choices, plan.at_a_time),
        is_bounded=plan.is_bounded,
    )
