"""A whole answer, from the events of its choices."""

from dataclasses import dataclass, field

from scheduler.interface import BeamScore
from server.generation.events import (
    ChoiceEnd,
    Event,
    FinishedBy,
    OutputToken,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from server.generation.run import Run


@dataclass(slots=True)
class WholeCall:
    """A call of a tool."""

    id: str
    name: str
    is_custom: bool
    text: str = ""
    """Its arguments, or what a custom tool is given."""


@dataclass(slots=True)
class WholeChoice:
    """A choice that has ended."""

    text: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    """Only if they are to be reported."""
    finish_reason: FinishedBy = "stop"
    stop_reason: str | int | None = None
    beam: BeamScore | None = None


async def collect(run: Run) -> list[WholeChoice]:
    """All choices in order, when all of them have ended. Raises what `Run.take` does."""
    building = [_Building() for _ in range(len(run.prompts) * run.plan.n)]
    while await run.wait():
        for event in run.take():
            building[event.choice].add(event)
    return [one.built() for one in building]


class _Building:
    """A choice and the pieces of its texts."""

    def __init__(self) -> None:
        self._choice = WholeChoice()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[list[str]] = []

    def add(self, event: Event) -> None:
        """Take in the next event."""
        choice = self._choice
        if isinstance(event, ChoiceEnd):
            choice.finish_reason, choice.stop_reason, choice.beam = event.reason, event.stop_reason, event.beam
            return
        choice.tokens += event.tokens
        match event:
            case TextDelta():
                self._text.append(event.text)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallBegin():
                choice.calls.append(WholeCall(event.id, event.name, event.is_custom))
                self._calls.append([])
            case ToolCallDelta():
                self._calls[event.call].append(event.text)

    def built(self) -> WholeChoice:
        """The choice, when it has ended."""
        self._choice.text = "".join(self._text)
        self._choice.reasoning = "".join(self._reasoning)
        for call, pieces in zip(self._choice.calls, self._calls, strict=True):
            call.text = "".join(pieces)
        return self._choice
