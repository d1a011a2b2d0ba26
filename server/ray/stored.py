"""What only one replica could answer: it is about things that clients have had stored, and each replica has its own."""

import re

import msgspec
from msgspec import Raw

from server.errors import InvalidRequestError
from server.ray.routing_fields import RoutingFields

_PATHS = re.compile(
    r"/v1/(files|batches|conversations|requests|steps|usage)(/|$)|/(load|slots)$|"
    r"/v1/responses/(?!input_tokens$|compact$)"
)
_RESPONSES = re.compile(r"/v1/responses(/|$)")
_FIELDS = ("previous_response_id", "conversation", "background", "store")
_REFERENCE = frozenset({"type", "id"})
_WHY = "This server runs as several replicas, and each would store it for itself"
_HELP = "Run it as one replica (max_replicas=1) for that"


def check_path(path: str) -> None:
    """Raises InvalidRequestError if a path is about what is stored."""
    if _PATHS.match(path):
        message = f"{path} is not served here. {_WHY}. {_HELP}."
        raise InvalidRequestError(message, code="unsupported_value")


def check_body(path: str, fields: RoutingFields) -> None:
    """Raises InvalidRequestError if a body names what is stored, or wants its answer to be.

    References in a long `input` are not looked for: the replica, which has stored nothing, does not find them.
    """
    if not _RESPONSES.match(path):
        return
    for name in _FIELDS:
        if fields.value_of(name):
            raise _refused(name, "send the conversation's items in 'input', and 'store' as false or not at all")
    items = fields.value_of("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and "id" in item and item.keys() <= _REFERENCE:
            raise _refused(f"input[{index}]", "send the item itself")


def unstored(path: str, content: bytes, fields: RoutingFields) -> bytes:
    """The content of a body, with `store` off where it does not say: the answer then says so, too."""
    if path != "/v1/responses" or fields.value_of("store") is not None:
        return content
    if fields.store:
        return msgspec.json.encode({**msgspec.json.decode(content, type=dict[str, Raw]), "store": False})
    rest = content.lstrip()[1:]
    return content if rest.lstrip().startswith(b"}") else b'{"store":false,' + rest


def _refused(param: str, instead: str) -> InvalidRequestError:
    message = f"Unsupported parameter: '{param}'. {_WHY}. Instead, {instead}. {_HELP}."
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
