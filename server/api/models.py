"""GET /v1/models and GET /v1/models/{id}, in the form of OpenAI's API or, for its clients, of Anthropic's."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.messages import errors as of_messages
from server.api.messages.models import ModelInfo, ModelPage, is_asked_for, model_info, page_of
from server.api.openai import errors as of_openai
from server.api.openapi import answers
from server.api.services import Services, ServicesDep
from server.errors import ApiError
from server.http.responses import json_response

router = APIRouter(tags=["OpenAI"])


class Model(AnswerObject):
    """A served model."""

    id: Annotated[str, doc("Its name in requests.")]
    object: Literal["model"] = "model"
    created: Annotated[int, doc("Unix time in seconds: when the server was started.")]
    owned_by: str = "samewise"
    root: Annotated[str, doc("Extension: the first of the model's names.")]
    parent: Annotated[None, doc("Extension: always null.")] = None
    permission: Annotated[Sequence[Any], doc("Extension: always empty.")] = ()
    max_model_len: Annotated[int, doc("Extension: prompt and output together, in tokens.")]


class ModelList(AnswerObject):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[Model], doc("The served model, once for each of its names.")]


@router.get("/v1/models", responses=answers((ModelList, ModelPage), 400, 401, 503))
async def list_models(
    request: Request,
    services: ServicesDep,
    limit: str | None = None,
    before_id: str | None = None,
    after_id: str | None = None,
) -> Response:
    """The served model, under each of its names. A request with the header `anthropic-version` gets Anthropic's form,
    of which the parameters are, too.
    """
    names = services.model.names
    if is_asked_for(request.scope):
        return json_response(page_of([_info(services, name) for name in names], limit, before_id, after_id))
    return json_response(ModelList(data=[_card(services, name) for name in names]))


@router.get("/v1/models/{model:path}", responses=answers((Model, ModelInfo), 401, 404, 503))
async def retrieve_model(request: Request, model: str, services: ServicesDep) -> Response:
    """The served model, if this is one of its names."""
    services.model.check_name(model)
    return json_response(_info(services, model) if is_asked_for(request.scope) else _card(services, model))


def _card(services: Services, name: str) -> Model:
    model = services.model
    return Model(id=name, created=model.created, root=model.name, max_model_len=services.info().max_model_len)


def _info(services: Services, name: str) -> ModelInfo:
    return model_info(name, services.model.created, services.info().max_model_len)


def _error_response(error: ApiError, scope: Scope) -> Response:
    write = of_messages.error_response if is_asked_for(scope) else of_openai.error_response
    return write(error, scope)


DIALECT = Dialect(router, errors=_error_response)
