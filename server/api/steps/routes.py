"""GET /v1/steps."""

from fastapi import APIRouter, Request

from server.api.dialect import Dialect
from server.api.openai.pages import query_of
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.api.steps.objects import KVCacheBlocks, StepList, StepObject, StepsQuery
from server.engine.client import EngineClient, EngineUnavailableError
from server.engine.step_log import DoneStep
from server.errors import InvalidRequestError

router = APIRouter(tags=["Operations"])


@router.get("/v1/steps", response_model=StepList, responses=documented_errors(400, 401, 500))
async def steps(request: Request, services: ServicesDep) -> StepList:
    """What the engine did in its last 240 steps, and what its KV cache holds now: counts, of all keys together."""
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
