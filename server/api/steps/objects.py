"""What a request for the engine's steps asks, and what it gets."""

from typing import Literal

from pydantic import Field

from server.api.openai.objects import ResponseModel
from server.api.openai.pages import Query
from server.engine.step_log import MOST_STEPS


class StepsQuery(Query):
    """Which steps."""

    after: int = Field(0, ge=0, description="Those after the one of this number.")
    limit: int = Field(MOST_STEPS, ge=1, le=MOST_STEPS, description="At most so many, the last ones.")


class StepObject(ResponseModel):
    """One step of the engine, of everybody's requests together."""

    object: Literal["engine.step"] = Field("engine.step", description="Always this.")
    number: int = Field(description="The first since the server's start is 1; a restart of the engine changes nothing.")
    ended_at: float = Field(description="When the server heard of its results: Unix time in seconds.")
    duration_ms: float = Field(
        description="From its plan to its results; where it was launched while the one before was computed, from that "
        "one's results."
    )
    prompt_tokens: int = Field(
        description="Computed of prompts, and of what was preempted; what the prefix cache had is left out."
    )
    decode_tokens: int = Field(
        description="Computed of answers: one for each choice that has begun, for each beam and each guide."
    )
    draft_tokens: int = Field(description="Verified beside these.")
    accepted_draft_tokens: int = Field(
        description="Of these, accepted by the model, each a token more than without speculation. An answer that ends "
        "within them has only some."
    )
    running: int = Field(description="Choices in the engine after it, lines of batches included.")
    waiting: int = Field(description="Choices in its queue after it.")


class KVCacheBlocks(ResponseModel):
    """The KV cache now. Its blocks are held, cached or free."""

    block_size: int = Field(description="Tokens in a block.")
    total_blocks: int = Field(description="All of them.")
    held_blocks: int = Field(description="By running choices; one that several share counts once.")
    cached_blocks: int = Field(description="In the prefix cache alone: they make way when the free ones are used up.")
    free_blocks: int = Field(description="All others.")


class StepList(ResponseModel):
    """The last steps, the oldest first."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[StepObject] = Field(description="The steps.")
    last_step: int = Field(description="The number of the last one: `after` of the next request. 0 before the first.")
    kv_cache: KVCacheBlocks | None = Field(description="Null until the engine has been ready.")
