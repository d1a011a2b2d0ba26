"""What whoever talks to an OpenAI-compatible server has to know of its answers. No I/O in here."""

import re
from collections.abc import Iterator, Mapping
from typing import Self
from urllib.parse import urlsplit

import msgspec

_DONE = b"[DONE]"
UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What decoding another's JSON raises. The second: it is nested too deeply."""


class AnswerError(Exception):
    """The server answered, but not what was asked for. The message is for the user."""

    def __init__(self, kind: str, message: str) -> None:
        """`kind` is a few words to count by."""
        super().__init__(message)
        self.kind = kind

    @classmethod
    def refusal(cls, status: int, body: bytes) -> Self:
        """For a status other than 200."""
        return cls(f"HTTP {status}", error_message(body))


class Message(msgspec.Struct):
    """Text of a chat choice."""

    content: str | None = None


class Choice(msgspec.Struct):
    """Text of one choice, or a piece of it: `message` or `delta` on the chat endpoint, else `text`."""

    index: int = 0
    message: Message | None = None
    delta: Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The text, wherever it is."""
        part = self.delta or self.message
        return (part.content if part else self.text) or ""


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """What is looked at of a stream's chunk, or of a whole answer; other fields are skipped without being parsed."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None

    @property
    def text(self) -> str:
        """Of the first choice, empty if there is none."""
        return self.choices[0].content if self.choices else ""


class EventParser:
    """Splits a server-sent event stream into the payloads of its `data` lines; comments and other fields are dropped.

    OpenAI's streams have one `data` line for each event, so every line is an event of its own.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class ChunkParser:
    """Decodes a streamed answer while its bytes come."""

    def __init__(self) -> None:
        self._events = EventParser()
        self._decoder = msgspec.json.Decoder(Chunk)
        self.is_done = False
        """Whether the stream has said that it is complete."""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Yield the chunks that these bytes complete. Raises AnswerError for one that is malformed or an error."""
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
        """No more bytes come. Raises AnswerError if the answer is not complete."""
        if not self.is_done:
            raise AnswerError("incomplete stream", "the server closed the connection before the answer was complete")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(body: bytes) -> str:
    """The first model in the answer of /models. Raises AnswerError."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except UNREADABLE:
        raise AnswerError("malformed list", "this is not an OpenAI list of models") from None
    if not models:
        raise AnswerError("no model", "the server lists no model; name one with --model")
    return models[0].id


def base_url(url: str) -> str:
    """The address as users write it, with a scheme and without a slash at the end. Raises ValueError."""
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{without_password(url)} is not an http or https address")
    try:
        urlsplit(url).port  # noqa: B018  (looking at it checks it)
    except ValueError as error:
        raise ValueError(f"{without_password(url)}: {error}") from None
    return url


def without_password(url: str) -> str:
    """An address that may be shown: who is let in there is left out."""
    return re.sub("//.*@", "//", url)


def headers(api_key: str | None) -> dict[str, str]:
    """Request headers; the key only if there is one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body; the start of the body itself where it is something else."""
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
