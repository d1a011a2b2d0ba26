"""A whole answer, from the events of its choices."""

from dataclasses import dataclass, field

from scheduler.interface import BeamScore
from server.generation.events import ChoiceEnd, FinishedBy, OutputToken, TextDelta
from server.generation.run import Run


@dataclass(slots=True)
class WholeChoice:
    """A choice that has ended."""

    text: str = ""
    tokens: list[OutputToken] = field(default_factory=list)
    """Only if they are to be reported."""
    finish_reason: FinishedBy = "stop"
    stop_reason: str | int | None = None
    beam: BeamScore | None = None


async def collect(run: Run) -> list[WholeChoice]:
    """All choices in order, when all of them have ended. Raises what `Run.take` does."""
    choices = [WholeChoice() for _ in range(len(run.prompts) * run.plan.n)]
    texts: list[list[str]] = [[] for _ in choices]
    while await run.wait():
        for event in run.take():
            match event:
                case TextDelta():
                    texts[event.choice].append(event.text)
                    choices[event.choice].tokens += event.tokens
                case ChoiceEnd():
                    choice = choices[event.choice]
                    choice.finish_reason, choice.stop_reason = event.reason, event.stop_reason
                    choice.beam = event.beam
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return choices
