"""One settings model, three ways to set a field: flag, then SAMEWISE_* variable, then key of the YAML file."""

import difflib
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from server.config import Settings

PREFIX = "SAMEWISE_"
OTHER_VARIABLES = frozenset({"SAMEWISE_CONFIG", "SAMEWISE_CACHE"})
"""Variables with the prefix that are read elsewhere."""
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes gives containers SAMEWISE_PORT=tcp://10.0.0.1:8000 where there is a Service named samewise."""


class SettingsError(ValueError):
    """A setting cannot be used; the message is one line that names the field and where its value came from."""


def flag(field: str) -> str:
    """The command line option of a field."""
    return "--" + field.replace("_", "-")


def parameters(positional: str) -> list[inspect.Parameter]:
    """One keyword parameter for typer for each field of the settings; `positional` becomes an argument.

    Every default is None, which means "not given": validation and real defaults belong to the settings model.
    """
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, field))
        if name != positional
        else inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Argument(help=field.description, show_default=False, metavar="MODEL")
            ],
        )
        for name, field in Settings.model_fields.items()
    ]


def load(
    flags: Mapping[str, object], config_file: Path | None = None, spelt: Callable[[str], str] | None = None
) -> Settings:
    """Read the settings from flags (None: not given), environment and file. Raises SettingsError.

    `spelt` is how errors call what a field was given by, if that is no flag.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    environment: dict[str, Any] = EnvSettingsSource(Settings)()
    from_file = _read_file(config_file) if config_file is not None else {}
    try:
        return Settings(**{**from_file, **environment, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = {name: (spelt or _on_the_command_line)(name) for name in given}
        raise SettingsError(_describe(first, names, environment, config_file)) from None


def misspelt_variables(environment: Iterable[str] = os.environ) -> list[str]:
    """A warning for each variable that looks like a misspelt setting."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    warnings = []
    for variable in sorted(environment):
        near = difflib.get_close_matches(variable.upper(), known, n=1, cutoff=0.85)
        if variable.startswith(PREFIX) and near and variable.upper() not in known:
            warnings.append(f"{variable} is not a setting and has no effect; did you mean {near[0]}?")
    return warnings


def _annotation(name: str, field: FieldInfo) -> object:
    choices = _alternatives(field.annotation)
    text = f"{field.description}{_shown_default(field)}"
    if bool in choices:
        names = f"{flag(name)}/--no-{name.replace('_', '-')}"
        return Annotated[bool | None, typer.Option(names, help=text, show_default=False)]
    kind = list[str] if get_origin(field.annotation) is tuple else str
    return Annotated[kind | None, typer.Option(flag(name), help=text, show_default=False, metavar=_metavar(choices))]


def _alternatives(annotation: object) -> tuple[Any, ...]:
    """The types or literal values that a field takes, None left out; of a list, those of its entries."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin is tuple:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(one for part in get_args(annotation) for one in _alternatives(part) if one is not types.NoneType)
    return (annotation,)


def _metavar(choices: tuple[Any, ...]) -> str:
    if not isinstance(choices[0], type):
        return "|".join(str(choice) for choice in choices)
    return {int: "INTEGER", float: "NUMBER", Path: "FILE", SecretStr: "SECRET"}.get(choices[0], "TEXT")


def _shown_default(field: FieldInfo) -> str:
    """Never of a secret."""
    if field.default in (None, ()) or SecretStr in _alternatives(field.annotation):
        return ""
    return f"  [default: {str(field.default).lower() if isinstance(field.default, bool) else field.default}]"


def _read_file(path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415  (only who has a file waits for it)

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected `key: value` lines, found a {type(content).__name__}")
    for key in content:
        if key not in Settings.model_fields:
            raise SettingsError(f"{path}: {_unknown_key(str(key))}")
    return content


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), Settings.model_fields, n=3, cutoff=0.6)
    return f"unknown key `{key}`" + (f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else "")


def _on_the_command_line(name: str) -> str:
    return "MODEL" if name == "model" else flag(name)


def _describe(
    error: ErrorDetails, given: Mapping[str, str], environment: Mapping[str, object], config_file: Path | None
) -> str:
    if not error["loc"]:
        return error["msg"]
    name = str(error["loc"][0])
    if name in given:
        source = given[name]
    elif name in environment:
        source = PREFIX + name.upper()
    else:
        source = f"{name} in {config_file}"
    secret = error["type"] == "secret_in_url" or SecretStr in _alternatives(Settings.model_fields[name].annotation)
    got = "" if secret else f" (got {error['input']!r})"
    return f"{source}: {error['msg'][0].lower()}{error['msg'][1:]}{got}{_advice(source, error['input'])}"


def _advice(source: str, value: object) -> str:
    """Advice, if Kubernetes and not the user has set the variable."""
    if source != PREFIX + "PORT" or not SERVICE_LINK.match(str(value)):
        return ""
    return (
        "; Kubernetes sets it for a Service named samewise: put `enableServiceLinks: false` into the pod's "
        "specification, or name the Service otherwise"
    )
