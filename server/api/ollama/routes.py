"""POST /api/chat, /api/generate, /api/embed and /api/embeddings, GET /, and the routes that change models."""

import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect, GenerationApi
from server.api.endpoint import ModelRequest, answer, body_as, named_model, when_loaded
from server.api.fields.rules import no_effect
from server.api.ollama.answer import OllamaAnswer, OllamaChatAnswer, OllamaGenerateAnswer, empty_line, loaded_answer
from server.api.ollama.embeddings import (
    OllamaEmbedded,
    OllamaEmbedding,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    embed,
    embedded,
    embedding,
)
from server.api.ollama.errors import OllamaErrorBody, error_response, stream_error
from server.api.ollama.planning import LoadRequest, plan_ollama, read_unload
from server.api.ollama.schema import (
    LONGEST_DURATION,
    NamedFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    chat_intent,
    generate_intent,
)
from server.api.ollama.served import find_model
from server.api.openapi import GENERATION_ERRORS, answers, documented_errors, takes
from server.api.services import ModelsDep, Services, ServicesDep
from server.errors import NotFoundError, NotImplementedHereError
from server.generation.notices import Notice, as_headers, to_report
from server.http.event_stream import NDJSON, ascii_json
from server.http.loading_stream import Waiting
from server.http.middleware import record_of, sender_of
from server.http.responses import json_response, unless_gone
from server.models.residence import Standing

CHAT = GenerationApi(OllamaChatRequest, chat_intent, OllamaAnswer, media_type=NDJSON)
GENERATE = GenerationApi(OllamaGenerateRequest, generate_intent, OllamaAnswer, media_type=NDJSON)
_NOT_HERE = (
    "This server's API cannot add, change or remove models: its operator chooses them. `samewise pull MODEL` downloads "
    "one, and `samewise rm MODEL` removes it."
)
_MORE_THAN_ZERO = frozenset("123456789")
_MAY_NOT = "The model stays loaded: this API key may not unload models (`manage: true` in the keys file)."

router = APIRouter(tags=["Ollama"])


@router.get("/", response_class=PlainTextResponse, responses={200: {"description": "The text `Ollama is running`."}})
async def running() -> Response:
    """The text by which Ollama's clients find a server. Browsers are led to the page."""
    return PlainTextResponse("Ollama is running")


@router.post(
    "/api/chat",
    responses=answers(
        OllamaChatAnswer, *GENERATION_ERRORS, events=OllamaChatAnswer, stream=NDJSON, error_body=OllamaErrorBody
    ),
    openapi_extra=takes(OllamaChatRequest),
)
async def chat(request: Request, services: ServicesDep) -> Response:
    """Answer a conversation, as Ollama does."""
    return await _respond(CHAT, request, services)


@router.post(
    "/api/generate",
    responses=answers(
        OllamaGenerateAnswer, *GENERATION_ERRORS, events=OllamaGenerateAnswer, stream=NDJSON, error_body=OllamaErrorBody
    ),
    openapi_extra=takes(OllamaGenerateRequest),
)
async def generate(request: Request, services: ServicesDep) -> Response:
    """Answer a message, continue a text or fill a gap, as Ollama does."""
    return await _respond(GENERATE, request, services)


async def _respond(api: GenerationApi, request: Request, services: Services) -> Response:
    asked = await named_model(request, services, find_model)
    peeked, residence = _peek(asked.body), asked.served.residence
    is_open, started = residence.is_open, time.perf_counter()
    if peeked.may_unload and not residence.is_permanent:
        body_worker, sender = asked.served.body_worker, sender_of(request)
        unload = await body_worker.run(read_unload, asked.body, None, api.schema, sender=sender)
        if unload is not None:
            return await _unload(unload, asked, is_chat=api is CHAT)

    async def work() -> Response:
        planned = await asked.run(plan_ollama, api, residence.stay_bounds)
        if isinstance(planned, LoadRequest):
            record_of(request).keep_s = planned.keep_s
            return _loaded(planned, "load", is_chat=api is CHAT)
        record_of(request).keep_s = planned.options.keep_s
        load_s = 0.0 if is_open else time.perf_counter() - started
        return await answer(api, replace(planned, options=replace(planned.options, load_s=load_s)), asked)

    piece = partial(empty_line, peeked.model or "", is_chat=api is CHAT)
    waiting = Waiting(peeked.streams, piece, NDJSON)
    return await when_loaded(asked.served, request, services, asked.body, work, waiting)


class _Peeked(msgspec.Struct):
    """Fields that decide how a body is answered."""

    model: str | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def may_unload(self) -> bool:
        """Whether this asks to unload the model, if there is no prompt."""
        if isinstance(self.keep_alive, str):  # not validated yet
            return len(self.keep_alive) <= LONGEST_DURATION and _MORE_THAN_ZERO.isdisjoint(self.keep_alive)
        return self.keep_alive == 0


def _peek(body: bytes) -> _Peeked:
    try:
        return msgspec.json.decode(body, type=_Peeked)
    except (msgspec.DecodeError, RecursionError):
        return _Peeked()


async def _unload(unload: LoadRequest, asked: ModelRequest, *, is_chat: bool) -> Response:
    """Unload a model once it is idle. If the key may not do that, the model stays, and the answer says so."""
    residence, client = asked.served.residence, record_of(asked.http).client
    if residence.status.standing is not Standing.UNLOADED:
        if not asked.services.may_manage(client):
            notices = [*unload.notices, Notice("keep_alive", _MAY_NOT)]
            reported = to_report(notices, strict=asked.services.settings.strict)
            return _loaded(replace(unload, notices=reported), "load", is_chat=is_chat)
        await unless_gone(asked.http, residence.unload(grace_s=None))
    return _loaded(unload, "unload", is_chat=is_chat)


def _loaded(asked: LoadRequest, reason: Literal["load", "unload"], *, is_chat: bool) -> Response:
    line = loaded_answer(asked.model, reason, is_chat=is_chat, warnings=asked.notices)
    return json_response(line, as_headers(asked.notices))


@router.post(
    "/api/embed",
    responses=answers(OllamaEmbedded, *GENERATION_ERRORS, error_body=OllamaErrorBody),
    openapi_extra=takes(OllamaEmbedRequest),
)
async def create_embeddings(request: Request, services: ServicesDep) -> Response:
    """Embed texts: a vector of length 1 for each."""
    return await embed(OllamaEmbedRequest, embedded, request, services)


@router.post(
    "/api/embeddings",
    responses=answers(OllamaEmbedding, *GENERATION_ERRORS, error_body=OllamaErrorBody),
    openapi_extra=takes(OllamaEmbeddingsRequest),
)
async def create_embedding(request: Request, services: ServicesDep) -> Response:
    """Embed one text: the older form of `/api/embed`."""
    return await embed(OllamaEmbeddingsRequest, embedding, request, services)


class OllamaPullRequest(NamedFields):
    """Request schema for POST /api/pull."""

    stream: bool | None = Field(
        None, description="Answer with a JSON object a line; on by default.", json_schema_extra={"x-default": True}
    )
    insecure: bool | None = no_effect("Whether to accept any certificate.")
    username: str | None = no_effect("Name at the registry.")
    password: str | None = no_effect("Password at the registry.")


class OllamaProgress(AnswerObject):
    """Response schema for POST /api/pull, and for each line of its stream."""

    status: Annotated[str, doc("`success` in the end.")]


@router.post(
    "/api/pull",
    responses=answers(
        OllamaProgress, 400, 401, 404, 413, 415, 429, 500, events=OllamaProgress, stream=NDJSON,
        error_body=OllamaErrorBody,
    ),
    openapi_extra=takes(OllamaPullRequest),
)  # fmt: skip
async def pull(request: Request, services: ServicesDep, models: ModelsDep) -> Response:
    """Say that a model is here. Nothing is downloaded: other models get 404."""
    asked = await body_as(OllamaPullRequest, request, services)
    try:
        find_model(models, asked.named)
    except NotFoundError as error:
        raise NotFoundError(f"{error.message}. {_NOT_HERE}", param="model", code="model_not_found") from None
    if asked.stream is False:
        return json_response(OllamaProgress(status="success"))
    lines = [ascii_json(OllamaProgress(status=status)) + b"\n" for status in ("pulling manifest", "success")]
    return Response(b"".join(lines), media_type=NDJSON)


async def change_models() -> Response:
    """Refused: the operator of the server chooses its models."""
    raise NotImplementedHereError(_NOT_HERE, code="not_implemented")


CHANGES = {
    "/api/create": "POST",
    "/api/copy": "POST",
    "/api/push": "POST",
    "/api/delete": "DELETE",
    "/api/blobs/{digest}": "POST",
}
"""Routes that change models, and their methods."""
for path, method in CHANGES.items():
    router.add_api_route(
        path, change_models, methods=[method], responses=documented_errors(401, 501, body=OllamaErrorBody)
    )


DIALECT = Dialect(
    router,
    errors=error_response,
    stream_error=stream_error,
    requests={
        "/api/chat": OllamaChatRequest,
        "/api/generate": OllamaGenerateRequest,
        "/api/embed": OllamaEmbedRequest,
        "/api/embeddings": OllamaEmbeddingsRequest,
        "/api/pull": OllamaPullRequest,
    },
    below=("/api",),
)
