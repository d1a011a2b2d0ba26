"""`samewise serve`: one option for each setting, and the exit code."""

import inspect
import time
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from server.cli.console import fail, warn
from server.cli.start_signals import end_start_on_signals
from server.config import Settings, SettingsError, alternatives, flag, load_settings, misspelt_variables

Flag = str | bool | list[str] | None

EPILOG = (
    "Every option is also an environment variable (SAMEWISE_MAX_MODEL_LEN for --max-model-len) and a key of the YAML "
    "file (max_model_len). A flag goes before a variable, a variable before the file. A variable for several folders "
    "is written as in PATH, one for several origins with commas."
)
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", envvar="SAMEWISE_CONFIG", help="YAML file of settings.")
]


class ServeCommand(TyperCommand):
    """Also takes options of other servers' command lines, see foreign_flags.py."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from server.cli.foreign_flags import ForeignFlagError, translate  # noqa: PLC0415

        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        names = {
            is_switch: frozenset(
                name
                for option in options
                if (getattr(option, "is_flag", False) or option.name == "help") == is_switch
                for name in (*option.opts, *option.secondary_opts)
            )
            for is_switch in (False, True)
        }
        try:
            translation = translate(args, names[False], names[True])
        except ForeignFlagError as error:
            fail(str(error), code=2)
        for notice in translation.notices:
            warn(notice)
        return super().parse_args(ctx, translation.arguments)


def register(app: typer.Typer) -> None:
    """Add the command, with an option for each field of the settings."""

    def serve(config: Path | None = None, **flags: Flag) -> None:
        run(_read_settings(flags, config))

    own = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
    options = [*_parameters(positional="model"), own]
    serve.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    serve.__annotations__ = {option.name: option.annotation for option in options}
    app.command(name="serve", cls=ServeCommand, help="Serve a model over the OpenAI API.", epilog=EPILOG)(serve)


def run(settings: Settings) -> None:
    """Serve until a signal ends it. Exits with 1, and one line that says why, if that cannot be done."""
    started = time.perf_counter()
    end_start_on_signals()
    from model_runner.models.repository import ModelNotFoundError  # noqa: PLC0415
    from server.assembly import StartError  # noqa: PLC0415
    from server.cli.lifecycle import serve  # noqa: PLC0415

    try:
        serve(settings, started)
    except (StartError, ModelNotFoundError) as error:
        fail(str(error))


def _read_settings(flags: dict[str, Flag], config: Path | None) -> Settings:
    try:
        settings = load_settings(flags, config)
    except SettingsError as error:
        fail(str(error), code=2)
    for warning in misspelt_variables():
        warn(warning)
    return settings


def _parameters(positional: str) -> list[inspect.Parameter]:
    """A keyword parameter for typer for each setting; `positional` becomes an argument.

    Every default is None, which means "not given": the settings model validates and has the real defaults.
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


def _annotation(name: str, field: FieldInfo) -> object:
    choices = alternatives(field.annotation)
    text = f"{field.description}{_shown_default(field)}"
    if bool in choices:
        names = f"{flag(name)}/--no-{name.replace('_', '-')}"
        return Annotated[bool | None, typer.Option(names, help=text, show_default=False)]
    kind = list[str] if get_origin(field.annotation) is tuple else str
    return Annotated[kind | None, typer.Option(flag(name), help=text, show_default=False, metavar=_metavar(choices))]


def _metavar(choices: tuple[Any, ...]) -> str:
    if not isinstance(choices[0], type):
        return "|".join(str(choice) for choice in choices)
    return {int: "INTEGER", float: "NUMBER", Path: "FILE", SecretStr: "SECRET"}.get(choices[0], "TEXT")


def _shown_default(field: FieldInfo) -> str:
    """The default for the help, except a secret's."""
    if field.default in (None, ()) or SecretStr in alternatives(field.annotation):
        return ""
    return f"  [default: {str(field.default).lower() if isinstance(field.default, bool) else field.default}]"
