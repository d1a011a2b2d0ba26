"""GET /v1/requests and /v1/requests/{id}: the progress and results of a key's recent requests."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameter

from scheduler.interface import ChoiceHistory, MethodDrafts
from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.openai.pages import ListQuery, query_of, select
from server.api.openapi import answers
from server.api.services import OF_MODEL, ModelsDep, ServicesDep
from server.errors import NotFoundError, shorten
from server.http.middleware import record_of
from server.http.responses import json_response
from server.telemetry.metrics import EndReason
from server.telemetry.recent_requests import timeline_of
from server.telemetry.timeline import ChoiceTimeline, RequestTimeline

_WAITED_AGAIN = "Time in the queue after preemptions; included in the times above."
_CHUNKS = "Steps that computed a chunk of a prompt, or recomputed preempted tokens, up to the next token."
_PREEMPTIONS = "Times that a choice was preempted: put back into the queue to make room for others."
_MODEL = "Extension: only requests to the model of this name."
_RESTARTS = "Unix times in seconds at which an engine died and the next one took over."


class DraftCounts(AnswerObject):
    """Draft tokens of one speculation method."""

    method: Annotated[str, doc("As in `speculation`; with `auto`, each method that it used.")]
    accepted_tokens: Annotated[int, doc("Draft tokens that became output.")]
    rejected_tokens: Annotated[int, doc("Draft tokens that were rejected.")]


class RequestTimes(AnswerObject):
    """Consecutive phases in milliseconds, which add up to `total`. Phases that were not reached are null."""

    before: Annotated[
        float | None,
        doc("Until the engine received it: reading, checking and planning; after a restart, all time before it too."),
    ]
    queue: Annotated[float | None, doc("Until the first choice left the engine's queue.")]
    prefill: Annotated[float | None, doc("From there until the first token, or until the end if there is none.")]
    decode: Annotated[float | None, doc("From the first token until the last choice ended.")]
    after: Annotated[float | None, doc("Until the answer was sent.")]
    total: Annotated[float, doc("From the request's arrival to the end of its answer, or until now.")]


class ChoiceTimes(AnswerObject):
    """Phases of one choice in the engine, in milliseconds."""

    queue: Annotated[float, doc("Until it left the queue.")]
    prefill: Annotated[float | None, doc("From there until its first token; null if it never left the queue.")]
    decode: Annotated[float | None, doc("From its first token until its end; null without a token.")]


class ChoiceRecord(AnswerObject):
    """One choice of a request. Values that no engine has reported are null."""

    prompt: Annotated[int, doc("Index of the prompt that it answers.")]
    index: Annotated[int, doc("Its index among the prompt's choices.")]
    state: Annotated[
        Literal["waiting", "prefill", "decode", "ended", "unknown"],
        doc("`waiting`: in the queue; `unknown`: no engine has it now, its engine died, or none was asked."),
    ]
    finish_reason: Annotated[
        EndReason | None, doc("Null while it runs. `abort`: cancelled; `error` and `timeout` end the whole request.")
    ]
    times_ms: Annotated[ChoiceTimes | None, doc("Its times.")]
    cached_tokens: Annotated[int | None, doc("Tokens of its prompt that were in the prefix cache.")]
    output_tokens: Annotated[
        int | None, doc("Tokens computed since the engine's last restart: more than in the answer if that was cut off.")
    ]
    steps: Annotated[int | None, doc("Engine steps that computed something for it.")]
    prefill_chunks: Annotated[int | None, doc(_CHUNKS)]
    preemptions: Annotated[int | None, doc(_PREEMPTIONS)]
    waited_again_ms: Annotated[float | None, doc(_WAITED_AGAIN)]
    drafts: Annotated[Sequence[DraftCounts], doc("By method; empty without speculation.")]
    restarts: Annotated[Sequence[float], doc(_RESTARTS)]


class RequestObject(AnswerObject):
    """Response schema for GET /v1/requests/{id}. It has no text of the request."""

    id: Annotated[str, doc("The request's id: its `x-request-id` header.")]
    object: Literal["request"] = "request"
    answer_id: Annotated[str, doc("The answer's id.")]
    state: Annotated[Literal["running", "ended"], doc("`ended`: the answer is complete or has failed.")]
    endpoint: Annotated[str, doc("The path.")]
    model: Annotated[str, doc("The model.")]
    started_at: Annotated[float, doc("Unix time in seconds.")]
    status: Annotated[
        int | None, doc("HTTP status of the response or of its stream's error; 499: the client disconnected.")
    ]
    error: Annotated[str | None, doc("The kind of error, as in the log; null without an error.")]
    input_tokens: Annotated[int, doc("Tokens of all prompts.")]
    cached_tokens: Annotated[int, doc("Prompt tokens that were in the prefix cache.")]
    output_tokens: Annotated[int, doc("Tokens of the answer so far.")]
    time_to_first_token_ms: Annotated[float | None, doc("Null until there is a token.")]
    times_ms: Annotated[RequestTimes, doc("Time in each phase.")]
    steps: Annotated[int | None, doc("Engine steps that computed something, summed over the choices.")]
    prefill_chunks: Annotated[int | None, doc(_CHUNKS)]
    preemptions: Annotated[int | None, doc(_PREEMPTIONS)]
    waited_again_ms: Annotated[float | None, doc(_WAITED_AGAIN)]
    drafts: Annotated[Sequence[DraftCounts], doc("By method; empty without speculation.")]
    restarts: Annotated[Sequence[float], doc(_RESTARTS)]
    num_choices: Annotated[int, doc("Choices that the engine has accepted.")]
    choices: Annotated[Sequence[ChoiceRecord], doc("The first 32 choices.")]


class RequestList(AnswerObject):
    """Response schema for GET /v1/requests: a page of requests."""

    object: Literal["list"] = "list"
    data: Annotated[
        Sequence[RequestObject],
        doc("Newest first by default. Values that only the engine knows are null in running requests."),
    ]
    first_id: Annotated[str | None, doc("Id of the first request on the page.")]
    last_id: Annotated[str | None, doc("Id of the last request on the page, for `after`.")]
    has_more: Annotated[bool, doc("Whether there is another page.")]


router = APIRouter(tags=["Usage"])


@router.get("/v1/requests", responses=answers(RequestList, 400, 401, 404, 500))
async def last(
    request: Request, models: ModelsDep, model: Annotated[str | None, QueryParameter(description=_MODEL)] = None
) -> Response:
    """The key's running and most recent requests, a page at a time. Lines of batches are not included."""
    asked = query_of(ListQuery, request, but=OF_MODEL)
    chosen_models = models if model is None else models.among(models.find(model).model.names)
    of_client = chosen_models.requests_of(record_of(request).client)
    chosen, has_more = select(of_client, asked, lambda one: (one.request_id, one.answer_id))
    shown = [object_of(timeline_of(one)) for one in chosen]
    first_id, last_id = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(RequestList(data=shown, first_id=first_id, last_id=last_id, has_more=has_more))


@router.get("/v1/requests/{request_id}", responses=answers(RequestObject, 401, 404, 500))
async def explain(request_id: str, request: Request, services: ServicesDep) -> Response:
    """A running or recent request of the key, by its `x-request-id` or its answer's id."""
    found = await services.models.find_request(record_of(request).client, request_id)
    if found is None:
        message = f"No such request, or it is no longer in the log: {shorten(request_id, 128)}"
        raise NotFoundError(message, param="id", code="not_found")
    return json_response(object_of(found))


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
