"""Errors for models that are not supported. Imports no torch."""

import logging
import re
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("samewise.runner")

_TASK = re.compile(r"For([A-Z]\w*)$|(DoubleHeads|RewardModel|ValueHead)\w*$")
"""Finds what the head of a model class is for, such as TokenClassification."""
_SERVED_TASKS = ("CausalLM", "ConditionalGeneration", "SequenceClassification", "ImageTextToText", "VisionText2Text")

_LONGEST_REASON = 400
"""Characters: transformers may answer with the list of all models that it knows."""
_FEW = 3

SEE_MODELS = "docs/reference/model-types.md lists the supported models"
"""Advice for errors about architectures."""


_LONGEST_MESSAGE = 2000
"""Characters: a message may quote a name or a value from a file, which may be of any length."""


class UnsupportedModelError(ValueError):
    """The model is not supported; the message is one line of bounded length that names the model and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """The message without line breaks and control characters; without its middle if it is very long."""
    if len(message) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return message if message.isprintable() else "".join(one if one.isprintable() else " " for one in message)


def other_task(architectures: Collection[str] | None) -> str | None:
    """The task of a checkpoint's head, by its first class, if it neither generates, classifies texts nor embeds.

    Served without its head, such a model would generate from random weights.
    """
    found = _TASK.search(_first_class(architectures))
    task = None if found is None else found[1] or found[2]
    return None if task is None or task.startswith(_SERVED_TASKS) else task


def _first_class(architectures: Collection[str] | None) -> str:
    return str(next(iter(architectures or ()), ""))


def classifies(architectures: Collection[str] | None) -> bool:
    """Whether a checkpoint has a head for scores or classes of texts, by its first class."""
    return _first_class(architectures).endswith("ForSequenceClassification")


def is_bare(architectures: Collection[str] | None) -> bool:
    """Whether a checkpoint is for embeddings or classification, and may lack the head that makes logits."""
    first = _first_class(architectures)
    return classifies(architectures) or (first.endswith("Model") and not first.endswith("LMHeadModel"))


@contextmanager
def refused(what: str, *passing: type[Exception], advice: str = "") -> Iterator[None]:
    """Turn any error into an UnsupportedModelError of one line that begins with `what`.

    The traceback is logged at debug level. Model code comes from elsewhere, and may raise anything on input that it
    was not written for.

    Args:
        what: what failed, with the model and its type.
        passing: error classes, in addition to UnsupportedModelError, that already say this; they pass unchanged.
        advice: what the reader can do; the end of the message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (UnsupportedModelError, *passing)):
            raise
        logger.debug("%s", what, exc_info=True)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        reason = textwrap.shorten(reason, _LONGEST_REASON, placeholder=" ...")
        raise UnsupportedModelError(f"{what}: {reason}{advice and f'; {advice}'}") from error


def describe_model(config: "PretrainedConfig") -> str:
    """The model's name, if its configuration was read from a folder, and its type."""
    name = str(config.name_or_path or "")
    return f"{name} (a {config.model_type} model)" if name else f"a {config.model_type} model"


def few(names: Collection[str]) -> str:
    """The first three names, and how many more there are."""
    first = ", ".join(sorted(names)[:_FEW])
    return first if len(names) <= _FEW else f"{first} and {len(names) - _FEW} more"
