"""How the hub is reached: address, token, folders. And the error for a model that cannot be had."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from model_runner.refusal import one_line

HUB_URL = "https://huggingface.co"
MAIN = "main"
"""The revision that is taken if none is named."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = frozenset({"1", "on", "yes", "true"})


class ModelNotFoundError(Exception):
    """There is no such model, or it cannot be read; the message says what was looked for and what to do.

    It is one line of bounded length: it may quote what a file or a hub says.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How models are downloaded from the hub."""

    token: str | None = field(default=None, repr=False)
    """None takes HF_TOKEN or the login of `hf auth login`."""
    revision: str | None = None
    """A branch, tag or commit; None is the main branch."""
    updates: bool = False
    """Ask the hub for a newer commit even if a complete one is on disk."""
    max_bytes: int | None = None
    """Memory for the weights: a model that certainly needs more is refused before its download. None: no limit."""


ANYONE = HubAccess()
"""Without a token, at the main branch."""


def hub_url() -> str:
    """Address of the hub, from HF_ENDPOINT."""
    return (os.environ.get("HF_ENDPOINT") or HUB_URL).rstrip("/")


def hub_hosts() -> frozenset[str]:
    """Host names whose URLs name models of the hub."""
    return frozenset({"huggingface.co", "www.huggingface.co", "hf.co", urlsplit(hub_url()).netloc.lower()})


def hub_cache() -> Path:
    """The hub's own cache folder, which huggingface_hub and llama.cpp use, too."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home) / "hub")
    return Path(os.path.expandvars(named)).expanduser()


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.lower() in _TRUE


def is_commit(revision: str) -> bool:
    """Whether a revision is the full hash of a commit, whose files never change."""
    return _COMMIT.fullmatch(revision) is not None


def hub_token(access: HubAccess) -> str | None:
    """The token to send to the hub, if there is one."""
    if access.token:
        return access.token
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in _TRUE:
        return None
    from huggingface_hub import get_token  # noqa: PLC0415 - its import takes a tenth of a second

    return get_token()
