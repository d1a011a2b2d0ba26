"""GET /v1/models and GET /v1/models/{id}, in OpenAI's format or, for Anthropic's clients, in Anthropic's."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from model_runner.read_numbers import whole_number
from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.messages import errors as of_messages
from server.api.model_services import ModelServices
from server.api.openai import errors as of_openai
from server.api.openapi import answers
from server.api.services import ModelsDep
from server.errors import ApiError, InvalidRequestError, shorten
from server.http.responses import json_response
from server.models.residence import Standing

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000

router = APIRouter(tags=["OpenAI"])


class StatusOfModel(AnswerObject):
    """Whether a model is loaded, in the form of llama.cpp's router."""

    value: Annotated[
        Standing, doc("`loaded` until its memory is free again; a request to an `unloaded` model waits for its load.")
    ]
    failed: Annotated[bool, doc("Whether it could not be loaded, or its engine has failed.")]
    error: Annotated[
        str | None, doc("The words for its users; the server's log has the reason. Null if it has not failed.")
    ]
    progress: Annotated[
        float | None,
        doc("0 to 0.99: time that the load has taken, divided by that of the last load. Null if neither is known."),
    ]
    waiting: Annotated[int, doc("Requests that wait until the model is loaded.")]
    memory_bytes: Annotated[
        int | None, doc("Memory that it takes while it is loaded. Null with one model, and until it is known.")
    ]


_LENGTH = "Null only while the server works it out, which needs no load: seconds after the start."


class Model(AnswerObject):
    """A served model."""

    id: Annotated[str, doc("The model's name in requests.")]
    object: Literal["model"] = "model"
    created: Annotated[int, doc("When the server started: Unix time in seconds.")]
    owned_by: str = "samewise"
    root: Annotated[str, doc("Extension: the first of the model's names.")]
    parent: Annotated[None, doc("Extension: always null.")] = None
    aliases: Annotated[Sequence[str], doc("Extension: the model's other names.")]
    permission: Annotated[Sequence[Any], doc("Extension: always empty.")] = ()
    max_model_len: Annotated[int | None, doc(f"Extension: prompt and output together, in tokens. {_LENGTH}")]
    input_modalities: Annotated[
        Sequence[Literal["text", "image"]], doc("Extension: what prompts may have; `/v1/capabilities` has the limits.")
    ]
    status: Annotated[StatusOfModel, doc("Extension: whether the model is loaded.")]


class ModelList(AnswerObject):
    """Response schema for GET /v1/models."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[Model], doc("The served models, loaded or not, once for each of their names.")]


class ModelInfo(AnswerObject):
    """A served model, in Anthropic's format."""

    type: Literal["model"] = "model"
    id: Annotated[str, doc("The model's name in requests.")]
    display_name: Annotated[str, doc("Same as `id`.")]
    created_at: Annotated[str, doc("When the server started (RFC 3339).")]
    max_input_tokens: Annotated[int | None, doc(f"Prompt and output together, in tokens. {_LENGTH}")]
    max_tokens: Annotated[int | None, doc("Same as `max_input_tokens`.")]
    lifecycle: Literal["active"] = "active"
    capabilities: Annotated[None, doc("Always null; see `/v1/capabilities`.")] = None


class ModelPage(AnswerObject):
    """A page of models, in Anthropic's format."""

    data: Annotated[Sequence[ModelInfo], doc("The served models, once for each of their names.")]
    has_more: Annotated[bool, doc("Whether there are more models in the requested direction.")]
    first_id: Annotated[str | None, doc("Id of the first model in `data`, for `before_id`.")]
    last_id: Annotated[str | None, doc("Id of the last model in `data`, for `after_id`.")]


@router.get("/v1/models", responses=answers((ModelList, ModelPage), 400, 401))
async def list_models(
    request: Request,
    models: ModelsDep,
    limit: str | None = None,
    before_id: str | None = None,
    after_id: str | None = None,
) -> Response:
    """The served models that the key may use, loaded or not, under each of their names. With the header
    `anthropic-version`, the answer has Anthropic's format; only then do `limit`, `before_id` and `after_id` apply.
    """
    named = [(served, name) for served in models for name in served.model.names]
    if is_from_anthropic(request.scope):
        return json_response(page_of([_info(*one) for one in named], limit, before_id, after_id))
    return json_response(ModelList(data=[card_of(*one) for one in named]))


@router.get("/v1/models/{model:path}", responses=answers((Model, ModelInfo), 401, 404))
async def retrieve_model(request: Request, model: str, models: ModelsDep) -> Response:
    """The served model with this name or alias, loaded or not."""
    served = models.find(model)
    return json_response(_info(served, model) if is_from_anthropic(request.scope) else card_of(served, model))


def card_of(served: ModelServices, name: str) -> Model:
    """A model under one of its names."""
    model, status = served.model, served.residence.status
    return Model(
        id=name,
        created=model.created,
        root=model.name,
        aliases=model.aliases,
        max_model_len=status.max_model_len,
        input_modalities=("text", "image") if served.takes_images else ("text",),
        status=StatusOfModel(
            value=status.standing,
            failed=status.failure is not None,
            error=status.failure,
            progress=status.progress,
            waiting=status.num_waiting,
            memory_bytes=status.num_bytes,
        ),
    )


def _info(served: ModelServices, name: str) -> ModelInfo:
    return info_of(name, served.model.created, served.residence.status.max_model_len)


def info_of(name: str, created: int, length: int | None) -> ModelInfo:
    """A model in Anthropic's format. `created` is in Unix time; `length` of prompt and output together in tokens."""
    started = datetime.fromtimestamp(created, UTC)
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=started.isoformat().replace("+00:00", "Z"),
        max_input_tokens=length,
        max_tokens=length,
    )


def is_from_anthropic(scope: Scope) -> bool:
    """Whether a request comes from one of Anthropic's clients."""
    return "anthropic-version" in Headers(scope=scope)


def _error_response(error: ApiError, scope: Scope) -> Response:
    write = of_messages.error_response if is_from_anthropic(scope) else of_openai.error_response
    return write(error, scope)


def page_of(models: Sequence[ModelInfo], limit: str | None, before_id: str | None, after_id: str | None) -> ModelPage:
    """Up to `limit` models, before or after one of them. Raises InvalidRequestError."""
    count = _limit(limit)
    if before_id is not None and after_id is not None:
        message = "Setting 'before_id' and 'after_id' at the same time is not supported."
        raise InvalidRequestError(message, param="before_id", code="invalid_parameter_combination")
    if before_id is not None:
        before = models[: _place(models, "before_id", before_id)]
        page, has_more = before[-count:], len(before) > count
    else:
        after = models if after_id is None else models[_place(models, "after_id", after_id) + 1 :]
        page, has_more = after[:count], len(after) > count
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return ModelPage(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1])


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    limit = whole_number(text, _MAX_LIMIT)
    if not limit:
        message = f"Invalid 'limit': expected a whole number from 1 to {_MAX_LIMIT}, but got '{shorten(text)}' instead."
        raise InvalidRequestError(message, param="limit", code="invalid_value")
    return limit


def _place(models: Sequence[ModelInfo], name: str, model: str) -> int:
    place = next((index for index, one in enumerate(models) if one.id == model), None)
    if place is None:
        message = f"Invalid '{name}': there is no model called '{shorten(model)}'."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return place


DIALECT = Dialect(router, errors=_error_response)
