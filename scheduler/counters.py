"""What the scheduler counts."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.interface import STEP_TOKENS


@dataclass(slots=True)
class Counters:
    """Totals since the start, by their names in EngineStats."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    steps_done: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_s: float = 0.0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """A step that computes so many tokens."""
        self.steps += 1
        self.scheduled_tokens += num_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def count_result(self, prefills: Sequence[int], num_decoding: int) -> None:
        """A step's result is in: so many tokens of each choice within its prompt, and one of each that is beyond."""
        self.steps_done += 1
        self.prefill_tokens += sum(prefills)
        self.decode_tokens += num_decoding

    def totals(self) -> dict[str, Any]:
        """All of them by their names. Asked for after every step, for which `dataclasses.asdict` takes too long."""
        return {name: getattr(self, name) for name in self.__slots__} | {"steps_by_tokens": (*self.steps_by_tokens,)}
