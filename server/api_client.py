"""What `samewise chat` and `samewise bench` need to talk to any OpenAI-compatible server. No I/O in here."""

from collections.abc import Iterator, Mapping

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """New text of a chat choice."""

    content: str | None = None


class Choice(msgspec.Struct):
    """New text of one choice: `delta` on the chat endpoint, `text` on the completions endpoint."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """The fields of a stream chunk that the commands look at; all others are skipped without being parsed."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None

    @property
    def text(self) -> str:
        """New text of the first choice, empty if there is none."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return (choice.delta.content if choice.delta else choice.text) or ""


class Model(msgspec.Struct):
    """An entry of /v1/models."""

    id: str


class Models(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[Model]


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


def base_url(url: str) -> str:
    """The address as users write it, with a scheme and without a slash at the end. Raises ValueError."""
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not an http or https address")
    return url


def headers(api_key: str | None) -> dict[str, str]:
    """Request headers; the key only if there is one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body; the start of the body itself where it is something else."""
    try:
        return _message_of(msgspec.json.decode(body)) or _shorten(body)
    except msgspec.DecodeError:
        return _shorten(body)


def _message_of(body: object) -> str | None:
    error = body.get("error", body.get("detail")) if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message) if message else None


def _shorten(body: bytes) -> str:
    return " ".join(body[:300].decode(errors="replace").split()) or "no message"
