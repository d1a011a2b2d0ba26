"""API keys: their holders, the file that names them, and the keys that are accepted now."""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from server.config import Settings


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers together."""
    tokens_per_day: int | None = None
    """Tokens of prompts and answers together, per UTC day."""
    max_choices: int | None = None
    """Answers generated at the same time; each beam of a search counts as one."""

    def in_background(self) -> "TenantLimits":
        """The limits that apply to background work: only the tokens per day."""
        return TenantLimits(tokens_per_day=self.tokens_per_day)


@dataclass(frozen=True, slots=True)
class Tenant:
    """An API-key holder and its limits. Without keys, all clients are one tenant."""

    name: str = ""
    """Identifies the tenant's stored objects and usage; empty on a server without keys. An unnamed key gets part of its
    hash as name. Weak keys can be guessed from it, so it never leaves this server and its databases."""
    weight: float = 1.0
    """Its weight when capacity is shared between tenants."""
    priority: int = 0
    """Lower values are served first."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    label: str = ""
    """Name in metrics and traces: the operator's, or empty for an unnamed key."""
    sees_all_usage: bool = False
    """Whether its key may read the usage of all tenants in /metrics."""
    manages: bool = False
    """Whether its key may load and unload models."""
    models: frozenset[str] | None = None
    """Names of the models that it may use; None: all."""


_NAME_LENGTH = 16
_IS_YAML = re.compile(r"^keys\s*:", re.MULTILINE)
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_choices")
Tenants = Mapping[bytes, Tenant]
"""Tenants by the SHA-256 of their keys."""


class KeysError(ValueError):
    """The configured keys cannot be used. The message names the place, but never a key."""


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _no_space(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or any(character.isspace() for character in text):
        raise ValueError("a key needs at least one character and must not contain spaces")
    return key


_Key = Annotated[SecretStr, AfterValidator(_no_space)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
_Limit = Annotated[int | None, Field(ge=1)]


class KeysEntry(BaseModel):
    """One tenant of a keys file, with its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    key: Annotated[list[_Key], BeforeValidator(_as_list)] = []
    sha256: Annotated[list[_Hash], BeforeValidator(_as_list)] = []
    weight: float = Field(1.0, ge=0.001, le=1000, allow_inf_nan=False)
    priority: int = Field(0, ge=-1000, le=1000)
    metrics: bool = False
    manage: bool = False
    models: list[str] | None = Field(None, min_length=1)
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    tokens_per_day: _Limit = None
    max_choices: _Limit = None

    def tenant(self) -> Tenant:
        limits = TenantLimits(**{name: getattr(self, name) for name in _LIMITS})
        return Tenant(
            self.name,
            self.weight,
            self.priority,
            limits,
            label=self.name,
            sees_all_usage=self.metrics,
            manages=self.manage,
            models=None if self.models is None else frozenset(self.models),
        )

    def digests(self) -> list[bytes]:
        return [digest_of(key.get_secret_value()) for key in self.key] + [bytes.fromhex(one) for one in self.sha256]


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: list[KeysEntry] = Field(min_length=1)


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key. Only this hash is kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def unnamed(key: str) -> Tenant:
    """The tenant of a key without a name or limits."""
    return Tenant(digest_of(key).hex()[:_NAME_LENGTH])


def read_keys(path: Path) -> Tenants:
    """The tenants in a keys file. Raises KeysError, and OSError if it cannot be read."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise KeysError(f"{path} is not a text file: {error.reason} at byte {error.start}.") from None
    return _from_yaml(path, text) if _IS_YAML.search(text) else _from_lines(path, text)


def _from_lines(path: Path, text: str) -> Tenants:
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if any(character.isspace() for character in key):
            raise KeysError(
                f"{path}, line {number}: a key must not contain spaces. If this is a YAML file, begin it with 'keys:'."
            )
        if key:
            tenants[digest_of(key)] = unnamed(key)
    if not tenants:
        raise KeysError(f"{path} has no API key.")
    return tenants


def _from_yaml(path: Path, text: str) -> Tenants:
    try:
        entries = _KeysFile.model_validate(yaml.safe_load(text)).keys
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        raise KeysError(f"{path}{place}: this is not valid YAML.") from None  # the parser's message may quote a key
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise KeysError(f"{path}: {_path_of(first)}: {first['msg']}.") from None
    except ValueError:
        raise KeysError(f"{path}: a value looks like a date but is not one; put it in quotes.") from None
    tenants: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise KeysError(f"{path}: the name {entry.name!r} occurs twice. Give its keys as a list under one name.")
        names.add(entry.name)
        digests = entry.digests()
        if not digests:
            raise KeysError(f"{path}: {entry.name!r} needs 'key' or 'sha256'.")
        for digest in digests:
            if digest in tenants:
                raise KeysError(f"{path}: {entry.name!r} and {tenants[digest].name!r} have the same key.")
            tenants[digest] = entry.tenant()
    return tenants


def _path_of(error: Mapping[str, Any]) -> str:
    place = ""
    for part in error["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place or "the file"


_CHECK_S = 1.0
"""Seconds between checks whether the file has changed."""
_logger = logging.getLogger("samewise.keys")


class KeyRing:
    """The accepted keys and their tenants. Keeps only hashes, and reads the file again when it changes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysError if the configured keys cannot be used, OSError if their file cannot be read."""
        self._path = settings.api_keys_file
        self._clock = clock
        self._fixed: Tenants = {}
        if settings.api_key is not None:
            key = settings.api_key.get_secret_value().strip()
            if not key:
                raise KeysError("The configured API key is empty.")
            self._fixed = {digest_of(key): replace(unnamed(key), sees_all_usage=True, manages=True)}
        self._stamp = None if self._path is None else _stamp(self._path)
        self._checked = clock()
        self._tenants: Tenants = self._fixed if self._path is None else {**read_keys(self._path), **self._fixed}
        self._by_name = {tenant.name: tenant for tenant in self._tenants.values()}

    def __bool__(self) -> bool:
        """Whether a key is required."""
        return bool(self._tenants)

    def tenant_of(self, key: str) -> Tenant | None:
        """The tenant of a key; None if the key is not accepted.

        Looked up by its hash, so that the time reveals nothing about keys that are nearly right.
        """
        self._look()
        return self._tenants.get(digest_of(key))

    def knows(self, name: str) -> bool:
        """Whether a tenant of this name may use the server, with a key or because none is required."""
        self._look()
        return not self._tenants or name in self._by_name

    def named(self, name: str) -> Tenant:
        """The tenant of this name as configured now. A removed tenant has no limits any more."""
        return self._by_name.get(name) or Tenant(name)

    @property
    def models(self) -> frozenset[str]:
        """All names of models that a key is restricted to."""
        return frozenset[str]().union(*(one.models or () for one in self._tenants.values()))

    def reload(self) -> None:
        """Read the file again. If it cannot be used, log an error and keep the current keys."""
        if self._path is None:
            return
        try:
            self._stamp = _stamp(self._path)
            self._tenants = {**read_keys(self._path), **self._fixed}
        except (KeysError, OSError) as error:
            _logger.error("The API keys could not be reloaded, so the current ones stay in force: %s", error)
            return
        self._by_name = {tenant.name: tenant for tenant in self._tenants.values()}
        _logger.info("Reloaded the API keys from %s: %d are accepted.", self._path, len(self._tenants))

    def _look(self) -> None:
        if self._path is None or self._clock() - self._checked < _CHECK_S:
            return
        self._checked = self._clock()
        try:
            is_changed = _stamp(self._path) != self._stamp
        except OSError:
            is_changed = self._stamp is not None
            self._stamp = None  # logged once
        if is_changed:
            self.reload()


def _stamp(path: Path) -> tuple[int, int, int]:
    """A stamp that changes with the file's content."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size
