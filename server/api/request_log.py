"""GET /v1/requests and /v1/requests/{id}: what became of a key's last requests."""

from collections.abc import Iterable
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field

from scheduler.history import ChoiceHistory, MethodDrafts
from server.api.dialect import Dialect
from server.api.openai.objects import ResponseModel
from server.api.openai.pages import ListQuery, query_of, select
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.errors import NotFoundError, shorten
from server.http.middleware import record_of
from server.telemetry.metrics import EndReason
from server.telemetry.recent_requests import timeline_of
from server.telemetry.timeline import ChoiceTimeline, RequestTimeline

_WAITED_AGAIN = "Time in the queue after preemptions; included in the times above."
_CHUNKS = "Steps that computed a chunk of a prompt, or recomputed preempted tokens, up to the next token."
_PREEMPTIONS = "Times that a choice was preempted: put back into the queue to make room for others."
_RESTARTS = "When its engine died and the next one continued it, as Unix times in seconds."


class DraftCounts(ResponseModel):
    """Draft tokens of one speculation method."""

    method: str = Field(description="As in `speculation`; with `auto`, each method that it used.")
    accepted_tokens: int = Field(description="Draft tokens that became output.")
    rejected_tokens: int = Field(description="Draft tokens that were rejected.")


class RequestTimes(ResponseModel):
    """Consecutive phases in milliseconds, which add up to `total`. Phases that were not reached are null."""

    before: float | None = Field(
        description="Until the engine had it: reading, checking and planning; after a restart, all time before it too."
    )
    queue: float | None = Field(description="Until the first choice left the engine's queue.")
    prefill: float | None = Field(description="From there until the first token, or until the end if there is none.")
    decode: float | None = Field(description="From the first token until the last choice ended.")
    after: float | None = Field(description="Until the answer was sent.")
    total: float = Field(description="From the request's arrival to the end of its answer, or until now.")


class ChoiceTimes(ResponseModel):
    """Phases of one choice in the engine, in milliseconds."""

    queue: float = Field(description="Until it left the queue.")
    prefill: float | None = Field(description="From there until its first token; null if it never left the queue.")
    decode: float | None = Field(description="From its first token until its end; null without a token.")


class ChoiceRecord(ResponseModel):
    """One choice of a request. Values that no engine has reported are null."""

    prompt: int = Field(description="Index of the prompt that it answers.")
    index: int = Field(description="Its index among the prompt's choices.")
    state: Literal["waiting", "prefill", "decode", "ended", "unknown"] = Field(
        description="`waiting`: in the queue; `unknown`: no engine has it now, its engine died, or none was asked."
    )
    finish_reason: EndReason | None = Field(
        description="Null while it runs. `abort`: cancelled; `error` and `timeout` are the whole request's."
    )
    times_ms: ChoiceTimes | None = Field(description="Its times.")
    cached_tokens: int | None = Field(description="Tokens of its prompt that were in the prefix cache.")
    output_tokens: int | None = Field(
        description="Tokens computed since the engine's last restart: more than in the answer if that was cut off."
    )
    steps: int | None = Field(description="Engine steps that computed something for it.")
    prefill_chunks: int | None = Field(description=_CHUNKS)
    preemptions: int | None = Field(description=_PREEMPTIONS)
    waited_again_ms: float | None = Field(description=_WAITED_AGAIN)
    drafts: list[DraftCounts] = Field(description="By method; empty without speculation.")
    restarts: list[float] = Field(description=_RESTARTS)


class RequestObject(ResponseModel):
    """Response schema for GET /v1/requests/{id}. It has no text of the request."""

    id: str = Field(description="The request's id: its `x-request-id` header.")
    object: Literal["request"] = Field("request", description="Always this.")
    answer_id: str = Field(description="The answer's id.")
    state: Literal["running", "ended"] = Field(description="Whether more may come.")
    endpoint: str = Field(description="The path.")
    model: str = Field(description="The model.")
    started_at: float = Field(description="Unix time in seconds.")
    status: int | None = Field(
        description="HTTP status of the response or of the error that ended a stream; 499: the client disconnected. "
        "Null before the answer."
    )
    error: str | None = Field(description="The kind of error, as in the log; null without an error.")
    input_tokens: int = Field(description="Tokens of all prompts.")
    cached_tokens: int = Field(description="Prompt tokens that were in the prefix cache.")
    output_tokens: int = Field(description="Tokens of the answer so far.")
    time_to_first_token_ms: float | None = Field(description="Null until there is a token.")
    times_ms: RequestTimes = Field(description="Time in each phase.")
    steps: int | None = Field(description="Engine steps that computed something, summed over the choices.")
    prefill_chunks: int | None = Field(description=_CHUNKS)
    preemptions: int | None = Field(description=_PREEMPTIONS)
    waited_again_ms: float | None = Field(description=_WAITED_AGAIN)
    drafts: list[DraftCounts] = Field(description="By method; empty without speculation.")
    restarts: list[float] = Field(description=_RESTARTS)
    num_choices: int = Field(description="Choices that the engine has accepted.")
    choices: list[ChoiceRecord] = Field(description="The first 32 choices.")


class RequestList(ResponseModel):
    """Response schema for GET /v1/requests: a page of requests."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[RequestObject] = Field(
        description="The newest first, unless the query says otherwise. In running requests, values that only the "
        "engine knows are null: a list does not ask it."
    )
    first_id: str | None = Field(description="Id of the first request on the page.")
    last_id: str | None = Field(description="Id of the last request on the page, for `after`.")
    has_more: bool = Field(description="Whether there is another page.")


router = APIRouter(tags=["Usage"])


@router.get("/v1/requests", response_model=RequestList, responses=documented_errors(400, 401, 500))
async def last(request: Request, services: ServicesDep) -> RequestList:
    """The key's running and most recent requests, a page at a time. Lines of batches are not included."""
    asked = query_of(ListQuery, request)
    of_client = services.timelines.of_client(record_of(request).client)
    chosen, has_more = select(of_client, asked, lambda one: (one.request_id, one.answer_id))
    told = [object_of(timeline_of(one)) for one in chosen]
    return RequestList(
        data=told,
        first_id=told[0].id if told else None,
        last_id=told[-1].id if told else None,
        has_more=has_more,
    )


@router.get("/v1/requests/{request_id}", response_model=RequestObject, responses=documented_errors(401, 404, 500))
async def explain(request_id: str, request: Request, services: ServicesDep) -> RequestObject:
    """A running or recent request of the key, by its `x-request-id` or its answer's id."""
    found = await services.timelines.find(record_of(request).client, request_id)
    if found is None:
        message = f"No such request, or it was too long ago: {shorten(request_id, 128)}"
        raise NotFoundError(message, param="id", code="not_found")
    return object_of(found)


def object_of(timeline: RequestTimeline) -> RequestObject:
    """The response for a request's timeline."""
    work = timeline.work
    return RequestObject(
        id=timeline.request_id,
        answer_id=timeline.answer_id,
        state="ended" if timeline.has_ended else "running",
        endpoint=timeline.endpoint,
        model=timeline.model,
        started_at=round(timeline.started_unix, 3),
        status=timeline.status,
        error=timeline.error,
        input_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        output_tokens=timeline.output_tokens,
        time_to_first_token_ms=_ms_or_none(timeline.time_to_first_token_s),
        times_ms=_times_of(timeline),
        steps=None if work is None else work.steps,
        prefill_chunks=None if work is None else work.prefill_steps,
        preemptions=None if work is None else work.preemptions,
        waited_again_ms=None if work is None else _ms(work.waited_again_s),
        drafts=[] if work is None else _drafts_of(work.drafts),
        restarts=_unix(timeline.restarts, timeline),
        num_choices=timeline.num_choices,
        choices=[_choice_of(choice, timeline) for choice in timeline.choices],
    )


def _times_of(timeline: RequestTimeline) -> RequestTimes:
    work = timeline.work
    return RequestTimes(
        before=None if work is None else _ms(work.arrived_at - timeline.started_at),
        queue=None if work is None else _ms(work.queue_s),
        prefill=None if work is None else _ms_or_none(work.prefill_s),
        decode=None if work is None else _ms_or_none(work.decode_s),
        after=None if work is None else _ms(timeline.as_of - work.ended_at),
        total=_ms(timeline.as_of - timeline.started_at),
    )


def _choice_of(choice: ChoiceTimeline, timeline: RequestTimeline) -> ChoiceRecord:
    history = choice.history
    return ChoiceRecord(
        prompt=choice.prompt,
        index=choice.choice,
        state=_state_of(choice, timeline),
        finish_reason=choice.finish_reason,
        times_ms=None if history is None else _choice_times_of(history),
        cached_tokens=None if history is None else history.cached_tokens,
        output_tokens=None if history is None else history.output_tokens,
        steps=None if history is None else history.steps,
        prefill_chunks=None if history is None else history.prefill_steps,
        preemptions=None if history is None else history.preemptions,
        waited_again_ms=None if history is None else _ms(history.waited_again_s),
        drafts=[] if history is None else _drafts_of(history.drafts),
        restarts=_unix(choice.restarts, timeline),
    )


def _state_of(
    choice: ChoiceTimeline, timeline: RequestTimeline
) -> Literal["waiting", "prefill", "decode", "ended", "unknown"]:
    history = choice.history
    if timeline.has_ended or choice.finish_reason is not None:
        return "ended"
    if history is None:
        return "unknown"
    if history.has_ended:
        return "ended"
    if history.is_waiting:
        return "waiting"
    return "prefill" if history.first_token_at is None else "decode"


def _choice_times_of(history: ChoiceHistory) -> ChoiceTimes:
    return ChoiceTimes(
        queue=_ms(history.queue_s), prefill=_ms_or_none(history.prefill_s), decode=_ms_or_none(history.decode_s)
    )


def _drafts_of(drafts: Iterable[MethodDrafts]) -> list[DraftCounts]:
    return [
        DraftCounts(method=one.method, accepted_tokens=one.accepted, rejected_tokens=one.rejected) for one in drafts
    ]


def _unix(times: Iterable[float], timeline: RequestTimeline) -> list[float]:
    return [round(timeline.unix(at), 3) for at in times]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _ms_or_none(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)


DIALECT = Dialect(router)
