"""`samewise serve`: from settings to a listening server, and to its exit code."""

import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from server.cli.console import fail, warn
from server.cli.start_signals import end_start_on_signals

if TYPE_CHECKING:
    from server.config import Settings

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
    from server.cli.flags import parameters  # noqa: PLC0415

    def serve(config: Path | None = None, **flags: Flag) -> None:
        run(_read_settings(flags, config))

    own = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
    options = [*parameters(positional="model"), own]
    serve.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    serve.__annotations__ = {option.name: option.annotation for option in options}
    app.command(name="serve", cls=ServeCommand, help="Serve a model over the OpenAI API.", epilog=EPILOG)(serve)


def run(settings: "Settings") -> None:
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


def _read_settings(flags: dict[str, Flag], config: Path | None) -> "Settings":
    from server.cli.flags import SettingsError, load, misspelt_variables  # noqa: PLC0415

    try:
        settings = load(flags, config)
    except SettingsError as error:
        fail(str(error), code=2)
    for warning in misspelt_variables():
        warn(warning)
    return settings
