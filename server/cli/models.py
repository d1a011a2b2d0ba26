"""`samewise list`, `pull`, `rm` and `show`: models on this machine, their download, and what a model is."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.completion import complete_model
from server.cli.console import ApiKey, PlainCommand, address_of, fail, printable, warn
from server.cli.tables import day, print_json, print_pairs, print_table

if TYPE_CHECKING:
    from model_runner.hub.access import HubAccess
    from model_runner.hub.description import Description

_HELP = (
    "Hub name such as user/repo or user/repo:Q4_K_M, URL of a GGUF file, ollama:NAME:TAG, lmstudio:PUBLISHER/REPO, "
    "folder or file."
)
Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=_HELP, autocompletion=complete_model),
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help=_HELP, autocompletion=complete_model),
]
Downloads = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="Hub name such as user/repo or user/repo:Q4_K_M, or URL of a GGUF file.",
        autocompletion=complete_model,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Branch, tag or commit of a model from the hub. By default its main branch."),
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="SECRET",
        envvar="SAMEWISE_HUB_TOKEN",
        show_default=False,
        help="Hugging Face token for gated and private models. By default the variable HF_TOKEN or the login of "
        "`hf auth login`.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Also show which models this file of settings serves, and as what."),
]
ServerUrl = Annotated[
    str | None,
    typer.Option("--base-url", metavar="URL", help="List the models of this server instead, with their states."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(name="list", cls=PlainCommand)(list_all)
    app.command(cls=PlainCommand)(pull)
    app.command(name="rm", cls=PlainCommand)(remove)
    app.command(cls=PlainCommand)(show)


def list_all(
    *, config: ConfigFile = None, base_url: ServerUrl = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """List the models on this machine that can be served, with the names that `samewise serve` takes.

    They are in the hub's cache, which llama.cpp uses, too, in Samewise's own cache, and with Ollama and LM Studio.
    """
    if base_url is not None:
        if config is not None:
            fail("give --config or --base-url, not both", code=2)
        _list_of_server(base_url, api_key, json=json)
        return
    from model_runner.hub.inventory import list_models  # noqa: PLC0415
    from model_runner.hub.limits import size_text  # noqa: PLC0415
    from model_runner.hub.repository import cache_folder  # noqa: PLC0415

    models = list_models(cache_folder())
    served = None if config is None else _served_names(config)
    if json:
        as_served = [{} if served is None else {"served_as": served.get(model.path, [])} for model in models]
        print_json([model.as_json() | more for model, more in zip(models, as_served, strict=True)])
        return
    columns = ["name", "revision", "format", "size", "from", "date"]
    rows = [
        [model.name, model.revision or "", model.format, size_text(model.size), model.source, day(model.used)]
        for model in models
    ]
    if served is not None:
        columns.append("served as")
        for row, model in zip(rows, models, strict=True):
            row.append(", ".join(served.get(model.path, [])))
    print_table(columns, rows, right=("size",))


def _served_names(config: Path) -> dict[Path, list[str]]:
    """The names in the API of the models that a file of settings serves, by their folders and GGUF files."""
    from model_runner.hub.access import HubAccess, ModelNotFoundError  # noqa: PLC0415
    from model_runner.hub.names import EMBEDDED_NAME  # noqa: PLC0415
    from model_runner.hub.repository import default_name, find_model  # noqa: PLC0415
    from server.config import load_settings  # noqa: PLC0415
    from server.setting_errors import SettingsError  # noqa: PLC0415

    found: dict[Path, list[str]] = {}
    try:
        settings = load_settings({}, config)
        for own in [settings.of_model(entry) for entry in settings.models] or [settings]:
            model = own.model or EMBEDDED_NAME
            names = list(own.served_model_name) or [default_name(model)]
            path = find_model(model, HubAccess(revision=own.revision))
            if path is None:
                warn(f"{names[0]} is not on this machine; `samewise pull {model}` downloads it")
            else:
                found.setdefault(path, []).extend(names)
    except (SettingsError, ModelNotFoundError) as error:
        fail(str(error))
    return found


def _list_of_server(base_url: str, api_key: str | None, *, json: bool) -> None:
    """List the models of a server, loaded or not."""
    from server.cli.terminal_chat import ChatServer, ServerError  # noqa: PLC0415

    try:
        with ChatServer(address_of(base_url), api_key) as server:
            models = server.models()
    except ServerError as error:
        fail(str(error))
    if json:
        print_json(models)
        return
    rows = [
        (
            str(model["id"]),
            _state_of(model.get("status")),
            f"{length:,}" if isinstance(length := model.get("max_model_len"), int) else "",
            ", ".join(map(str, model.get("aliases") or ())),
        )
        for model in models
    ]
    print_table(("name", "state", "tokens", "aliases"), rows, right=("tokens",))


def _state_of(status: object) -> str:
    """The state of a model that a server lists; empty if the server has one model and so reports none."""
    if not isinstance(status, Mapping):
        return ""
    return "failed" if status.get("failed") else str(status.get("value", ""))


def pull(models: Names, *, revision: Revision = None, hub_token: Token = None) -> None:
    """Download a model, or the newest commit of one that was downloaded before. The same command continues.

    A server never looks for newer commits: it serves what is on this machine until the model is pulled again.
    """
    from rich.console import Console  # noqa: PLC0415

    from model_runner.hub.access import HubAccess, ModelNotFoundError  # noqa: PLC0415
    from model_runner.hub.repository import locate_model  # noqa: PLC0415

    for model in models:
        try:
            path, _ = locate_model(model, Console(stderr=True), HubAccess(hub_token, revision, updates=True))
            _warn_of_memory(path)
        except ModelNotFoundError as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted; the same command continues", code=130)
        typer.echo(str(path))


def remove(models: Downloads, *, revision: Revision = None, yes: Yes = False) -> None:
    """Remove downloaded models, and what was made of them for fast starts.

    Only downloads of the hub and of URLs are removed: not files of yours, nor models of other programs. A server that
    uses a model keeps it until it unloads it.
    """
    from model_runner.hub.access import ModelNotFoundError  # noqa: PLC0415
    from model_runner.hub.inventory import find_download  # noqa: PLC0415
    from model_runner.hub.limits import size_text  # noqa: PLC0415
    from model_runner.hub.own_cache import bytes_below  # noqa: PLC0415
    from model_runner.hub.repository import cache_folder, conversions_of  # noqa: PLC0415

    for model in models:
        try:
            download = find_download(model, cache_folder(), revision)
            made = [folder for path in download.paths for folder in conversions_of(path)]
            size = size_text(download.size + sum(map(bytes_below, made)))
            if not yes:
                typer.confirm(f"Remove {printable(download.name)}, {size}?", abort=True)
            download.remove()
            for folder in made:
                shutil.rmtree(folder)
        except ModelNotFoundError as error:
            fail(str(error))
        except OSError as error:
            fail(f"{error.filename} cannot be removed: {error.strerror}")
        typer.echo(f"Removed {printable(download.name)}, {size}.")


def show(model: Name, *, revision: Revision = None, hub_token: Token = None, json: Json = False) -> None:
    """Say what a model is and what memory it needs. Of one that is not on this machine, only the heads are read."""
    from model_runner.hub.access import HubAccess, ModelNotFoundError  # noqa: PLC0415

    try:
        found, place = _describe(model, HubAccess(hub_token, revision))
    except ModelNotFoundError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    if json:
        print_json({"path": None if place is None else str(place), **found.as_json()})
    else:
        print_pairs({"model": model, "on this machine": "no" if place is None else str(place)} | _pairs(found))


def _describe(model: str, access: "HubAccess") -> "tuple[Description, Path | None]":
    from model_runner.hub.access import ModelNotFoundError, is_offline  # noqa: PLC0415
    from model_runner.hub.description import describe  # noqa: PLC0415
    from model_runner.hub.names import StoreName, parse_name  # noqa: PLC0415
    from model_runner.hub.repository import find_model  # noqa: PLC0415

    if (path := find_model(model, access)) is not None:
        return describe(path), path
    name = parse_name(model)
    if is_offline() or isinstance(name, StoreName):
        raise ModelNotFoundError(f"{model} is not on this machine, and HF_HUB_OFFLINE forbids to ask for it")
    from model_runner.hub.remote import describe_remote  # noqa: PLC0415 - brings the HTTP client

    return describe_remote(name, access), None


def _pairs(found: "Description") -> dict[str, str]:
    """The description's lines, without those that the files do not tell."""
    from model_runner.hub.limits import size_text  # noqa: PLC0415

    total = sum(found.types.values()) or 1
    types = ", ".join(f"{name} {100 * count / total:.1f} %" for name, count in found.types.items())
    lines = {
        "format": found.format,
        "architecture": found.architecture,
        "parameters": "" if found.quantization and found.format != "GGUF" else f"{found.parameters:,}",
        "quantization": found.quantization or "",
        "weights": f"{size_text(found.size)}: {types}",
        "context": "" if found.context is None else f"{found.context:,} tokens",
        "vocabulary": "" if found.vocabulary is None else f"{found.vocabulary:,} tokens",
        "chat template": "yes" if found.has_chat_template else "no",
        "memory": f"at least {size_text(found.least_memory)} for the weights",
        "KV cache": ""
        if found.kv_bytes_per_token is None
        else f"{size_text(1000 * found.kv_bytes_per_token)} for 1,000 tokens in 16 bits",
    }
    return {name: value for name, value in lines.items() if value}


def _warn_of_memory(path: Path) -> None:
    """Warn if the weights certainly need more memory than this machine has free."""
    from model_runner.hub.description import describe  # noqa: PLC0415
    from model_runner.hub.limits import size_text  # noqa: PLC0415
    from model_runner.processes import free_memory  # noqa: PLC0415

    least, free = describe(path).least_memory, free_memory()
    if least > free:
        warn(f"its weights need at least {size_text(least)} of memory, and {size_text(free)} are free on this machine")
