"""All APIs that the server supports, and the lookup of an API by path."""

from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter

from server.api import (
    capabilities,
    files,
    invocations,
    model_management,
    models,
    probes,
    request_log,
    steps,
    tokens,
    usage,
)
from server.api.batches import routes as batches
from server.api.dialect import Dialect
from server.api.llama_cpp import routes as llama_cpp
from server.api.messages import routes as messages
from server.api.ollama import about as about_ollama
from server.api.ollama import routes as ollama
from server.api.openai import routes as openai
from server.api.pooling import routes as pooling
from server.api.responses import conversations
from server.api.responses import routes as responses
from server.http.middleware import ShortPaths
from server.http.responses import ErrorWriter

DIALECTS: Sequence[Dialect] = (
    openai.DIALECT,
    responses.DIALECT,
    conversations.DIALECT,
    messages.DIALECT,
    llama_cpp.DIALECT,
    ollama.DIALECT,
    about_ollama.DIALECT,
    pooling.DIALECT,
    model_management.DIALECT,  # before the paths of models' names
    models.DIALECT,
    tokens.DIALECT,
    files.DIALECT,
    batches.DIALECT,
    usage.DIALECT,
    request_log.DIALECT,
    steps.DIALECT,
    capabilities.DIALECT,
    probes.DIALECT,
    invocations.DIALECT,
)


def error_writers(dialects: Sequence[Dialect]) -> Callable[[str], ErrorWriter]:
    """A function from a path to the writer of its errors."""
    find = by_path(dialects)
    return lambda path: find(path).errors


def short_paths(dialects: Sequence[Dialect]) -> ShortPaths:
    """The completion of short paths of these dialects."""
    return ShortPaths(_by_route(dialects))


def websocket_paths(dialects: Sequence[Dialect]) -> Sequence[str]:
    """The paths that may become websockets, and their short forms."""
    paths = [path for dialect in dialects for path in dialect.websockets]
    shortened = short_paths(dialects)
    return [*paths, *(short for path in paths if shortened.full(short := path.removeprefix("/v1")) == path)]


def by_path(dialects: Sequence[Dialect]) -> Callable[[str], Dialect]:
    """A function from a path to its dialect; an unknown path gets a dialect with OpenAI's errors."""
    known = _by_route(dialects)
    default = Dialect(APIRouter())

    def of(path: str) -> Dialect:
        while path not in known and "/" in path:
            path = path.rpartition("/")[0]
        return known.get(path, default)

    return of


def _by_route(dialects: Sequence[Dialect]) -> Mapping[str, Dialect]:
    below = {path: dialect for dialect in dialects for path in dialect.below}
    return below | {route.path: dialect for dialect in dialects for route in dialect.router.routes}  # type: ignore[attr-defined]
