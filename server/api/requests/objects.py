"""What is told of a request."""

from typing import Literal

from pydantic import Field

from server.api.openai.objects import ResponseModel
from server.telemetry.metrics import EndReason

_WAITED_AGAIN = "In the queue again, after preemptions: a part of the times above."
_CHUNKS = "Steps that computed a chunk of a prompt, or of what was preempted, up to the next token."
_PREEMPTIONS = "Times that a choice went back into the queue, to make room for others."
_RESTARTS = "When an engine died with it and it went on in the next one, as Unix times in seconds."


class DraftCounts(ResponseModel):
    """What one method of speculation drafted."""

    method: str = Field(description="As in `speculation`; of `auto`, the methods that it asked.")
    accepted_tokens: int = Field(description="Draft tokens that became output.")
    rejected_tokens: int = Field(description="Draft tokens that were verified in vain.")


class RequestTimes(ResponseModel):
    """In milliseconds, one after the other: together they are `total`. Null is what there was not, or not yet."""

    before: float | None = Field(
        description="Until the engine had it: reading, checking and planning; after a restart, also what was before it."
    )
    queue: float | None = Field(description="Until the first choice left the engine's queue.")
    prefill: float | None = Field(description="From there until the first token, or the end where there is none.")
    decode: float | None = Field(description="From the first token until the last choice ended.")
    after: float | None = Field(description="Until the answer was sent.")
    total: float = Field(description="From the request's arrival to the end of its answer, or until now.")


class ChoiceTimes(ResponseModel):
    """In milliseconds, in the engine, of one choice."""

    queue: float = Field(description="Until it left the queue.")
    prefill: float | None = Field(description="From there until its first token; null if it never left the queue.")
    decode: float | None = Field(description="From its first token until its end; null without one.")


class ChoiceRecord(ResponseModel):
    """One choice. What no engine has told is null."""

    prompt: int = Field(description="Index of the prompt that it answers.")
    index: int = Field(description="Its own, among the prompt's choices.")
    state: Literal["waiting", "prefill", "decode", "ended", "unknown"] = Field(
        description="`waiting`: in the queue; `unknown`: no engine has it now, or it died with it, or none was asked."
    )
    finish_reason: EndReason | None = Field(
        description="Null while it runs. `abort`: nobody wanted it any more; `error`, `timeout`: of the whole request."
    )
    times_ms: ChoiceTimes | None = Field(description="Its times.")
    cached_tokens: int | None = Field(description="Of its prompt, found in the prefix cache.")
    output_tokens: int | None = Field(
        description="That the engine computed since its last restart: more than the answer has where that was cut off."
    )
    steps: int | None = Field(description="Steps of the engine that computed something for it.")
    prefill_chunks: int | None = Field(description=_CHUNKS)
    preemptions: int | None = Field(description=_PREEMPTIONS)
    waited_again_ms: float | None = Field(description=_WAITED_AGAIN)
    drafts: list[DraftCounts] = Field(description="By method; empty without speculation.")
    restarts: list[float] = Field(description=_RESTARTS)


class RequestObject(ResponseModel):
    """What became of a request. It has no text."""

    id: str = Field(description="That of the header `x-request-id`.")
    object: Literal["request"] = Field("request", description="Always this.")
    answer_id: str = Field(description="The answer's own.")
    state: Literal["running", "ended"] = Field(description="Whether more may come.")
    endpoint: str = Field(description="The path.")
    model: str = Field(description="The model.")
    started_at: float = Field(description="Unix time in seconds.")
    status: int | None = Field(
        description="Of the response, or of the error that ended a stream; 499: the client left before. Null before."
    )
    error: str | None = Field(description="The kind of error, as the log names it; null without one.")
    input_tokens: int = Field(description="Of all prompts.")
    cached_tokens: int = Field(description="Of these, found in the prefix cache.")
    output_tokens: int = Field(description="Of the answer, so far.")
    time_to_first_token_ms: float | None = Field(description="Null before, or without any.")
    times_ms: RequestTimes = Field(description="Where the time went.")
    steps: int | None = Field(description="Steps that computed something, of each choice.")
    prefill_chunks: int | None = Field(description=_CHUNKS)
    preemptions: int | None = Field(description=_PREEMPTIONS)
    waited_again_ms: float | None = Field(description=_WAITED_AGAIN)
    drafts: list[DraftCounts] = Field(description="By method; empty without speculation.")
    restarts: list[float] = Field(description=_RESTARTS)
    num_choices: int = Field(description="That the engine has taken.")
    choices: list[ChoiceRecord] = Field(description="The first 32.")


class RequestList(ResponseModel):
    """A page of requests."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[RequestObject] = Field(
        description="The newest first, unless the query says otherwise. Of those that run, what only the engine knows "
        "is null: it is not asked for a list."
    )
    first_id: str | None = Field(description="Of the page.")
    last_id: str | None = Field(description="Of the page, for `after`.")
    has_more: bool = Field(description="Whether there are others behind it.")
