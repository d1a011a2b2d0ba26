"""POST /v1/models/load and /unload, and GET /v1/models/events: what a key with the right to manage does with models."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.endpoint import body_as
from server.api.fields.rules import RequestModel
from server.api.models import Model, StatusOfModel, card_of
from server.api.openai.errors import error_frames
from server.api.openapi import answers, takes
from server.api.services import ModelsDep, ServedModels, Services, ServicesDep
from server.engine.client import EngineUnavailableError
from server.errors import ApiError, ForbiddenError, InvalidRequestError, UnavailableError
from server.http.event_stream import EventStream, ascii_json
from server.http.middleware import record_of
from server.http.responses import json_response, unless_gone

_ERRORS = (400, 401, 403, 404, 413, 415, 429, 500, 503)

router = APIRouter(tags=["Operations"])


class LoadModelRequest(RequestModel):
    """Request schema for POST /v1/models/load."""

    model: str = Field(description="Name of the model.")


class UnloadModelRequest(RequestModel):
    """Request schema for POST /v1/models/unload."""

    model: str = Field(description="Name of the model.")
    force: bool = Field(False, description="Fail requests in flight instead of waiting for their end.")


class ManagedModel(AnswerObject):
    """Response schema for POST /v1/models/load and /v1/models/unload."""

    success: Literal[True] = True
    model: Annotated[Model, doc("The model afterwards.")]


class ModelEvent(AnswerObject):
    """An event of GET /v1/models/events."""

    model: Annotated[str, doc("The first of the model's names.")]
    event: Literal["model_status"] = "model_status"
    data: Annotated[StatusOfModel, doc("Its status from now on.")]


@router.post("/v1/models/load", responses=answers(ManagedModel, *_ERRORS), openapi_extra=takes(LoadModelRequest))
async def load(request: Request, services: ServicesDep, models: ModelsDep) -> Response:
    """Load a model, and answer when it is loaded. Idle models make room for it. For keys that may manage models.

    After `load_timeout_s` the answer is a 503, and the model is still loaded once there is room.
    """
    _check_right(request, services)
    served = models.find((await body_as(LoadModelRequest, request, services)).model)
    name, timeout_s = served.model.name, services.settings.load_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await unless_gone(request, served.residence.load())
    except EngineUnavailableError as error:
        raise UnavailableError(f"The model `{name}` is not available: {error.told}", code="model_unavailable") from None
    except TimeoutError:
        message = f"The model `{name}` was not loaded within {timeout_s:g} s (load_timeout_s). Its load goes on."
        raise UnavailableError(message, code="model_loading") from None
    return json_response(ManagedModel(model=card_of(served, name)))


@router.post("/v1/models/unload", responses=answers(ManagedModel, *_ERRORS), openapi_extra=takes(UnloadModelRequest))
async def unload(request: Request, services: ServicesDep, models: ModelsDep) -> Response:
    """Unload a model, and answer when its memory is free. Requests in flight are finished first, new ones wait, and
    load it again. For keys that may manage models.
    """
    _check_right(request, services)
    asked = await body_as(UnloadModelRequest, request, services)
    served = models.find(asked.model)
    if served.residence.is_permanent:
        message = f"The model `{served.model.name}` is the only one of this server, and stays loaded. Stop the server."
        raise InvalidRequestError(message, param="model", code="unsupported_value")
    await unless_gone(request, served.residence.unload(grace_s=0.0 if asked.force else None))
    return json_response(ManagedModel(model=card_of(served, served.model.name)))


@router.get("/v1/models/events", responses=answers(ModelEvent, 401, 403, events=ModelEvent, end=""))
async def events(request: Request, services: ServicesDep, models: ModelsDep) -> Response:
    """Stream the status of each model, now and whenever it changes. For keys that may manage models."""
    _check_right(request, services)
    source = _Changes(models)
    return EventStream(source, source, services.settings.keepalive_s, headers={})


router.add_api_route("/v1/models/sse", events, include_in_schema=False)  # the name in llama.cpp's router


def _check_right(request: Request, services: Services) -> None:
    """Raise ForbiddenError unless the key may manage models."""
    if not services.may_manage(record_of(request).client):
        message = "This API key may not manage models. Give it `manage: true` in the keys file."
        raise ForbiddenError(message, code="not_permitted")


class _Changes:
    """The changes of models' statuses, both a Source and its Frames."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._sent: dict[str, StatusOfModel] = {}
        self._changed = asyncio.Event()
        self._changed.set()
        self._ends = [one.residence.watch(self.wake) for one in models]

    async def wait(self) -> bool:
        await self._changed.wait()
        self._changed.clear()
        return not all(one.residence.is_closed for one in self._models)

    def wake(self) -> None:
        self._changed.set()

    def take(self) -> Iterator[ModelEvent]:
        for one in self._models:
            name = one.model.name
            status = card_of(one, name).status
            if self._sent.get(name) != status:
                self._sent[name] = status
                yield ModelEvent(model=name, data=status)

    def close(self) -> None:
        for end in self._ends:
            end()

    @property
    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def frame(self, event: ModelEvent, /) -> bytes:
        return b"data: " + ascii_json(event) + b"\n\n"

    def end(self) -> bytes:
        return b""

    def failure(self, error: ApiError, /) -> bytes:
        return error_frames(error)


DIALECT = Dialect(router, requests={"/v1/models/load": LoadModelRequest, "/v1/models/unload": UnloadModelRequest})
