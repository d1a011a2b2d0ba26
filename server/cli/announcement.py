"""The lines that a server prints at its start: its address, its models and what they can do."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from model_runner.hub.repository import cache_folder
from model_runner.runner_interface import RunnerInfo
from server import __version__
from server.assembly import ModelOnEngine
from server.config import Settings
from server.models.hosted_model import Phase

if TYPE_CHECKING:
    from server.api.model_services import ModelServices
    from server.engine.kv_publisher import KVPublisher


@dataclass(frozen=True, slots=True)
class Milestones:
    """Seconds from the start of the command until each part was ready."""

    model_found: float
    http_ready: float
    files_hashed: float
    engine_ready: float
    of_engine: tuple[tuple[str, float], ...]
    """Seconds of each stage of the engine's start, by name."""

    def __str__(self) -> str:
        http = self.http_ready - self.model_found
        files = self.files_hashed - self.model_found
        engine = self.engine_ready - self.model_found
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.of_engine)
        return (
            f"{max(self.files_hashed, self.engine_ready):.1f} s (model found in {self.model_found:.1f} s; then, side "
            f"by side, HTTP and tokenizer in {http:.1f} s, files hashed in {files:.1f} s, "
            f"engine in {engine:.1f} s: {parts})"
        )


class Announcer:
    """Prints lines, each with a title."""

    def __init__(self, console: Console, started: float) -> None:
        """`started` is the time.perf_counter() at which the command began."""
        self._console = console
        self._started = started

    @property
    def elapsed(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self._started

    def say(self, title: str, text: str) -> None:
        """Print a line in one write, because the engine's process writes to the same output."""
        self._console.print(Text.assemble((f"{title:<16}", "bold"), text))

    def say_address(self, address: str, *, has_page: bool) -> None:
        """Where the server is."""
        self.say(f"Samewise {__version__}", f"{address}/v1")
        if has_page:
            self.say("Page", f"{address}/")

    def say_model(self, model: ModelOnEngine, served: "ModelServices") -> None:
        """Abilities and sizes of the only model of a server."""
        info, settings, names = model.engine.info, model.settings, ", ".join(served.model.names)
        self.say("Model", f"{names}, {info.dtype} weights and {info.activation_type} rows on {info.device}")
        self.say("Abilities", str(served.model.abilities))
        if settings.chat_template is not None:
            self.say("Chat template", str(settings.chat_template))
        self.say("Context", _describe_context(info))
        if model.checkpoints.aux_model is not None:
            self.say("Auxiliary model", model.checkpoints.aux_model.name)
        self.say("Speculation", describe_speculation(settings, info.speculation_methods))
        if settings.learn:
            self.say("Learning", f"heads for speculation, kept in {cache_folder() / 'learnt'}")

    def say_models(self, models: Sequence[ModelOnEngine]) -> None:
        """The models of a server with several."""
        for number, model in enumerate(models):
            names = ", ".join(model.settings.served_model_name)
            self.say("" if number else "Models", f"{names}: {_describe_state(model)}")

    def say_publisher(self, publisher: "KVPublisher | None") -> None:
        """Where the server publishes its KV events."""
        if publisher is not None:
            again = "" if publisher.replay is None else f", again at {publisher.replay}"
            self.say("KV events", publisher.endpoint + again)


def _describe_state(model: ModelOnEngine) -> str:
    """Whether a model is loaded, its memory, and its context if that is known."""
    hosted = model.hosted
    assert hosted is not None, "the server has several models"
    size = "" if hosted.num_bytes is None else f", {hosted.num_bytes / (1 << 30):.2f} GiB"
    if hosted.phase is not Phase.LOADED:
        return f"loaded on demand{size}"
    info = model.engine.info
    return f"loaded{size}, {info.dtype} weights on {info.device}, context of {info.max_model_len:,} tokens"


def _describe_context(info: RunnerInfo) -> str:
    tokens = info.num_blocks * info.block_size
    cache = f"KV cache of {tokens:,} tokens, {tokens / info.max_model_len:.1f} full-length requests"
    return f"{info.max_model_len:,} tokens; {cache if info.has_kv_cache else 'no KV cache'}"


def describe_speculation(settings: Settings, methods: tuple[str, ...]) -> str:
    """Describe the default method, and the methods that requests can choose."""
    if not methods:
        return "none"
    from server.generation.planning.decoding_rules import SpeculationRules  # noqa: PLC0415  (the engine starts before)

    default = SpeculationRules(methods, settings.speculation).default_method
    return f"{default} by default; {', '.join(methods)}; at most {settings.num_draft_tokens} draft tokens in a step"
