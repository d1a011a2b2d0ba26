"""The served model as Ollama's clients see it: its names, its abilities and its files."""

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.description import Description, describe
from server.api.model_services import ModelServices
from server.api.services import ServedModels
from server.errors import NotFoundError, shorten
from server.generation.parsing.choose import FULL_OUTPUT_FORMATS
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

_LATEST = ":latest"
_UNKNOWN = Description(format="unknown", architecture="unknown", parameters=0, size=0)


def meant_name(names: Collection[str], asked: str) -> str:
    """The one of the served names that a request means: case does not matter, and the tag may be implied.

    Raises NotFoundError, in Ollama's words, if it means none.
    """
    if asked in names:
        return asked
    found = next((name for name in names if _compared(name) == _compared(asked)), None)
    if found is None:
        message = f"model '{shorten(asked)}' not found"
        raise NotFoundError(message, param="model", code="model_not_found")
    return found


def name_for(model: ServedModel, asked: str) -> str:
    """The name of this model that a request means, or the request's own if the model takes any name.

    Raises NotFoundError, in Ollama's words, if it means another model.
    """
    try:
        return meant_name(model.names, asked)
    except NotFoundError:
        if model.takes_any_name:
            return asked
        raise


def find_model(models: ServedModels, asked: str) -> ModelServices:
    """The model that a request means, as `meant_name` has it. Raises NotFoundError."""
    return models.find(meant_name(models.names, asked))


def listed_name(name: str) -> str:
    """A served name in lists of models: with a tag, since clients add one to names without before they look them up."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def _compared(name: str) -> str:
    return listed_name(name).lower()


def thinks(model: ServedModel) -> bool:
    """Whether the model can think before it answers."""
    return model.formats.reasoning is not None or model.formats.tool_format in FULL_OUTPUT_FORMATS


def capabilities(model: ServedModel, tokenizer: Tokenizer, *, takes_images: bool) -> Sequence[str]:
    """The abilities of the model, in Ollama's words."""
    generates = model.abilities.generates
    embedding = model.abilities.embedding
    known = {
        "completion": generates,
        "tools": generates and tokenizer.chat_template is not None,
        "insert": generates and tokenizer.fill_in is not None,
        "thinking": generates and thinks(model),
        "vision": takes_images,
        "embedding": embedding is not None and (embedding.is_trained or not generates),
    }
    return [name for name, can in known.items() if can]


@cache
def described(folder: Path) -> Description:
    """The description of a model by the heads of its files, read once; without figures if they cannot be read."""
    gguf = sorted(folder.glob("*.gguf"))
    try:
        return describe(gguf[0] if gguf else folder)
    except ModelNotFoundError:
        return _UNKNOWN
