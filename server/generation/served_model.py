"""The model that the server speaks for: its name and its defaults."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from server.generation.generation_config import GenerationDefaults, load_defaults
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one name."""

    name: str
    defaults: GenerationDefaults
    aux_model: str | None = None
    """Name of the auxiliary model."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer, name: str, aux_model: str | None = None) -> "ServedModel":
        """Raises OSError or ValueError if a file is not what it should be."""
        return cls(name, load_defaults(folder, tokenizer), aux_model)
