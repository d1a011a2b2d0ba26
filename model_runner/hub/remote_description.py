"""Describes a model that is not on this machine, by the heads of its files on the server."""

from pathlib import Path

from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.choice import Wanted, choose_gguf, choose_weights, chooses_gguf
from model_runner.hub.description import Description, describe_gguf, describe_safetensors
from model_runner.hub.fetch import revision_of
from model_runner.hub.names import FileUrl, HubName
from model_runner.hub.refusals import refusals_named
from model_runner.hub.remote_heads import read_gguf_head
from model_runner.hub.remote_repo import RemoteRepo, open_client
from model_runner.hub.transfer import UnreachableError
from model_runner.hub.url_cache import urls_of_parts
from model_runner.refusal import refused


def describe_remote(name: HubName | FileUrl, access: HubAccess) -> Description:
    """Describe a model of the hub or of a URL; only the heads of its files are read.

    Raises:
        ModelNotFoundError: if there is no such model, or its server does not answer.
    """
    revision = revision_of(name, access) if isinstance(name, HubName) else ""
    try:
        with refusals_named(name, revision), open_client() as client:
            if isinstance(name, FileUrl):
                heads = [read_gguf_head(client, url, {}, Path(name.file))[0] for url in urls_of_parts(name)]
                return describe_gguf(heads)
            repo = RemoteRepo(name.repo, revision, access, client)
            repo.look_up()
            return _describe(name, repo)
    except UnreachableError as error:
        raise ModelNotFoundError(
            f"{name} is not on this machine, and its server cannot be reached ({error})"
        ) from error


def _describe(name: HubName, repo: RemoteRepo) -> Description:
    wanted = Wanted(name.tag, name.file)
    paths = repo.listing.keys()
    is_gguf = chooses_gguf(paths, wanted)
    chosen = choose_gguf(paths, wanted, name.repo) if is_gguf else choose_weights(paths, None, name.repo)
    files = [repo.listing[path] for path in chosen]
    size = sum(file.size for file in files)
    if is_gguf:
        return describe_gguf(repo.gguf_heads(files), size)
    has_template = any(path in paths for path in ("chat_template.jinja", "chat_template.json"))
    has_template = has_template or bool(repo.read_json("tokenizer_config.json").get("chat_template"))
    heads, config = repo.safetensors_heads(files), repo.read_json("config.json")
    with refused("its config.json cannot be read"):
        return describe_safetensors(heads, config, size, has_chat_template=has_template)
