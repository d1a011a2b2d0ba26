"""What became of requests: when, in how many steps, why. Never what they said."""

import time
from dataclasses import dataclass, field

from scheduler.history import ChoiceHistory


@dataclass(slots=True)
class PromptTimeline:
    """One prompt of a request. Implements the engine's Follower. Times are those of time.perf_counter."""

    histories: dict[int, ChoiceHistory | None] = field(default_factory=dict)
    """Of choices that have ended, by index; None where no engine has told."""
    interruptions: list[float] = field(default_factory=list)
    """When an engine died with it. What it had done by then is told by nobody."""

    def ended(self, choice: int, history: ChoiceHistory | None) -> None:
        """See Follower."""
        self.histories[choice] = history

    def interrupted(self) -> None:
        """See Follower."""
        self.interruptions.append(time.perf_counter())
