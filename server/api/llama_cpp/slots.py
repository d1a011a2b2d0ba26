"""What runs, as llama.cpp's slots."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from model_runner.info import RunnerInfo
from server.api.llama_cpp.objects import LlamaSlot, NextToken
from server.api.openai.pages import Query
from server.telemetry.recent_requests import Traced, timeline_of
from server.telemetry.timeline import RequestTimeline

_IDLE = NextToken(has_next_token=False, n_remain=-1, n_decoded=0)


class SlotsQuery(Query):
    """Whether to answer at all."""

    fail_on_no_slot: Literal["0", "1", "true", "false"] = Field("0", description="Answer 503 when no slot is free.")

    @property
    def fails(self) -> bool:
        """Whether a server without a free slot answers with an error."""
        return self.fail_on_no_slot in ("1", "true")


def slots_of(followed: Sequence[Traced], info: RunnerInfo, *, is_speculative: bool) -> list[LlamaSlot]:
    """A slot for each completion that may be computed at a time; the first ones have those that run."""
    running = list(_running(followed))[: info.max_num_seqs]
    slots = []
    for number in range(info.max_num_seqs):
        timeline = running[number] if number < len(running) else None
        slots.append(
            LlamaSlot(
                id=number,
                id_task=-1,
                request_id=None if timeline is None else timeline.request_id,
                n_ctx=info.max_model_len,
                speculative=is_speculative,
                is_processing=timeline is not None,
                next_token=_IDLE if timeline is None else _next_token(timeline),
            )
        )
    return slots


def _running(followed: Sequence[Traced]) -> Iterator[RequestTimeline]:
    """The timeline of each choice that has not ended."""
    for one in followed:
        timeline = timeline_of(one)
        if not timeline.has_ended:
            yield from (timeline for choice in timeline.choices if choice.finish_reason is None)


def _next_token(timeline: RequestTimeline) -> NextToken:
    decoded = timeline.output_tokens
    of_all = timeline.max_tokens * timeline.num_choices
    return NextToken(has_next_token=True, n_remain=max(0, of_all - decoded), n_decoded=decoded)
