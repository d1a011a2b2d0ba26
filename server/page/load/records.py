"""What the page looks at of the server's lists of steps and requests; all else is skipped."""

import msgspec


class Step(msgspec.Struct):
    """One step of the engine."""

    number: int
    ended_at: float
    """Unix time in seconds."""
    duration_ms: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Cache(msgspec.Struct):
    """The KV cache."""

    block_size: int
    """Tokens in a block."""


class StepList(msgspec.Struct):
    """The last steps, the oldest first."""

    data: list[Step]
    last_step: int
    kv_cache: Cache | None = None


class Times(msgspec.Struct):
    """Of a request, in milliseconds. None is what there was not, or not yet."""

    total: float
    before: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    after: float | None = None


class Drafts(msgspec.Struct):
    """What one method of speculation drafted."""

    method: str
    accepted_tokens: int
    rejected_tokens: int


class ChoiceTimes(msgspec.Struct):
    """Of a choice, in milliseconds."""

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None


class Choice(msgspec.Struct):
    """One choice of a request."""

    prompt: int
    index: int
    state: str
    finish_reason: str | None = None
    times_ms: ChoiceTimes | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    steps: int | None = None
    prefill_chunks: int | None = None
    preemptions: int | None = None
    drafts: list[Drafts] = []


class RequestRecord(msgspec.Struct):
    """What became of a request."""

    id: str
    state: str
    endpoint: str
    model: str
    started_at: float
    """Unix time in seconds."""
    times_ms: Times
    status: int | None = None
    error: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    time_to_first_token_ms: float | None = None
    steps: int | None = None
    prefill_chunks: int | None = None
    preemptions: int | None = None
    waited_again_ms: float | None = None
    drafts: list[Drafts] = []
    restarts: list[float] = []
    num_choices: int = 0
    choices: list[Choice] = []

    @property
    def is_running(self) -> bool:
        return self.state == "running"


class RequestList(msgspec.Struct):
    """The last requests, the newest first."""

    data: list[RequestRecord]
