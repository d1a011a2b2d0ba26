"""GET /v1/steps: the engine's last steps and its KV cache."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field

from server.api.dialect import Dialect
from server.api.openai.objects import ResponseModel
from server.api.openai.pages import Query, query_of
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.engine.client import EngineClient, EngineUnavailableError
from server.engine.step_log import MOST_STEPS, DoneStep
from server.errors import InvalidRequestError


class StepsQuery(Query):
    """Query of GET /v1/steps."""

    after: int = Field(0, ge=0, description="Return the steps after the step with this number.")
    limit: int = Field(MOST_STEPS, ge=1, le=MOST_STEPS, description="The most steps to return; the last ones win.")


class StepObject(ResponseModel):
    """One step of the engine, with the requests of all keys."""

    object: Literal["engine.step"] = Field("engine.step", description="Always this.")
    number: int = Field(description="Counts from 1 since the server's start; engine restarts do not reset it.")
    ended_at: float = Field(description="When the server received its results: Unix time in seconds.")
    duration_ms: float = Field(
        description="From its plan to its results; from the previous step's results if it was launched before them."
    )
    prompt_tokens: int = Field(
        description="Prompt tokens computed, including recomputed preempted tokens, without prefix-cache hits."
    )
    decode_tokens: int = Field(
        description="Tokens computed for answers: one for each choice that has begun, each beam and each guide."
    )
    draft_tokens: int = Field(description="Draft tokens verified, in addition to `decode_tokens`.")
    accepted_draft_tokens: int = Field(
        description="Draft tokens that the model accepted, each a token more than without speculation. An answer that "
        "ends within them uses only some."
    )
    running: int = Field(description="Choices running after the step, lines of batches included.")
    waiting: int = Field(description="Choices in the queue after the step.")


class KVCacheBlocks(ResponseModel):
    """The current KV cache. Each block is held, cached or free."""

    block_size: int = Field(description="Tokens in a block.")
    total_blocks: int = Field(description="All blocks.")
    held_blocks: int = Field(description="Blocks of running choices; a shared block counts once.")
    cached_blocks: int = Field(description="Blocks in the prefix cache only, evicted when free blocks run out.")
    free_blocks: int = Field(description="All other blocks.")


class StepList(ResponseModel):
    """Response schema for GET /v1/steps."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[StepObject] = Field(description="The steps, oldest first.")
    last_step: int = Field(description="Number of the last step, for `after` in the next request; 0 before the first.")
    kv_cache: KVCacheBlocks | None = Field(description="Null until the engine has been ready.")


router = APIRouter(tags=["Operations"])


@router.get("/v1/steps", response_model=StepList, responses=documented_errors(400, 401, 500))
async def steps(request: Request, services: ServicesDep) -> StepList:
    """Token counts of the engine's last 240 steps, and its current KV cache, over all keys."""
    asked, log = query_of(StepsQuery, request), services.engine.steps
    if asked.after > log.num_steps:
        message = f"Invalid 'after': there has been no step {asked.after}, the last one is {log.num_steps}."
        raise InvalidRequestError(message, param="after", code="invalid_value")
    return StepList(
        data=[_object_of(step) for step in log.since(asked.after)[-asked.limit :]],
        last_step=log.num_steps,
        kv_cache=_kv_cache_of(services.engine),
    )


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
    held, cached = engine.stats.kv_held_blocks, engine.stats.kv_cached_blocks
    return KVCacheBlocks(
        block_size=info.block_size,
        total_blocks=info.num_blocks,
        held_blocks=held,
        cached_blocks=cached,
        free_blocks=info.num_blocks - held - cached,
    )


DIALECT = Dialect(router)
