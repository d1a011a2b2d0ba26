"""GET /v1/models and GET /v1/models/{id}, in OpenAI's format or, for Anthropic's clients, in Anthropic's."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.messages import errors as of_messages
from server.api.model_services import ModelServices
from server.api.openai import errors as of_openai
from server.api.openapi import answers
from server.api.services import ServicesDep
from server.errors import ApiError, InvalidRequestError, shorten
from server.http.responses import json_response

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000

router = APIRouter(tags=["OpenAI"])


class Model(AnswerObject):
    """A served model."""

    id: Annotated[str, doc("The model's name in requests.")]
    object: Literal["model"] = "model"
    created: Annotated[int, doc("When the server started: Unix time in seconds.")]
    owned_by: str = "samewise"
    root: Annotated[str, doc("Extension: the first of the model's names.")]
    parent: Annotated[None, doc("Extension: always null.")] = None
    permission: Annotated[Sequence[Any], doc("Extension: always empty.")] = ()
    max_model_len: Annotated[int, doc("Extension: prompt and output together, in tokens.")]


class ModelList(AnswerObject):
    """Response schema for GET /v1/models."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[Model], doc("The served model, once for each of its names.")]


class ModelInfo(AnswerObject):
    """A served model, in Anthropic's format."""

    type: Literal["model"] = "model"
    id: Annotated[str, doc("The model's name in requests.")]
    display_name: Annotated[str, doc("Same as `id`.")]
    created_at: Annotated[str, doc("When the server started (RFC 3339).")]
    max_input_tokens: Annotated[int, doc("Prompt and output together, in tokens.")]
    max_tokens: Annotated[int, doc("Same as `max_input_tokens`.")]
    lifecycle: Literal["active"] = "active"
    capabilities: Annotated[None, doc("Always null; see `/v1/capabilities`.")] = None


class ModelPage(AnswerObject):
    """A page of models, in Anthropic's format."""

    data: Annotated[Sequence[ModelInfo], doc("The served model, once for each of its names.")]
    has_more: Annotated[bool, doc("Whether there are more models in the requested direction.")]
    first_id: Annotated[str | None, doc("Id of the first model in `data`, for `before_id`.")]
    last_id: Annotated[str | None, doc("Id of the last model in `data`, for `after_id`.")]


@router.get("/v1/models", responses=answers((ModelList, ModelPage), 400, 401, 503))
async def list_models(
    request: Request,
    services: ServicesDep,
    limit: str | None = None,
    before_id: str | None = None,
    after_id: str | None = None,
) -> Response:
    """The served model, under each of its names. With the header `anthropic-version`, the answer has Anthropic's
    format; only then do `limit`, `before_id` and `after_id` apply.
    """
    models = [(served, name) for served in services.models for name in served.model.names]
    if _is_from_anthropic(request.scope):
        return json_response(_page_of([_info(*one) for one in models], limit, before_id, after_id))
    return json_response(ModelList(data=[_card(*one) for one in models]))


@router.get("/v1/models/{model:path}", responses=answers((Model, ModelInfo), 401, 404, 503))
async def retrieve_model(request: Request, model: str, services: ServicesDep) -> Response:
    """The served model, if this is one of its names."""
    served = services.models.find(model)
    return json_response(_info(served, model) if _is_from_anthropic(request.scope) else _card(served, model))


def _card(served: ModelServices, name: str) -> Model:
    model = served.model
    return Model(id=name, created=model.created, root=model.name, max_model_len=served.info().max_model_len)


def _info(served: ModelServices, name: str) -> ModelInfo:
    started = datetime.fromtimestamp(served.model.created, UTC)
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=started.isoformat().replace("+00:00", "Z"),
        max_input_tokens=served.info().max_model_len,
        max_tokens=served.info().max_model_len,
    )


def _is_from_anthropic(scope: Scope) -> bool:
    """Whether a request comes from one of Anthropic's clients."""
    return "anthropic-version" in Headers(scope=scope)


def _error_response(error: ApiError, scope: Scope) -> Response:
    write = of_messages.error_response if _is_from_anthropic(scope) else of_openai.error_response
    return write(error, scope)


def _page_of(models: Sequence[ModelInfo], limit: str | None, before_id: str | None, after_id: str | None) -> ModelPage:
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
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= _MAX_LIMIT):
        message = f"Invalid 'limit': expected a whole number from 1 to {_MAX_LIMIT}, but got '{shorten(text)}' instead."
        raise InvalidRequestError(message, param="limit", code="invalid_value")
    return int(text)


def _place(models: Sequence[ModelInfo], name: str, model: str) -> int:
    place = next((index for index, one in enumerate(models) if one.id == model), None)
    if place is None:
        message = f"Invalid '{name}': there is no model called '{shorten(model)}'."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return place


DIALECT = Dialect(router, errors=_error_response)
