"""The plan of a request: its engine requests, and how to process their output."""

from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.contract import Verification
from scheduler.interface import EngineRequest
from server.generation.notices import Notice
from server.generation.output_formats import ParserConfig


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the server processes the engine's output."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    eos_token_ids: tuple[int, ...] = ()
    """The model's own EOS tokens, without the request's `stop_token_ids`."""
    reports_tokens: bool = False
    """Whether events carry tokens, too, and not only text."""
    parser: ParserConfig | None = None
    """How to parse the output; None if all of it is text."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated request: one engine request for each prompt, in the order of the prompts."""

    id: str
    """Id of the answer, and prefix of the ids of its engine requests."""
    model: str
    """The name that the client used."""
    requests: tuple[EngineRequest, ...]
    options: OutputOptions
    n: int
    """Choices per prompt."""
    seed: int
    """The client's seed, or a drawn one. With a drawn seed, prompt i gets seed + i, so that prompts differ."""
    seed_drawn: bool
    opening: str = ""
    """The tag of the reasoning that the prompt has opened, for an answer that does not separate the reasoning."""
    stream: bool = False
    at_a_time: int | None = None
    """Most engine requests in the engine at a time. None: all, or the request fails if they do not all fit."""
    is_bounded: bool = True
    """Whether the request or the model limits the output's length; otherwise only the context does."""
    template_date: str | None = None
    """The date that the chat template has shown, in ISO 8601; None: it shows none."""
    notices: Sequence[Notice] = ()
    """Ignored and changed fields."""

    def seed_of(self, prompt: int) -> int:
        """The seed with which the prompt alone gives the same answer."""
        return self.seed + prompt if self.seed_drawn else self.seed

    @property
    def verification(self) -> Verification:
        """How drafts are verified. All but `match` may change the answer compared to no speculation."""
        speculation = self.requests[0].speculation
        return "match" if speculation is None else speculation.verify
