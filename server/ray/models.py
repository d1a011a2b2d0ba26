"""The models behind the ingress: which one a request names, and the answers that concern all of them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec
from fastapi import Response
from msgspec import Raw
from prometheus_client.core import Metric
from starlette.datastructures import QueryParams
from starlette.types import Scope

from server.api.models import Model, ModelInfo, StatusOfModel, info_of, is_from_anthropic, page_of
from server.api.ollama.served import meant_name
from server.api.probes import Status
from server.errors import ApiError, InvalidRequestError, NotFoundError, UnavailableError
from server.http.middleware import record_in
from server.http.responses import json_response
from server.models.residence import Standing
from server.ray.exchange import Accepted, ForwardedRequest, Replicas
from server.ray.routing_fields import RoutingFields
from server.tenants.keys import Tenant

ANSWER_S = 5.0
"""Time for a replica of each model to answer a question about all models."""
_MODELS = "/v1/models"
_LISTS = {_MODELS: "data", "/api/tags": "models", "/api/ps": "models"}
"""Paths that list models, and the property of the answer that has the list."""
_WHOLE_PAGE = b"limit=1000"
_MANAGED = frozenset({("POST", "load"), ("POST", "unload"), ("GET", "events"), ("GET", "sse")})
"""Methods and ends of the paths that load and unload models."""
_READS = frozenset({"GET", "HEAD"})
_logger = logging.getLogger("samewise.ray")


@dataclass(frozen=True, slots=True)
class ModelReplicas:
    """The replicas of a model."""

    replicas: Replicas
    names: tuple[str, ...] = ()
    """All names of one of several models, its own first; empty for the only model."""


class RoutedModels:
    """The models behind the ingress, in the order of the settings.

    A replica knows the names of its own model only, and refuses all others as a server with several models does.
    Therefore a request that names no model, or none that its key may use, goes to the first one that the key may use.
    """

    def __init__(self, models: Sequence[ModelReplicas]) -> None:
        self._models = models
        self._started = int(time.time())

    def of(self, tenant: Tenant | None) -> Sequence[ModelReplicas]:
        """The models that the key's owner may use; all of them without a key. The only model checks that itself."""
        if tenant is None or tenant.models is None or len(self._models) == 1:
            return self._models
        return [one for one in self._models if not tenant.models.isdisjoint(one.names)]

    def named(self, asked: str | None, path: str, allowed: Sequence[ModelReplicas]) -> ModelReplicas:
        """The allowed model of this name, or the default one. Ollama's names may be spelled in several ways."""
        by_name = {name: one for one in allowed for name in one.names}
        if asked is not None and path.startswith("/api/"):
            with suppress(NotFoundError):
                asked = meant_name(by_name, asked)
        return by_name.get(asked or "") or (allowed or self._models)[0]

    def concerns_all(self, scope: Scope) -> bool:
        """Whether the answer must come from all of several models. Raises InvalidRequestError if none can give it."""
        method, path = scope["method"], scope["path"]
        if len(self._models) == 1:
            return False
        if path.startswith(f"{_MODELS}/") and (method, path.removeprefix(f"{_MODELS}/")) in _MANAGED:
            message = f"Unsupported path: {path}. Ray Serve starts and ends the replicas of each model, by the options "
            message += f"min_replicas and max_replicas. GET {_MODELS} shows which models are loaded."
            raise InvalidRequestError(message, code="unsupported_value")
        if path == "/ping":
            return method in _READS | {"POST"}
        return method in _READS and (
            path in _LISTS or path == "/health" or (path == "/ready" and "model" not in _query(scope))
        )

    async def answer(self, scope: Scope, allowed: Sequence[ModelReplicas]) -> Response:
        """The answer to a request that concerns all models. Raises UnavailableError."""
        path = scope["path"]
        if path == "/health":  # says nothing about models
            return json_response(Status(status="ok"))
        pairs = list(zip(allowed, await asyncio.gather(*(_answer(one, scope) for one in allowed)), strict=True))
        if path in _LISTS:
            return self._list(scope, pairs)
        for one, answer in pairs:
            if answer is None:
                raise UnavailableError(f"The model `{one.names[0]}` is not ready. Please try again later.")
        return json_response(Status(status="ready"))

    def _list(self, scope: Scope, answers: Sequence[tuple[ModelReplicas, bytes | None]]) -> Response:
        """The list of the models that these answers list. Raises UnavailableError."""
        path = scope["path"]
        if path == _MODELS:
            listed = [self._starting(one, scope) if answer is None else answer for one, answer in answers]
        else:
            listed = [answer for _, answer in answers if answer is not None]
            if answers and not listed:
                raise UnavailableError("No replica answers. Please try again later.")
        items = [item for answer in listed for item in _items(answer, _LISTS[path])]
        if path != _MODELS:
            return json_response({_LISTS[path]: items})
        if not is_from_anthropic(scope):
            return json_response({"object": "list", _LISTS[path]: items})
        infos = [msgspec.json.decode(item, type=ModelInfo) for item in items]
        query = _query(scope)
        return json_response(page_of(infos, query.get("limit"), query.get("before_id"), query.get("after_id")))

    def _starting(self, model: ModelReplicas, scope: Scope) -> bytes:
        """The list of a model that has no replica yet, or whose replica does not answer."""
        if is_from_anthropic(scope):
            return msgspec.json.encode({"data": [info_of(name, self._started, None) for name in model.names]})
        status = StatusOfModel(
            value=Standing.LOADING, failed=False, error=None, progress=None, waiting=0, memory_bytes=None
        )
        root, *aliases = model.names
        return msgspec.json.encode({"data": [
            Model(id=name, created=self._started, root=root, aliases=aliases, max_model_len=None,
                  input_modalities=("text",), status=status)
            for name in model.names
        ]})  # fmt: skip


async def metrics_of(models: Sequence[ModelReplicas]) -> Sequence[tuple[str, Sequence[Metric]]]:
    """Names and metrics of the replicas that answer in time. Raises UnavailableError if no model's replica does."""
    found = await asyncio.gather(*(_metrics(one) for one in models))
    if errors := [one for one in found if isinstance(one, UnavailableError)]:
        if len(errors) == len(found):
            raise errors[0]
        _logger.warning("%d of %d models returned no metrics.", len(errors), len(found))
    return [page for one in found if not isinstance(one, UnavailableError) for page in one]


async def _metrics(model: ModelReplicas) -> Sequence[tuple[str, Sequence[Metric]]] | UnavailableError:
    try:
        return await model.replicas.metrics()
    except UnavailableError as error:
        return error


def asked_name(scope: Scope, fields: RoutingFields | None) -> str | None:
    """The name of a model in a request: in its path, its query or its body."""
    path = scope["path"]
    if scope["method"] in _READS:
        return path.removeprefix(f"{_MODELS}/") if path.startswith(f"{_MODELS}/") else _query(scope).get("model")
    if fields is None:
        return None
    name = fields.value_of("model") or (fields.value_of("name") if path.startswith("/api/") else None)
    return name if isinstance(name, str) else None


async def _answer(model: ModelReplicas, scope: Scope) -> bytes | None:
    """The body of a replica's answer to the same question about its model; None if it has none in time."""
    asked = {**scope, "method": "GET", "query_string": _WHOLE_PAGE if scope["path"] == _MODELS else b""}
    request = ForwardedRequest.of(asked, b"", record_in(scope).request_id)
    status, body = 0, b""
    try:
        async with asyncio.timeout(ANSWER_S), aclosing(model.replicas.answer(request, "")) as messages:
            async for message in messages:
                if not isinstance(message, Accepted):
                    status = message.get("status", status)
                    body += message.get("body", b"")
    except (ApiError, TimeoutError) as error:
        _logger.warning("No replica of the model %s answers %s: %r", model.names[0], scope["path"], error)
        return None
    return body if status == 200 else None


def _items(answer: bytes, name: str) -> list[Raw]:
    """The items of a list under this name in an answer."""
    return msgspec.json.decode(msgspec.json.decode(answer, type=dict[str, Raw])[name], type=list[Raw])


def _query(scope: Scope) -> QueryParams:
    return QueryParams(scope["query_string"])
