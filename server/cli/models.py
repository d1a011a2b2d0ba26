"""`samewise list`, `pull` and `show`: models on this machine, their download, and what a model is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.completion import complete_model
from server.cli.console import PlainCommand, fail, warn
from server.cli.tables import day, print_json, print_pairs, print_table

if TYPE_CHECKING:
    from model_runner.hub.access import HubAccess
    from model_runner.hub.description import Description

Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hub name such as user/repo or user/repo:Q4_K_M, URL of a GGUF file, ollama:NAME:TAG, "
        "lmstudio:PUBLISHER/REPO, folder or file.",
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(name="list", cls=PlainCommand)(list_all)
    app.command(cls=PlainCommand)(pull)
    app.command(cls=PlainCommand)(show)


def list_all(*, json: Json = False) -> None:
    """List the models on this machine that can be served, with the names that `samewise serve` takes.

    They are in the hub's cache, which llama.cpp uses, too, in Samewise's own cache, and with Ollama and LM Studio.
    """
    from model_runner.hub.inventory import list_models  # noqa: PLC0415
    from model_runner.hub.progress import size_text  # noqa: PLC0415
    from model_runner.models.repository import cache_folder  # noqa: PLC0415

    models = list_models(cache_folder())
    if json:
        print_json([model.as_json() for model in models])
        return
    rows = [
        (model.name, model.revision or "", model.format, size_text(model.size), model.source, day(model.used))
        for model in models
    ]
    print_table(("name", "revision", "format", "size", "from", "date"), rows, right=("size",))


def pull(model: Name, *, revision: Revision = None, hub_token: Token = None) -> None:
    """Download a model, or the newest commit of one that was downloaded before. The same command continues.

    A server never looks for newer commits: it serves what is on this machine until the model is pulled again.
    """
    from rich.console import Console  # noqa: PLC0415

    from model_runner.hub.access import HubAccess, ModelNotFoundError  # noqa: PLC0415
    from model_runner.models.repository import locate_model  # noqa: PLC0415

    try:
        path, _ = locate_model(model, Console(stderr=True), HubAccess(hub_token, revision, updates=True))
        _warn_of_memory(path)
    except ModelNotFoundError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the same command continues", code=130)
    typer.echo(str(path))


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
    from model_runner.models.repository import find_model  # noqa: PLC0415

    if (path := find_model(model, access)) is not None:
        return describe(path), path
    name = parse_name(model)
    if is_offline() or isinstance(name, StoreName):
        raise ModelNotFoundError(f"{model} is not on this machine, and HF_HUB_OFFLINE forbids to ask for it")
    from model_runner.hub.remote_description import describe_remote  # noqa: PLC0415 - brings the HTTP client

    return describe_remote(name, access), None


def _pairs(found: "Description") -> dict[str, str]:
    """The description's lines, without those that the files do not tell."""
    from model_runner.hub.progress import size_text  # noqa: PLC0415

    total = sum(found.types.values()) or 1
    types = ", ".join(f"{name} {100 * count / total:.1f} %" for name, count in found.types.items())
    lines = {
        "format": found.format,
        "architecture": found.architecture,
        "parameters": "" if found.quantization else f"{found.parameters:,}",
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
    from model_runner.hub.progress import size_text  # noqa: PLC0415
    from model_runner.processes import free_memory  # noqa: PLC0415

    least, free = describe(path).least_memory, free_memory()
    if least > free:
        warn(f"its weights need at least {size_text(least)} of memory, and {size_text(free)} are free on this machine")
