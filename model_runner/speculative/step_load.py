"""What a step computes, as far as its time depends on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes apart from drafts that compete."""

    rows: int
    context: int
    """Positions that all rows together attend to."""
    num_ready: int
    """Choices that get a token."""

    @property
    def context_of_row(self) -> float:
        """Mean over the rows."""
        return self.context / max(self.rows, 1)

    @property
    def only_decodes(self) -> bool:
        """Whether there is no prompt in it. A choice that has a guide takes two rows."""
        return 0 < self.rows <= 2 * self.num_ready

    def plus(self, num_draft: int) -> "StepLoad":
        """With draft rows that are computed in any case."""
        return StepLoad(self.rows + num_draft, self.context + int(self.context_of_row * num_draft), self.num_ready)
