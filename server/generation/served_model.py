"""A served model: its names, defaults, output formats and abilities."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model_runner.images.layouts import Layout, read_layout
from model_runner.json_files import find_object
from model_runner.refusal import refused
from server.errors import InvalidRequestError, unknown_model
from server.generation.abilities import Abilities, read_abilities
from server.generation.generation_config import GenerationDefaults, load_defaults
from server.generation.notices import Notice
from server.generation.output_formats import ModelFormats
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the server runs, under one or several names."""

    name: str
    """The first of its names."""
    defaults: GenerationDefaults
    formats: ModelFormats
    aux_model: str | None = None
    """Name of the auxiliary model."""
    abilities: Abilities = field(default_factory=Abilities)
    aliases: tuple[str, ...] = ()
    """Further names by which requests may call it."""
    images: Layout | None = None
    """How images stand in its prompts; None if they cannot."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""
    folder: Path = Path()
    """The folder that it was read from."""
    model_type: str = "unknown"
    """The architecture that its config.json names."""
    is_only: bool = True
    """Whether the server has no other model."""
    takes_any_name: bool = False
    """Whether requests for any other model are its own, too."""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        tokenizer: Tokenizer,
        *names: str,
        formats: ModelFormats | None = None,
        aux_model: str | None = None,
        score_tokens: Sequence[str] = (),
        is_only: bool = True,
    ) -> "ServedModel":
        """Read a model folder. Raises OSError or ValueError if a file is invalid."""
        name, *aliases = names
        formats = formats or ModelFormats.of(tokenizer.chat_template)
        with refused(f"{folder} cannot be read", ValueError, OSError):
            abilities = read_abilities(folder, tokenizer, score_tokens)
            kind = str(find_object(folder / "config.json").get("model_type", "unknown"))
            texts = load_defaults(folder, tokenizer), formats, aux_model, abilities, tuple(aliases)
            return cls(name, *texts, read_layout(folder), folder=folder, model_type=kind, is_only=is_only)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.name, *self.aliases)

    def named(self, name: str | None, notices: list[Notice], *, needs_name: bool) -> str:
        """The name of the model in a request; if the request has no name of its, the first one, with a notice.

        Raises NotFoundError for another model's name, and InvalidRequestError if a name is needed and missing.
        """
        if name is not None:
            self.check_name(name)
            if name not in self.names:
                notices.append(Notice("model", f"There is no such model; set to '{self.name}', the only model."))
                return self.name
            return name
        if needs_name:
            message = "Missing required parameter: 'model'."
            raise InvalidRequestError(message, param="model", code="missing_required_parameter")
        which = "only" if self.is_only else "default"
        notices.append(Notice("model", f"Missing; set to '{self.name}', the {which} model."))
        return self.name

    def check_name(self, name: str) -> None:
        """Raise NotFoundError unless this is one of the model's names, or any name is its own."""
        if name not in self.names and not self.takes_any_name:
            raise unknown_model(name)
