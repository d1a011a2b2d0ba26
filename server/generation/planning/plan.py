"""What becomes of a request: all that the engine and the answer need to know."""

from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.contract import Verification
from scheduler.interface import EngineRequest
from server.generation.notices import Notice
from server.generation.output_formats import Reading


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the server makes of the engine's tokens."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    eos_token_ids: tuple[int, ...] = ()
    """Those that end the output by the model's own habit, not by `stop_token_ids` of the request."""
    reports_tokens: bool = False
    """Whether events bring the tokens beside the text."""
    reading: Reading | None = None
    """None: all of it is text."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated request: one engine request for each prompt, in the order of the prompts."""

    id: str
    """Of the answer; the ids of its requests begin with it."""
    model: str
    """As the client named it."""
    requests: tuple[EngineRequest, ...]
    options: OutputOptions
    n: int
    """Choices of each request."""
    seed: int
    """As the client gave it, or drawn; prompt i was given seed + i if it was drawn, so that they differ."""
    seed_drawn: bool
    stream: bool = False
    at_a_time: int | None = None
    """The most requests of it that the engine has at a time; None: all, or none if there is no room for all."""
    is_bounded: bool = True
    """Whether somebody has said how long answers may be; else it is as long as the context is."""
    notices: Sequence[Notice] = ()
    """What was left out or changed."""

    def seed_of(self, prompt: int) -> int:
        """With this seed, the prompt alone gives the same answer."""
        return self.seed + prompt if self.seed_drawn else self.seed

    @property
    def verification(self) -> Verification:
        """How drafts are verified; all but `match` may give other answers than without speculation."""
        speculation = self.requests[0].speculation
        return "match" if speculation is None else speculation.verify
