"""A complete answer, collected from the events of its choices."""

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
class WholeText:
    """A stretch of the answer's text."""

    text: str = ""


@dataclass(slots=True)
class WholeReasoning:
    """A stretch of the model's reasoning."""

    text: str = ""


@dataclass(slots=True)
class WholeCall:
    """A tool call."""

    id: str
    name: str
    is_custom: bool
    text: str = ""
    """Its arguments, or a custom tool's input."""


WholePart = WholeText | WholeReasoning | WholeCall


@dataclass(slots=True)
class WholeChoice:
    """A complete choice."""

    parts: list[WholePart] = field(default_factory=list)
    """Parts in the order in which the model wrote them."""
    tokens: list[OutputToken] = field(default_factory=list)
    """Empty unless tokens are reported."""
    finish_reason: FinishedBy = "stop"
    stop_reason: str | int | None = None
    beam: BeamScore | None = None

    @property
    def text(self) -> str:
        """All text of the choice."""
        return "".join(part.text for part in self.parts if isinstance(part, WholeText))

    @property
    def reasoning(self) -> str:
        """All reasoning of the choice."""
        return "".join(part.text for part in self.parts if isinstance(part, WholeReasoning))

    @property
    def calls(self) -> list[WholeCall]:
        """All tool calls of the choice."""
        return [part for part in self.parts if isinstance(part, WholeCall)]


async def collect(run: Run) -> list[WholeChoice]:
    """All choices in order, once all have ended. Raises the errors of `Run.take`."""
    building = [_Building() for _ in range(len(run.prompts) * run.plan.n)]
    while await run.wait():
        for event in run.take():
            building[event.choice].add(event)
    return [one.built() for one in building]


class _Building:
    """Collects the pieces of one choice."""

    def __init__(self) -> None:
        self._choice = WholeChoice()
        self._pieces: list[list[str]] = []

    def add(self, event: Event) -> None:
        """Add the next event."""
        choice = self._choice
        if isinstance(event, ChoiceEnd):
            choice.finish_reason, choice.stop_reason, choice.beam = event.reason, event.stop_reason, event.beam
            return
        choice.tokens += event.tokens
        match event:
            case TextDelta() if event.text:
                self._add_to(WholeText, event.text)
            case ReasoningDelta() if event.text:
                self._add_to(WholeReasoning, event.text)
            case ToolCallBegin():
                self._begin(WholeCall(event.id, event.name, event.is_custom))
            case ToolCallDelta():
                self._pieces[-1].append(event.text)

    def built(self) -> WholeChoice:
        """The complete choice."""
        for part, pieces in zip(self._choice.parts, self._pieces, strict=True):
            part.text = "".join(pieces)
        return self._choice

    def _add_to(self, kind: type[WholeText | WholeReasoning], text: str) -> None:
        """Append to the last part if it is of this kind, otherwise begin a new part."""
        if not (self._choice.parts and isinstance(self._choice.parts[-1], kind)):
            self._begin(kind())
        self._pieces[-1].append(text)

    def _begin(self, part: WholePart) -> None:
        self._choice.parts.append(part)
        self._pieces.append([])
