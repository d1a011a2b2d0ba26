"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start, by their names in EngineStats."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    steps: int = 0
    scheduled_tokens: int = 0

    def totals(self) -> dict[str, int]:
        """All of them by their names. Asked for after every step, for which `dataclasses.asdict` takes too long."""
        return {name: getattr(self, name) for name in self.__slots__}
