"""Followers of requests."""

from dataclasses import dataclass, field

from scheduler.interface import ChoiceHistory


@dataclass
class Recorded:
    """Records all notifications."""

    histories: list[tuple[int, ChoiceHistory | None]] = field(default_factory=list)
    num_interruptions: int = 0

    def ended(self, choice: int, history: ChoiceHistory | None) -> None:
        self.histories.append((choice, history))

    def interrupted(self) -> None:
        self.num_interruptions += 1
