"""The page docs/reference/settings.md, from the settings and from the commands' options."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer.main
from marked_pages import table
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from server import config
from server.cli import main as cli
from server.config import Settings, alternatives
from server.model_settings import IN_FILE_ONLY, NOT_SHARED, OF_A_MODEL, ModelSettings
from server.setting_errors import PREFIX

PAGE = """\
<!-- docs/generate.py writes this page -->

# Settings

All settings of `samewise serve`, and the options of the other commands.

```bash
samewise serve --max-model-len 8192                   # a flag
SAMEWISE_MAX_MODEL_LEN=8192 samewise serve            # an environment variable
samewise serve --config settings.yaml                 # a YAML file with the line `max_model_len: 8192`
```

A flag overrides a variable, and a variable overrides the file. A setting that is on or off has two flags, such as
`--exact` and `--no-exact`. In a variable, several folders are separated as in `PATH`, and several names, origins or
hosts by commas. [Coming from another server](../how-to/migrate.md) lists the flags of vLLM, llama.cpp and others.

{settings}
{commands}"""
TYPES: Mapping[type, str] = {int: "integer", float: "number", str: "text", Path: "path", SecretStr: "text"}
COMMANDS: Mapping[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def render_settings() -> str:
    """The page."""
    groups: Mapping[str, tuple[str, ...]] = getattr(config, "GROUPS", {"All settings": tuple(Settings.model_fields)})
    missing = set(Settings.model_fields) - {name for names in groups.values() for name in names}
    if missing:
        raise SystemExit(f"server.config.GROUPS lacks {', '.join(sorted(missing))}")
    settings = "\n".join(
        line for title, names in groups.items() for line in (f"## {title}\n", *(_setting(name) for name in names))
    )
    return PAGE.format(settings=settings, commands="\n".join(_commands())).rstrip() + "\n"


def _setting(name: str) -> str:
    field = Settings.model_fields[name]
    if name in IN_FILE_ONLY:
        return f"### {name}\n\nonly in the YAML file · a list\n\n{field.description}\n\n{_entries()}"
    (parameter,) = (one for one in COMMANDS["serve"].params if one.name == name)
    option = "`samewise serve MODEL`" if name == "model" else _spelt(parameter)
    facts = [option, f"`{PREFIX}{name.upper()}`", _values(field), f"default {_default(field)}"]
    return f"### {name}\n\n{' · '.join(facts)}\n\n{field.description}\n"


def _entries() -> str:
    """The keys of an entry of `models`."""
    rows = [
        (f"`{name}`", _values(field), "required" if field.is_required() else _default(field), field.description or "")
        for name, field in ModelSettings.model_fields.items()
    ]
    shared, own = (", ".join(f"`{name}`" for name in sorted(names)) for names in (OF_A_MODEL - NOT_SHARED, NOT_SHARED))
    return (
        f"{table(('key', 'values', 'default', 'description'), rows)}\n"
        f"An entry also takes settings of a model. Outside of `models`, these are the defaults of all entries: "
        f"{shared}. These belong to an entry alone: {own}.\n"
    )


def _values(field: FieldInfo) -> str:
    """The values that a setting takes."""
    kinds = tuple(
        get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(field.annotation)
    )
    if bool in kinds:
        return "on or off"
    if not all(isinstance(kind, type) for kind in kinds):
        return ", ".join(f"`{kind}`" for kind in kinds)
    bounds = [
        f"{sign} {getattr(one, attribute)}"
        for one in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"))
        if hasattr(one, attribute)
    ]
    return f"{TYPES[kinds[0]]} {', '.join(bounds)}".strip()


def _default(field: FieldInfo) -> str:
    if field.default in (None, ()):
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if field.default == "":
        return "empty"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _commands() -> Iterator[str]:
    """The options of all commands except `serve`."""
    for name, command in _flat(COMMANDS):
        if name == "serve" or command.hidden:
            continue
        rows = [
            (_spelt(one), _default_of(one), one.help or "")
            for one in command.params
            if one.name != "help" and not getattr(one, "hidden", False)
        ]
        yield f"## samewise {name}\n\n{command.help.split(chr(10) * 2)[0]}\n"
        yield table(("option", "default", "description"), rows)


def _flat(commands: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """All commands, also the ones in groups, by the words that are typed."""
    for name, command in commands.items():
        if hasattr(command, "commands"):
            yield from _flat(command.commands, f"{name} ")
        else:
            yield f"{group}{name}", command


def _spelt(parameter: Any) -> str:
    """An option or argument with its placeholder, which names the unit."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    *others, last = [*parameter.opts, *parameter.secondary_opts]
    takes = f" {parameter.metavar}" if (parameter.metavar or "").isupper() else ""
    return ", ".join(f"`{name}`" for name in (*others, f"{last}{takes}"))


def _default_of(parameter: Any) -> str:
    default = parameter.default
    if default in (None, (), [], PydanticUndefined) or callable(default) or "UNSET" in repr(default).upper():
        return "required" if parameter.required else ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
