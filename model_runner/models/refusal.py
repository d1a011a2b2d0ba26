"""Models that cannot be served: the error, and the line that says so. Imports no torch."""

import logging
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("samewise.runner")

_LONGEST_REASON = 400
"""Characters: transformers answers some models with the list of all that it knows."""
_FEW = 3


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message is one line that names it and says why."""


@contextmanager
def refused(what: str, *passing: type[Exception]) -> Iterator[None]:
    """Turns any error into an UnsupportedModelError of one line that begins with `what`; a debug line has the trace.

    Models are other people's code, and may raise anything where they meet what they were not written for.

    Args:
        what: cannot be done, with the model and its type.
        passing: errors that say all of this themselves, in addition to UnsupportedModelError.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (UnsupportedModelError, *passing)):
            raise
        logger.debug("%s", what, exc_info=True)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UnsupportedModelError(
            f"{what}: {textwrap.shorten(reason, _LONGEST_REASON, placeholder=' ...')}"
        ) from error


def describe_model(config: "PretrainedConfig") -> str:
    """A model's name, if the configuration was read from somewhere, and its type."""
    name = str(config.name_or_path or "")
    return f"{name} (a {config.model_type} model)" if name else f"a {config.model_type} model"


def few(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    first = ", ".join(sorted(names)[:_FEW])
    return first if len(names) <= _FEW else f"{first} and {len(names) - _FEW} more"
