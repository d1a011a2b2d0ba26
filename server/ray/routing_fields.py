"""Reads a request body in the ingress: its model, its session, and whether it needs stored objects."""

import hashlib
import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from server.errors import InvalidRequestError

SHORT_BYTES = 64 << 10
"""Longer values are not decoded, because decoding megabytes would block all streams."""
_ABSENT = Raw()


class RoutingFields(msgspec.Struct, gc=False, frozen=True):
    """The body's fields that routing needs, as raw JSON; a missing field is empty."""

    model: Raw = _ABSENT
    name: Raw = _ABSENT
    """Ollama's older name for `model`."""
    system: Raw = _ABSENT
    instructions: Raw = _ABSENT
    tools: Raw = _ABSENT
    messages: Raw = _ABSENT
    input: Raw = _ABSENT
    prompt: Raw = _ABSENT
    input_prefix: Raw = _ABSENT
    cache_salt: Raw = _ABSENT
    previous_response_id: Raw = _ABSENT
    conversation: Raw = _ABSENT
    background: Raw = _ABSENT
    store: Raw = _ABSENT

    def value_of(self, name: str) -> object:
        """A field's value, decoded by `decoded`."""
        return decoded(getattr(self, name))


def read_fields(content: bytes) -> RoutingFields | None:
    """A body's routing fields; None if it is not a JSON object, which the replica refuses with a better message."""
    try:
        return msgspec.json.decode(content, type=RoutingFields)
    except (ValueError, RecursionError):
        return None


def decoded(written: Raw) -> object:
    """The decoded value; the raw JSON if it is long; None if it is missing or invalid."""
    if len(written) > SHORT_BYTES:
        return written
    try:
        return msgspec.json.decode(written) if written else None
    except (ValueError, RecursionError):
        return None


START_BYTES = 1024
"""Bytes of a prompt that identify its session. Prompts with a longer common prefix stay on one replica; shorter
prefixes, of a few hundred tokens, are soon cached on every replica."""
_BEFORE = ("system", "instructions", "tools")
"""Fields that chat templates put before the conversation."""
_CONVERSATION = ("messages", "input", "input_prefix", "prompt")
_NUM_FIRST = 16
"""Number of a long conversation's messages that are read."""
_First = msgspec.defstruct(
    "_First", [(f"item_{number}", Raw, Raw()) for number in range(_NUM_FIRST)], array_like=True, gc=False
)
"""The first items of an array of any length, as raw JSON."""


def session_of(fields: RoutingFields, key: str = "") -> str:
    """A hash that is equal for bodies with the same start of the prompt, `cache_salt` and key; empty without a prompt.

    Only messages up to the user's first are hashed, so that a conversation stays on its replica as it grows. Long
    values are hashed as written, shorter ones in canonical form.
    """
    try:
        start = b"\n".join(_canonical(part) for part in _parts(fields))
    except RecursionError:  # nested too deeply, which the replica will refuse
        return ""
    if not start:
        return ""
    hashed = hashlib.blake2b(start[:START_BYTES], digest_size=16)
    hashed.update(msgspec.json.encode([fields.value_of("cache_salt"), key]))
    return hashed.hexdigest()


def _canonical(part: object) -> bytes:
    """The value's canonical JSON; the start of a long value as written."""
    return bytes(memoryview(part)[:START_BYTES]) if isinstance(part, Raw) else msgspec.json.encode(part, order="sorted")


def _parts(fields: RoutingFields) -> Iterator[object]:
    yield from filter(None, map(fields.value_of, _BEFORE))
    conversation = next(filter(None, (_first_of(fields.value_of(name)) for name in _CONVERSATION)), None)
    if not isinstance(conversation, list):
        if conversation is not None:
            yield conversation
    elif isinstance(conversation[0], dict):
        yield from _up_to_user(conversation)
    else:
        yield _text_or_tokens(conversation)


def _first_of(conversation: object) -> object:
    """The first items of a long array, unless they are tokens; any other value unchanged."""
    if not isinstance(conversation, Raw) or bytes(memoryview(conversation)[:1]) != b"[":
        return conversation
    items = msgspec.structs.astuple(msgspec.json.decode(conversation, type=_First))
    first = [decoded(item) for item in items if item]
    return conversation if first and isinstance(first[0], int) else first


def _text_or_tokens(prompts: Sequence[object]) -> object:
    """The first of several prompts; an array of numbers is one prompt."""
    return prompts if isinstance(prompts[0], int) else prompts[0]


def _up_to_user(messages: Sequence[object]) -> Iterator[object]:
    for message in messages:
        yield message
        if isinstance(message, dict) and message.get("role") == "user":
            return


_PATHS = re.compile(
    r"/v1/(files|batches|conversations|requests|steps|usage)(/|$)|/(load|slots)$|"
    r"/v1/responses/(?!input_tokens$|compact$)"
)
_RESPONSES = re.compile(r"/v1/responses(/|$)")
_FIELDS = ("previous_response_id", "conversation", "background", "store")
_REFERENCE = frozenset({"type", "id"})
_WHY = "This server runs several replicas, which do not share stored objects"
_HELP = "To store objects, run one replica of one model (max_replicas=1)"


def check_path(path: str) -> None:
    """Raise InvalidRequestError for paths of stored objects, which replicas do not share."""
    if _PATHS.match(path):
        message = f"Unsupported path: {path}. {_WHY}. {_HELP}."
        raise InvalidRequestError(message, code="unsupported_value")


def check_body(path: str, fields: RoutingFields) -> None:
    """Raise InvalidRequestError if a body refers to stored objects or asks to store its answer.

    References in a long `input` are left to the replica, which has stored nothing and refuses them.
    """
    if not _RESPONSES.match(path):
        return
    for name in _FIELDS:
        if fields.value_of(name):
            raise _refused(name, "send the conversation's items in 'input', and set 'store' to false or omit it")
    items = fields.value_of("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and "id" in item and item.keys() <= _REFERENCE:
            raise _refused(f"input[{index}]", "send the item itself")


def unstored(path: str, content: bytes, fields: RoutingFields) -> bytes:
    """Set `store` to false if the body has no such field, so that the answer reports it."""
    if path != "/v1/responses" or fields.value_of("store") is not None:
        return content
    if fields.store:
        return msgspec.json.encode({**msgspec.json.decode(content, type=dict[str, Raw]), "store": False})
    rest = content.lstrip()[1:]
    return content if rest.lstrip().startswith(b"}") else b'{"store":false,' + rest


def _refused(param: str, instead: str) -> InvalidRequestError:
    message = f"Unsupported parameter: '{param}'. {_WHY}. Instead, {instead}. {_HELP}."
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
