"""The file of keys: YAML that says who may use what, or just one key a line."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from server.tenants.tenant import Tenant, TenantLimits

_NAME_LENGTH = 16
_IS_YAML = re.compile(r"^keys\s*:", re.MULTILINE)
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_choices")
Tenants = Mapping[bytes, Tenant]
"""By the SHA-256 of their keys."""


class KeysError(ValueError):
    """The keys cannot be used. The message names the place, and no key."""


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _no_space(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or any(character.isspace() for character in text):
        raise ValueError("a key has at least one character and no space")
    return key


_Key = Annotated[SecretStr, AfterValidator(_no_space)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
_Limit = Annotated[int | None, Field(ge=1)]


class KeysEntry(BaseModel):
    """One name, with its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    key: Annotated[list[_Key], BeforeValidator(_as_list)] = []
    sha256: Annotated[list[_Hash], BeforeValidator(_as_list)] = []
    weight: float = Field(1.0, ge=0.001, le=1000, allow_inf_nan=False)
    priority: int = Field(0, ge=-1000, le=1000)
    metrics: bool = False
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    tokens_per_day: _Limit = None
    max_choices: _Limit = None

    def tenant(self) -> Tenant:
        limits = TenantLimits(**{name: getattr(self, name) for name in _LIMITS})
        return Tenant(self.name, self.weight, self.priority, limits, label=self.name, sees_all_usage=self.metrics)

    def digests(self) -> list[bytes]:
        return [digest_of(key.get_secret_value()) for key in self.key] + [bytes.fromhex(one) for one in self.sha256]


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: list[KeysEntry] = Field(min_length=1)


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key, by which alone it is known."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def unnamed(key: str) -> Tenant:
    """The tenant of a key for which nothing else is said."""
    return Tenant(digest_of(key).hex()[:_NAME_LENGTH])


def read_keys(path: Path) -> Tenants:
    """What a file says. Raises KeysError, and OSError if it cannot be read."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise KeysError(f"{path} is no text: {error.reason} at byte {error.start}.") from None
    return _from_yaml(path, text) if _IS_YAML.search(text) else _from_lines(path, text)


def _from_lines(path: Path, text: str) -> Tenants:
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if any(character.isspace() for character in key):
            raise KeysError(f"{path}, line {number}: a key has no spaces. A file that says more begins with 'keys:'.")
        if key:
            tenants[digest_of(key)] = unnamed(key)
    if not tenants:
        raise KeysError(f"{path} holds no API key.")
    return tenants


def _from_yaml(path: Path, text: str) -> Tenants:
    try:
        entries = _KeysFile.model_validate(yaml.safe_load(text)).keys
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        raise KeysError(f"{path}{place}: this is no YAML.") from None  # what is wrong may be part of a key
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise KeysError(f"{path}: {_path_of(first)}: {first['msg']}.") from None
    except ValueError:
        raise KeysError(f"{path}: a value looks like a date and is none: write it in quotes.") from None
    tenants: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise KeysError(
                f"{path}: the name {entry.name!r} is given twice. One name may have several keys, as a list."
            )
        names.add(entry.name)
        digests = entry.digests()
        if not digests:
            raise KeysError(f"{path}: {entry.name!r} has neither 'key' nor 'sha256'.")
        for digest in digests:
            if digest in tenants:
                raise KeysError(f"{path}: {entry.name!r} has a key that {tenants[digest].name!r} has, too.")
            tenants[digest] = entry.tenant()
    return tenants


def _path_of(error: Mapping[str, Any]) -> str:
    place = ""
    for part in error["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place or "the file"
