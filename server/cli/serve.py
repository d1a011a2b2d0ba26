"""`samewise serve`: the options, one for each setting, their help, and the exit code."""

import inspect
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from server.cli.completion import complete_model, completes
from server.cli.console import GENERAL, PlainCommand, fail, warn
from server.cli.start_signals import end_start_on_signals
from server.config import GROUPS, Settings, alternatives, flag, load_settings, misspelt_variables
from server.model_settings import IN_FILE_ONLY
from server.setting_errors import SettingsError

Flag = str | bool | list[str] | None

HELP = (
    "Serve one model, or several, over the OpenAI API. `samewise serve` alone serves the embedded model on "
    "http://127.0.0.1:8000/v1, with a page to try it at http://127.0.0.1:8000/."
)
EPILOG = (
    "Every option is also an environment variable (SAMEWISE_MAX_MODEL_LEN for --max-model-len) and a key of the YAML "
    "file (max_model_len). A flag overrides a variable, and a variable overrides the file. In a variable, separate "
    "several folders like the entries of PATH, and other values with commas. In the file, `models` gives each of "
    "several models its own settings. Many options of vLLM and llama.cpp are translated, or answered with the option "
    "to use here."
)
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="SAMEWISE_CONFIG",
        help="YAML file of settings, such as `port: 8000`. Also the variable SAMEWISE_CONFIG.",
        show_envvar=False,
        rich_help_panel=GENERAL,
    ),
]
_METAVARS: Mapping[object, str] = {int: "INTEGER", float: "NUMBER", Path: "FILE", SecretStr: "SECRET"}
_METAVARS_BY_NAME: Mapping[str, str] = {
    **dict.fromkeys(("draft_model", "aux_model", "heads"), "MODEL"),
    **dict.fromkeys(("max_model_len", "max_num_batched_tokens", "num_draft_tokens"), "TOKENS"),
    **dict.fromkeys(("dtype", "quantization", "kv_cache_dtype"), "TYPE"),
    "speculation": "METHOD",
    "log_level": "LEVEL",
    "learn_memory": "GIB",
    "data_dir": "FOLDER",
}
_METAVARS_BY_UNIT: Mapping[str, str] = {"s": "SECONDS", "mib": "MIB", "gib": "GIB"}
"""The placeholder of a value by the last word of its setting's name."""


class ServeCommand(PlainCommand):
    """Also takes options of other servers, see foreign_flags.py."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # completion
            return super().parse_args(ctx, args)
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
    options = [*_parameters(), own]
    serve.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    serve.__annotations__ = {option.name: option.annotation for option in options}
    app.command(
        name="serve",
        cls=ServeCommand,
        help=HELP,
        short_help="Serve models over the OpenAI API.",
        epilog=EPILOG,
    )(serve)


def run(settings: Settings) -> None:
    """Serve until a signal ends it. If it cannot start, exit with 1 and one line that says why."""
    started = time.perf_counter()
    end_start_on_signals()
    from model_runner.hub.access import ModelNotFoundError  # noqa: PLC0415
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


def _parameters() -> list[inspect.Parameter]:
    """A keyword parameter for typer for each setting, by group.

    Every default is None, which means "not given": the settings model validates and has the real defaults.
    """
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(name, Settings.model_fields[name], group),
        )
        for group, names in GROUPS.items()
        for name in names
        if name not in IN_FILE_ONLY
    ]


def _annotation(name: str, field: FieldInfo, group: str) -> object:
    """An argument for the model, a switch for a boolean, and an option with a value for everything else."""
    choices = alternatives(field.annotation)
    text = f"{_as_flags(field.description or '')}{_listed(name, choices)}{_shown_default(field)}"
    if name == "model":
        return Annotated[
            list[str] | None,
            typer.Argument(
                help=f"{text} With several, the first is loaded at the start, and the others when a request asks for "
                "them.",
                show_default=False,
                metavar="MODEL",
                rich_help_panel=group,
                autocompletion=complete_model,
            ),
        ]
    if bool in choices:
        names = f"{flag(name)}/--no-{name.replace('_', '-')}"
        return Annotated[bool | None, typer.Option(names, help=text, show_default=False, rich_help_panel=group)]
    metavar = _metavar(name, choices)
    option = typer.Option(
        flag(name),
        help=text,
        show_default=False,
        metavar=metavar,
        rich_help_panel=group,
        autocompletion=_completion(metavar, choices),
    )
    return Annotated[(list[str] if get_origin(field.annotation) is tuple else str) | None, option]


def _as_flags(text: str) -> str:
    """The text with options in place of the settings that it names in backticks."""
    return re.sub("`(\\w+)`", lambda found: flag(found[1]) if found[1] in Settings.model_fields else found[0], text)


def _listed(name: str, choices: tuple[Any, ...]) -> str:
    """A sentence with the choices if there are too many for a placeholder."""
    if name not in _METAVARS_BY_NAME or isinstance(choices[0], type):
        return ""
    return f" One of {', '.join(map(str, choices))}."


def _metavar(name: str, choices: tuple[Any, ...]) -> str:
    """The placeholder of a value, which names its unit if it has one."""
    if name in _METAVARS_BY_NAME:
        return _METAVARS_BY_NAME[name]
    if not isinstance(choices[0], type):
        return "|".join(str(choice) for choice in choices)
    return _METAVARS_BY_UNIT.get(name.rpartition("_")[2]) or _METAVARS.get(choices[0], "TEXT")


def _completion(metavar: str, choices: tuple[Any, ...]) -> Any:
    """The function that completes a value, or None for what the shell completes: files, and nothing."""
    if metavar == "MODEL":
        return complete_model
    return completes(choices) if not isinstance(choices[0], type) else None


def _shown_default(field: FieldInfo) -> str:
    """The default for the help, except a secret's and an empty one."""
    if field.default in (None, (), "") or SecretStr in alternatives(field.annotation):
        return ""
    shown = {True: "on", False: "off"}[field.default] if isinstance(field.default, bool) else f"{field.default}"
    return f"  [default: {shown.removesuffix('.0')}]"
