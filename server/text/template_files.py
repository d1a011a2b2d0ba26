"""Finds a model's chat templates, in all the places that transformers has written them to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_runner.json_files import find_object
from server.text.chat_template import TemplateSources

_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_OF_PROCESSORS = ("chat_template.json", "processor_config.json")
_DEFAULT, _TOOL_USE = "default", "tool_use"


def read_templates(folder: Path, config: Mapping[str, Any]) -> TemplateSources | None:
    """The chat templates in a model's folder; None if it has no default one.

    The first of these places counts: `chat_template.jinja` with the folder `additional_chat_templates`, then
    `tokenizer_config.json`, and the files of multimodal processors, `chat_template.json` and `processor_config.json`.

    Args:
        folder: the model's folder.
        config: the content of tokenizer_config.json.

    Raises:
        OSError or ValueError: if a file cannot be read, or a template is not text.
    """
    named = _of_files(folder) or _named(config.get("chat_template"), folder / "tokenizer_config.json")
    for name in _OF_PROCESSORS:
        named = named or _named(find_object(folder / name).get("chat_template"), folder / name)
    default = named.get(_DEFAULT)
    return None if default is None else TemplateSources(default, named.get(_TOOL_USE))


def _of_files(folder: Path) -> Mapping[str, str]:
    """Templates with a file of their own."""
    default = folder / _FILE
    found = {path.stem: _read(path) for path in (folder / _FOLDER).glob("*.jinja")}
    return {**found, _DEFAULT: _read(default)} if default.is_file() else found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; download it again.") from error


def _named(entry: object, path: Path) -> Mapping[str, str]:
    """Templates by name, from a value that is one template, a list of objects with names, or a mapping."""
    if entry is None:
        return {}
    if isinstance(entry, list) and all(
        isinstance(item, dict) and {"name", "template"} <= item.keys() for item in entry
    ):
        entry = {item["name"]: item["template"] for item in entry}
    named: dict[str, Any] = entry if isinstance(entry, dict) else {_DEFAULT: entry}
    if not all(isinstance(template, str) for template in named.values()):
        raise ValueError(f"{path}: chat_template is neither a text nor several with names.")
    return named
