"""GET /v1/steps: the engine's last steps and its KV cache."""

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.openai.pages import Query, query_of
from server.api.openapi import answers
from server.api.services import OF_MODEL, ModelDep
from server.engine.client import EngineClient, EngineUnavailableError
from server.engine.step_log import MOST_STEPS, DoneStep
from server.errors import InvalidRequestError
from server.http.responses import json_response


class StepsQuery(Query):
    """Query of GET /v1/steps."""

    after: int = Field(0, ge=0, description="Return the steps after the step with this number.")
    limit: int = Field(MOST_STEPS, ge=1, le=MOST_STEPS, description="Return at most this many of the last steps.")


class StepObject(AnswerObject):
    """One step of the engine, with the requests of all keys."""

    object: Literal["engine.step"] = "engine.step"
    number: Annotated[int, doc("Counts from 1 since the server's start; engine restarts do not reset it.")]
    ended_at: Annotated[float, doc("When the server received its results: Unix time in seconds.")]
    duration_ms: Annotated[
        float, doc("From its plan to its results; from the previous step's results if it was launched before them.")
    ]
    prompt_tokens: Annotated[
        int, doc("Prompt tokens computed, including recomputed preempted tokens, without prefix-cache hits.")
    ]
    decode_tokens: Annotated[
        int, doc("Tokens computed for answers: one for each choice that has begun, each beam and each guide.")
    ]
    draft_tokens: Annotated[int, doc("Draft tokens verified, in addition to `decode_tokens`.")]
    accepted_draft_tokens: Annotated[
        int,
        doc(
            "Draft tokens that the model accepted: tokens gained by speculation. An answer that ends within them uses "
            "only some."
        ),
    ]
    running: Annotated[int, doc("Choices running after the step, lines of batches included.")]
    waiting: Annotated[int, doc("Choices in the queue after the step.")]


class KVCacheBlocks(AnswerObject):
    """The current KV cache. Each block is held, cached or free."""

    block_size: Annotated[int, doc("Tokens in a block.")]
    total_blocks: Annotated[int, doc("All blocks.")]
    held_blocks: Annotated[int, doc("Blocks of running choices; a shared block counts once.")]
    cached_blocks: Annotated[int, doc("Blocks in the prefix cache only, evicted when free blocks run out.")]
    free_blocks: Annotated[int, doc("All other blocks.")]


class StepList(AnswerObject):
    """Response schema for GET /v1/steps."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[StepObject], doc("The steps, oldest first.")]
    last_step: Annotated[int, doc("Number of the last step, for `after` in the next request; 0 before the first.")]
    kv_cache: Annotated[KVCacheBlocks | None, doc("Null until the model has been loaded once, and for encoders.")]


router = APIRouter(tags=["Operations"])


@router.get("/v1/steps", responses=answers(StepList, 400, 401, 404, 500))
async def steps(request: Request, served: ModelDep) -> Response:
    """Token counts of the engine's last 240 steps, and its current KV cache, over all keys.

    A model that is not loaded has its last steps, of all its loads, and an empty cache.
    """
    asked, log = query_of(StepsQuery, request, but=OF_MODEL), served.engine.steps
    if asked.after > log.num_steps:
        message = f"Invalid 'after': there has been no step {asked.after}, the last one is {log.num_steps}."
        raise InvalidRequestError(message, param="after", code="invalid_value")
    data = [_object_of(step) for step in log.since(asked.after)[-asked.limit :]]
    return json_response(StepList(data=data, last_step=log.num_steps, kv_cache=_kv_cache_of(served.engine)))


def _object_of(step: DoneStep) -> StepObject:
    return StepObject(
        number=step.number,
        ended_at=round(step.ended_unix, 4),
        duration_ms=round(1000 * step.seconds, 3),
        prompt_tokens=step.prefill_tokens,
        decode_tokens=step.decode_tokens,
        draft_tokens=step.draft_tokens,
        accepted_draft_tokens=step.accepted_tokens,
        running=step.num_running,
        waiting=step.num_waiting,
    )


def _kv_cache_of(engine: EngineClient) -> KVCacheBlocks | None:
    try:
        info = engine.info
    except EngineUnavailableError:
        return None
    if not info.has_kv_cache:
        return None
    held, cached = engine.stats.kv_held_blocks, engine.stats.kv_cached_blocks
    return KVCacheBlocks(
        block_size=info.block_size,
        total_blocks=info.num_blocks,
        held_blocks=held,
        cached_blocks=cached,
        free_blocks=info.num_blocks - held - cached,
    )


DIALECT = Dialect(router)
