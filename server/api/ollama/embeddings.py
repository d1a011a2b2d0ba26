"""POST /api/embed and POST /api/embeddings, its older form: schemas, plans and answers."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from fastapi import Request, Response
from msgspec import UNSET
from pydantic import Discriminator, Field, Tag

from server.api.answer_object import AnswerObject, Warnings, doc
from server.api.body_worker import BodyContext
from server.api.dialect import PlannedRequest
from server.api.endpoint import model_request
from server.api.fields.rules import RequestModel, related, shape
from server.api.ollama.planning import LoadRequest, capped_context, explained_cap
from server.api.ollama.schema import KeptFields
from server.api.ollama.served import find_model, name_for
from server.api.pooling.answer import floats_of
from server.api.pooling.routes import answer_with_numbers
from server.api.pooling.schema import MAX_TEXTS
from server.api.services import Services
from server.generation.notices import Notice, as_headers, to_report
from server.generation.pooling import Embed, PoolingRequest
from server.generation.request import TextPrompt
from server.generation.run import Run
from server.generation.served_model import ServedModel
from server.http.middleware import record_of
from server.http.responses import json_response
from server.models.residence import StayBounds

_NANOSECONDS = 1_000_000_000
Texts = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


class EmbeddingFields(KeptFields):
    """The fields that POST /api/embed and POST /api/embeddings share."""

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        options = self.set_options
        for name, field in type(options).model_fields.items():
            extra = field.json_schema_extra
            is_honoured = not (isinstance(extra, dict) and "x-support" in extra)
            if is_honoured and name != "num_ctx" and name in options.model_fields_set and options.asks(name):
                yield Notice(f"options.{name}", "Embeddings are not generated text.")

    @property
    def texts(self) -> Sequence[TextPrompt]:
        """The texts to embed."""
        raise NotImplementedError


class OllamaEmbedRequest(EmbeddingFields):
    """Request schema for POST /api/embed."""

    input: Texts = Field(description="One or several texts. Without any, the answer has no vectors.")
    truncate: bool | None = Field(
        None, description="Whether only the beginning is used of a text that is too long; on by default. If off, it is "
        "refused.",
        json_schema_extra={"x-default": True, **related(on=True)},
    )  # fmt: skip
    dimensions: int | None = Field(
        None, ge=1, description="Length of the vectors, for models whose vectors can be shortened (Matryoshka)."
    )

    @property
    def texts(self) -> Sequence[TextPrompt]:
        if isinstance(self.input, str):
            return [TextPrompt(self.input, "input")] if self.input else []
        return [TextPrompt(text, f"input[{index}]") for index, text in enumerate(self.input)]


class OllamaEmbeddingsRequest(EmbeddingFields):
    """Request schema for POST /api/embeddings."""

    prompt: str | None = Field(None, description="The text. Without one, the answer has an empty vector.")

    @property
    def texts(self) -> Sequence[TextPrompt]:
        return [TextPrompt(self.prompt, "prompt")] if self.prompt else []


class OllamaEmbedded(AnswerObject):
    """Response schema for POST /api/embed."""

    model: Annotated[str, doc("The model's name, as in the request.")]
    embeddings: Annotated[Sequence[Sequence[float]], doc("A vector of length 1 for each text, in their order.")]
    total_duration: Annotated[int, doc("Nanoseconds from the request's arrival.")]
    load_duration: Annotated[int, doc("Always 0; `total_duration` has the time until the model was loaded.")] = 0
    prompt_eval_count: Annotated[int, doc("Tokens of all texts.")]
    warnings: Warnings = UNSET


class OllamaEmbedding(AnswerObject):
    """Response schema for POST /api/embeddings."""

    embedding: Annotated[Sequence[float], doc("The vector, whose length is not made 1.")]
    warnings: Warnings = UNSET


def embed_intent(body: EmbeddingFields, model: str) -> PoolingRequest:
    """The request for a vector of each text, by the served model of this name."""
    if isinstance(body, OllamaEmbedRequest):
        truncate = None if body.truncate is False else -1
        asks = Embed(body.texts, body.dimensions, truncate=truncate, normalizes=True, keeps_beginning=True)
        path = "input"
    else:
        asks, path = Embed(body.texts, truncate=-1, normalizes=False, keeps_beginning=True), "prompt"
    return PoolingRequest(
        model=model, asks=asks, id_prefix="embd-", paths={"prompt": path}, notices=tuple(body.ignored())
    )


def plan_embedding(
    context: BodyContext, body: bytes, schema: type[RequestModel], bounds: StayBounds
) -> PlannedRequest | LoadRequest:
    """Validate a body and plan its request. Raises ApiError and HeavyError."""
    asked: EmbeddingFields = context.validated(schema, body)  # type: ignore[assignment]
    name = name_for(context.model, asked.model)
    capped, notices = capped_context(context, asked.set_options)
    notices = [*asked.kept(bounds), *notices]
    if not asked.texts:
        all_notices = to_report([*asked.ignored(), *notices], strict=context.settings.strict)
        return LoadRequest(asked.model, all_notices, asked.keep_s)
    request = embed_intent(asked, name)
    context.weigh(request.asks.num_bytes)
    with explained_cap(context, capped):
        plan = capped.pooling().plan(replace(request, notices=(*request.notices, *notices)))
    return PlannedRequest(plan, LoadRequest(asked.model, (), asked.keep_s))


async def embed(
    schema: type[RequestModel], make: Callable[..., AnswerObject], request: Request, services: Services
) -> Response:
    """Answer a request for embeddings; `make` makes the answer. Raises ApiError and ClientDisconnect."""
    async with model_request(request, services, find_model) as asked:
        planned = await asked.run(plan_embedding, schema, asked.served.residence.stay_bounds)
        record = record_of(request)
        sent = planned if isinstance(planned, LoadRequest) else planned.options
        record.keep_s = sent.keep_s
        if isinstance(planned, LoadRequest):
            content = make((), 0, planned.model, record.started, planned.notices)
            return json_response(content, as_headers(planned.notices))
        write = partial(_written, make=make, model=sent.model, started=record.started)
        return await answer_with_numbers(PlannedRequest(planned.plan, write), asked)


def _written(run: Run, served: ServedModel, *, make: Callable[..., AnswerObject], model: str, started: float) -> bytes:
    vectors = [floats_of(prompt) for prompt in run.prompts]
    return msgspec.json.encode(make(vectors, run.usage.prompt_tokens, model, started, run.plan.notices))


def embedded(
    vectors: Sequence[Sequence[float]], num_tokens: int, model: str, started: float, notices: Sequence[Notice]
) -> OllamaEmbedded:
    """The answer of POST /api/embed."""
    return OllamaEmbedded(
        model=model,
        embeddings=vectors,
        total_duration=int((time.perf_counter() - started) * _NANOSECONDS),
        prompt_eval_count=num_tokens,
        warnings=notices or UNSET,
    )


def embedding(
    vectors: Sequence[Sequence[float]], num_tokens: int, model: str, started: float, notices: Sequence[Notice]
) -> OllamaEmbedding:
    """The answer of POST /api/embeddings."""
    return OllamaEmbedding(embedding=vectors[0] if vectors else (), warnings=notices or UNSET)
