"""The models that the settings name, as they lie on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from model_runner.models.repository import ModelFolder, ModelNotFoundError, resolve_heads, resolve_model
from server.config import Settings


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The served model, what helps to guess its tokens ahead, and what its scores are compared with."""

    model: ModelFolder
    draft_model: Path | None
    heads: tuple[Path, ...]
    """Those that the settings name, else those that come with the model."""
    aux_model: ModelFolder | None = None


def find_checkpoints(settings: Settings, console: Console) -> Checkpoints:
    """Find all of them; what is used for the first time is converted or downloaded. Raises ModelNotFoundError."""
    model = resolve_model(settings.model, console)
    with _setting("draft_model"):
        draft = None if settings.draft_model is None else resolve_model(settings.draft_model, console).path
    with _setting("heads"):
        named = tuple(resolve_heads(name, console) for name in settings.heads)
    with _setting("aux_model"):
        aux = None if settings.aux_model is None else resolve_model(settings.aux_model, console)
    return Checkpoints(model, draft, named or model.heads, aux)


@contextmanager
def _setting(name: str) -> Iterator[None]:
    """Errors say which setting is to blame; without a name it is the model."""
    try:
        yield
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{name}: {error}") from error
