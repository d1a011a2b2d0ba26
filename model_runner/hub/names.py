"""Names of models as people write them: the hub's, a file's URL, models of Ollama and LM Studio.

| name | what it means |
|---|---|
| `user/repo`, `hf.co/user/repo`, `https://huggingface.co/user/repo` | safetensors of the hub, otherwise GGUF |
| `user/repo:Q4_K_M` | the GGUF file with this tag in its name; a whole file name is a tag, too |
| `user/repo/folder/file.gguf`, `https://huggingface.co/user/repo/resolve/main/file.gguf` | this GGUF file |
| `https://example.com/file.gguf` | this file |
| `SmolLM2-135M-Instruct` | the embedded model |
| `ollama:llama3.2:3b`, `lmstudio:publisher/repo` | what these programs have downloaded |
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

from model_runner.hub.access import MAIN, HubAccess, ModelNotFoundError, hub_hosts
from model_runner.json_files import is_safe_path

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_WORD = re.compile(r"\w[\w.-]{0,95}", re.ASCII)
_FORBIDDEN = ("--", "..")
_STORE = re.compile(r"(ollama|lmstudio):(.*)", re.IGNORECASE | re.DOTALL)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_IN_BRANCH = ("resolve", "blob", "raw", "tree")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, and which of its models is meant."""

    repo: str
    tag: str | None = None
    """Quantisation as it is written in the name of a GGUF file, or the whole name."""
    file: str | None = None
    """Path of a GGUF file in the repository."""
    revision: str | None = None

    def __str__(self) -> str:
        """The name that the model has in the API."""
        if self.file is not None:
            return _stem(self.file)
        return self.repo if self.tag is None else f"{self.repo}:{self.tag}"


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A GGUF file somewhere on the web."""

    url: str

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def address(self) -> str:
        """The URL without its query, which may have a signature; this names the file."""
        return urlsplit(self.url)._replace(query="").geturl()

    def __str__(self) -> str:
        return _stem(self.file)


@dataclass(frozen=True, slots=True)
class StoreName:
    """A model that another program has downloaded."""

    store: str
    """`ollama` or `lmstudio`."""
    name: str

    def __str__(self) -> str:
        return self.name


def parse_name(text: str) -> HubName | FileUrl | StoreName:
    """Read a name that is no path on this machine.

    Raises:
        ModelNotFoundError: if it has none of the known forms.
    """
    if store := _STORE.fullmatch(text):
        return StoreName(store[1].lower(), store[2])
    if text.startswith(("http://", "https://")):
        return _parse_url(text)
    if text.startswith(("/", "~", ".")):
        raise _unknown(text)
    host, _, path = text.partition("/")
    return _parse_path(text, path if host.lower() in hub_hosts() else text)


def is_embedded(text: str) -> bool:
    """Whether a name means the embedded model, and no file or folder on this machine."""
    return text == EMBEDDED_NAME and not Path(text).exists()


def revision_of(name: HubName, access: HubAccess) -> str:
    """The revision that the name or the settings ask for. Raises ModelNotFoundError if they ask for different ones."""
    if name.revision and access.revision and name.revision != access.revision:
        raise ModelNotFoundError(
            f"{name} is asked for at {name.revision} by its URL, and at {access.revision} by --revision; leave one out"
        )
    return name.revision or access.revision or MAIN


def _parse_url(text: str) -> HubName | FileUrl:
    try:
        url = urlsplit(text)
    except ValueError:
        raise _unknown(text) from None
    if url.username or url.password:
        raise ModelNotFoundError(
            "a URL with a password is not accepted: it would be shown in logs; remove the password"
        )
    if url.netloc.lower() in hub_hosts():
        return _parse_path(text, url.path)
    return _parse_file(text, url)


def _parse_file(text: str, url: SplitResult) -> FileUrl:
    name = unquote(url.path).rpartition("/")[2]
    if not name.lower().endswith(".gguf") or not is_safe_path(name):
        raise ModelNotFoundError(f"{text!r} is not the URL of a GGUF file, or of a model of the hub")
    return FileUrl(url._replace(fragment="").geturl())


def _parse_path(text: str, path: str) -> HubName:
    parts = path.strip("/").split("/")
    owner, rest = ([], parts) if len(parts) == 1 else ([parts[0]], parts[1:])
    name, colon, tag = rest[0].partition(":")
    words = [*owner, name, *([tag] if colon else [])]
    if not all(map(_WORD.fullmatch, words)) or any(bad in word for word in (*owner, name) for bad in _FORBIDDEN):
        raise _unknown(text)
    if not owner and (colon or name.lower().endswith(".gguf")):
        raise _unknown(text)
    return _with_file(text, HubName("/".join([*owner, name]), tag or None), [unquote(part) for part in rest[1:]])


def _with_file(text: str, name: HubName, rest: list[str]) -> HubName:
    """The name with the revision and file that follow in a URL or path."""
    revision = None
    if rest and rest[0] in _IN_BRANCH:
        kind, revision, *rest = rest if len(rest) > 1 else [*rest, ""]
        if not is_safe_path(revision) or (kind != "tree" and not rest):
            raise _unknown(text)
        if kind == "tree":
            rest = []
    file = "/".join(rest) or None
    if file is not None and (name.tag or not file.lower().endswith(".gguf") or not is_safe_path(file)):
        raise _unknown(text)
    return HubName(name.repo, name.tag, file, revision)


def _stem(file: str) -> str:
    """A file's name without folder, ending and number of its part."""
    return _PART.sub("", PurePosixPath(file).stem)


def _unknown(text: str) -> ModelNotFoundError:
    shown = text if text.isprintable() else repr(text)
    return ModelNotFoundError(
        f"{shown} is not a folder or GGUF file on this machine, and not a hub name such as Qwen/Qwen3-0.6B or "
        "user/repo:Q4_K_M; models of Ollama are named ollama:NAME:TAG"
    )
