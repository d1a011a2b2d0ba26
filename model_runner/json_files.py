"""Reads JSON that strangers wrote: the files of a model's folder, heads of safetensors, answers of a hub.

Nothing here imports torch. A test fails for other uses of `json.loads` in this package.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_runner.refusal import UnsupportedModelError

SMALL = 8 << 20
"""Bytes that configurations may have. Those with 20,000 classes have 2 MiB."""
LARGE = 128 << 20
"""Bytes that tokenizers, heads of safetensors and lists of files may have. The largest tokenizers have 33 MiB."""
_DEEPEST = 64
"""Levels of nested objects and lists. Configurations have up to six."""
_MOST_CONTAINERS = 2 << 20
"""Objects and lists, which take 20 times their bytes. A tokenizer has one for each merge, up to 600,000."""
_LONGEST_NUMBER = 40
"""Digits; some tokenizers say 1e30 for "no limit", written out."""
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Hook = Callable[[dict[str, Any]], Any]


def parse_json(content: bytes, name: str, *, most: int = SMALL, object_hook: Hook | None = None) -> Any:
    """The value of a JSON text in UTF-8.

    Numbers are finite, except where the text says Infinity or NaN, as Python's and transformers' writers do. Texts have
    no lone surrogates.

    Args:
        content: the text.
        name: the file, or what else the text is, for errors.
        most: the most bytes that it may have.
        object_hook: as for `json.loads`.

    Raises:
        UnsupportedModelError: if it is damaged, too large or too deeply nested; the message is one short line.
    """
    try:
        if len(content) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        if content.count(b"[") + content.count(b"{") > _MOST_CONTAINERS:
            raise ValueError(f"it has more than {_MOST_CONTAINERS:,} objects and lists")
        text = content.decode("utf-8-sig")
        value = json.loads(text, parse_float=_finite, parse_int=_integer, object_hook=object_hook)
        if _is_deep(value):
            raise RecursionError
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise UnsupportedModelError(
            f"{name} is not valid JSON (it has more than {_DEEPEST} nested levels); download it again"
        ) from None
    except ValueError as error:
        raise UnsupportedModelError(f"{name} is not valid JSON ({error}); download it again") from None
    return value


def parse_object(content: bytes, name: str, *, most: int = SMALL, object_hook: Hook | None = None) -> dict[str, Any]:
    """Like `parse_json`; raises UnsupportedModelError for anything but an object, too."""
    value = parse_json(content, name, most=most, object_hook=object_hook)
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{name} does not hold a JSON object; download it again")
    return value


def read_object(path: Path, *, most: int = SMALL, object_hook: Hook | None = None) -> dict[str, Any]:
    """The JSON object in a file. Raises UnsupportedModelError, and OSError if the file cannot be read."""
    return parse_object(_read(path, most), str(path), most=most, object_hook=object_hook)


def find_object(path: Path, *, most: int = SMALL) -> dict[str, Any]:
    """Like `read_object`; empty if there is no file."""
    return read_object(path, most=most) if path.is_file() else {}


def read_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects in a file. Raises UnsupportedModelError, and OSError if the file cannot be read."""
    value = parse_json(_read(path, SMALL), str(path))
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnsupportedModelError(f"{path} does not hold a JSON list of objects; download it again")
    return value


def is_safe_path(path: str) -> bool:
    """Whether a file's path stays below the folder that it is joined to, and can be printed as it is."""
    parts = path.split("/")
    return "\\" not in path and path.isprintable() and not any(part in ("", ".", "..") for part in parts)


def _read(path: Path, most: int) -> bytes:
    """The content of a file, or so much of it that it is too large."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise UnsupportedModelError(f"{path} is not a file; download it again")
    with path.open("rb") as file:
        return file.read(most + 1)


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"the number {literal[:_LONGEST_NUMBER]} is too large")
    return number


def _integer(literal: str) -> int:
    if len(literal) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(literal)} digits")
    return int(literal)


def _is_deep(value: Any) -> bool:
    """Whether a value has more levels than `_DEEPEST`."""
    level = [value]
    for _ in range(_DEEPEST):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return False
        level = [child for one in containers for child in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, (dict, list)) for one in level)
