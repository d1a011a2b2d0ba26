"""Parses answers of OpenAI-compatible servers: chunks, streams, errors, model lists. No I/O."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

_DONE = b"[DONE]"
UNREADABLE = (msgspec.DecodeError, RecursionError)
"""Errors of decoding a server's JSON; RecursionError for JSON nested too deeply."""
_MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line in a stream, far above any server's."""


class AnswerError(Exception):
    """The server's answer is an error or cannot be used. The message is for the user."""

    def __init__(self, kind: str, message: str) -> None:
        """`kind` is a short name by which errors are counted."""
        super().__init__(message)
        self.kind = kind

    @classmethod
    def refusal(cls, status: int, body: bytes) -> Self:
        """The error for a status other than 200."""
        return cls(f"HTTP {status}", error_message(body))


class Alternative(msgspec.Struct):
    """A candidate token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Alternative):
    """A token of an answer, with the most probable candidates at its position, best first."""

    top_logprobs: list[Alternative] = []


class Logprobs(msgspec.Struct):
    """Log-probabilities of a chunk's tokens."""

    content: list[TokenLogprob] | None = None


class Function(msgspec.Struct):
    """A part of a function call."""

    name: str | None = None
    arguments: str | None = None


class Custom(msgspec.Struct):
    """A part of a call to a custom tool, which takes text."""

    name: str | None = None
    input: str | None = None


class ToolCall(msgspec.Struct):
    """A part of a tool call; parts of the same call have the same index."""

    index: int = 0
    id: str | None = None
    type: str | None = None
    function: Function | None = None
    custom: Custom | None = None


class Delta(msgspec.Struct):
    """The part of a message that a chunk adds, or a whole message."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        """The answer's text, or the refusal."""
        return self.content or self.refusal or ""

    @property
    def thought(self) -> str:
        """The reasoning, under either of the names that servers use."""
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """A choice or a chunk's part of it: `message` or `delta` in chat completions, `text` in completions."""

    index: int = 0
    delta: Delta = msgspec.field(default_factory=Delta)
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    token_sources: list[str] | None = None
    score: float | None = None
    cumulative_logprob: float | None = None

    @property
    def content(self) -> str:
        """The text, whichever field it is in."""
        return self.text or (self.message or self.delta).text


class PromptDetails(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Notice(msgspec.Struct):
    """A field of the request that the server ignored or changed."""

    path: str = ""
    reason: str = ""


class Chunk(msgspec.Struct):
    """A chunk of a streamed completion, or a whole completion. Other fields are skipped without being parsed."""

    id: str = ""
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    system_fingerprint: str | None = None
    seed: int | None = None
    warnings: list[Notice] = []
    error: object = None

    @property
    def text(self) -> str:
        """The first choice's text, empty if there is none."""
        return self.choices[0].content if self.choices else ""


class EventParser:
    """Splits a server-sent event stream into the payloads of its `data` lines and drops all other lines.

    OpenAI's streams have one `data` line per event, so each line is treated as an event.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that these bytes complete. Raises AnswerError for a line that is too long."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(self._rest) > _MAX_LINE_BYTES:
            raise AnswerError("endless line", f"the server sent a line of more than {_MAX_LINE_BYTES >> 20} MiB")


class ChunkParser:
    """Decodes a streamed answer incrementally."""

    def __init__(self) -> None:
        self._events = EventParser()
        self._decoder = msgspec.json.Decoder(Chunk)
        self.is_done = False
        """Whether the stream's final `[DONE]` was received."""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Yield the chunks that these bytes complete. Raises AnswerError for malformed chunks and for errors."""
        for payload in self._events.feed(data):
            if payload == _DONE:
                self.is_done = True
                return
            try:
                chunk = self._decoder.decode(payload)
            except UNREADABLE as error:
                shown = payload[:100].decode(errors="replace")
                raise AnswerError("malformed chunk", f"the server sent a malformed chunk: {error}: {shown}") from None
            if chunk.error is not None:
                raise AnswerError("error in stream", error_message(payload))
            yield chunk

    def close(self) -> None:
        """Note the end of the bytes. Raises AnswerError if the answer is not complete."""
        if not self.is_done:
            raise AnswerError("incomplete stream", "the server closed the connection before the answer was complete")


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


def first_model(body: bytes) -> str:
    """The first model in the answer of /models. Raises AnswerError."""
    models = listed_models(body)
    if not models:
        raise AnswerError("no model", "the server lists no models; name one with --model")
    return str(models[0]["id"])


def listed_models(body: bytes) -> list[dict[str, Any]]:
    """The models in the answer of /models; each has an `id`. Raises AnswerError."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except UNREADABLE:
        models = [{}]
    if not all(isinstance(model.get("id"), str) for model in models):
        raise AnswerError("malformed list", "the answer is not an OpenAI list of models")
    return models


def base_url(url: str) -> str:
    """Normalise an address: add a missing scheme, remove trailing slashes. Raises ValueError."""
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{without_password(url)} is not an http or https address")
    try:
        urlsplit(url).port  # noqa: B018  (reading the property validates it)
    except ValueError as error:
        raise ValueError(f"{without_password(url)}: {error}") from None
    return url


def without_password(url: str) -> str:
    """The address without user and password, for display."""
    return re.sub("//.*@", "//", url)


def headers(api_key: str | None) -> dict[str, str]:
    """Request headers with the API key, if there is one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body; the start of the body if it has another form."""
    try:
        return _message_of(msgspec.json.decode(body)) or _shorten(body)
    except UNREADABLE:
        return _shorten(body)


def _message_of(body: object) -> str | None:
    error = body.get("error", body.get("detail")) if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message) if message else None


def _shorten(body: bytes) -> str:
    return " ".join(body[:300].decode(errors="replace").split()) or "no message"
