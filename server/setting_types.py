"""Types of the settings: how a flag, a variable or a YAML value is read, and which values are refused."""

import os
import re
from datetime import date, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

from model_runner.config import METHOD_ALIASES, REMOVED_METHODS
from model_runner.hub.names import is_embedded
from model_runner.read_numbers import whole_number

_TCP = re.compile(r"tcp://(\*|[\w.-]+|\[[\w:.%]+\]):(?P<port>\d{1,9}|\*)")
_IPC = re.compile(r"ipc://[^*\s].*")
_HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_NAMED_ORIGINS = ("*", "localhost", "none")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def parse_integer(value: object) -> object:
    """Read an integer from text, because a Literal of integers takes no text."""
    number = whole_number(value) if isinstance(value, str) else None
    return value if number is None else number


def split_list(value: object) -> object:
    """Split text at the separator of $PATH."""
    return [entry for entry in value.split(os.pathsep) if entry] if isinstance(value, str) else value


def split_names(value: object) -> object:
    """Split text at commas. A list is left as it is."""
    return [word for name in value.split(",") if (word := name.strip())] if isinstance(value, str) else value


def split_words(value: object) -> object:
    """Split text, or each entry of a list, at commas."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return entries
    return [word for entry in entries for one in entry.split(",") if (word := one.strip())]


def known_method(value: object) -> object:
    """The present name of a speculation method. Raises an error with advice for a removed method."""
    if isinstance(value, str) and value in REMOVED_METHODS:
        raise PydanticCustomError("removed", "'{value}' was removed. " + REMOVED_METHODS[value], {"value": value})
    return METHOD_ALIASES.get(value, value) if isinstance(value, str) else value


def _split_lowered(value: object) -> object:
    """Split at commas and lower the case: browsers send origins and hosts in lower case."""
    words = split_words(value)
    return [word.lower() if isinstance(word, str) else word for word in words] if isinstance(words, list) else words


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an origin that no browser sends, because it would never match."""
    for origin in origins:
        if origin not in _NAMED_ORIGINS and not _ORIGIN.fullmatch(origin):
            message = (
                "'{origin}' is not an origin. Use a scheme and a host such as https://chat.example.com or "
                "http://10.0.0.7:3000, or {named}"
            )
            named = ", ".join(_NAMED_ORIGINS[:-1]) + f" or {_NAMED_ORIGINS[-1]}"
            raise PydanticCustomError("no_origin", message, {"origin": origin, "named": named})
    if "none" in origins and len(origins) > 1:
        raise PydanticCustomError("no_origin", "'none' allows no origin, but other origins are given with it")
    return origins


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a name with a port, scheme or path, because it would never match."""
    for host in hosts:
        if host != "*" and not _HOST_NAME.fullmatch(host):
            message = (
                "'{host}' is not a host name. Use a name without scheme, port or path, such as llm.example.com or "
                "*.example.com, or * for all"
            )
            raise PydanticCustomError("no_host", message, {"host": host})
    return hosts


def _check_image_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse patterns: images are fetched from hosts that are named one by one."""
    for host in hosts:
        if host.startswith("*"):
            message = "'{host}' is not the name of one host. Name each host, such as images.example.com"
            raise PydanticCustomError("no_host", message, {"host": host})
    return _check_hosts(hosts)


def _check_metrics_prefix(prefix: str) -> str:
    """Refuse what Prometheus would allow only in quoted names."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        message = "'{prefix}' cannot begin metric names. Use letters, digits and _, without a digit at the start"
        raise PydanticCustomError("no_metrics_prefix", message, {"prefix": prefix})
    return prefix


def _check_collector(url: str) -> str:
    """The full URL, with OTLP's usual path if it has none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        message = "'{url}' is not the URL of an OTLP collector over HTTP, such as http://localhost:4318"
        raise PydanticCustomError("no_collector", message, {"url": url})
    if parts.username is not None:
        message = "do not put credentials in the URL; use the variable OTEL_EXPORTER_OTLP_HEADERS"
        raise PydanticCustomError("secret_in_url", message)
    return url if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def _check_endpoint(endpoint: str) -> str:
    """Refuse a port above 65535, which ZeroMQ would wrap around."""
    tcp = _TCP.fullmatch(endpoint)
    if not _IPC.fullmatch(endpoint) and (tcp is None or (tcp["port"] != "*" and int(tcp["port"]) > 65535)):
        message = (
            "'{endpoint}' is not a ZeroMQ endpoint such as tcp://*:5557, tcp://[::]:5557 or ipc:///run/samewise.kv"
        )
        raise PydanticCustomError("no_endpoint", message, {"endpoint": endpoint})
    return endpoint


def _check_url_prefix(prefix: str) -> str:
    """The prefix without a slash at its end; `/` is none."""
    prefix = prefix.rstrip("/")
    if prefix and not _PREFIX.fullmatch(prefix):
        message = "'{prefix}' is not a path such as /llm. It begins with / and has letters, digits and any of ._~-"
        raise PydanticCustomError("no_prefix", message, {"prefix": prefix})
    return prefix


def _none_if_embedded(model: str | None) -> str | None:
    return None if model is not None and is_embedded(model) else model


def _check_revision(revision: str) -> str:
    if not revision.strip():
        raise PydanticCustomError("no_revision", "is empty. Give a branch, tag or commit, or leave it out")
    return revision


def _expand_home(path: Path) -> Path:
    """The path with `~` replaced by the home folder, which no shell does in a YAML file."""
    return path.expanduser()


Model = Annotated[str | None, AfterValidator(_none_if_embedded)]
"""A name of a model; None is the embedded one."""

Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
"""Folders or hub names: a flag given several times, a YAML list, or one text with the separator of $PATH."""

Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_lowered), AfterValidator(_check_origins)]
"""Origins of web pages, separated by commas in one text."""

ImageHosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_lowered), AfterValidator(_check_image_hosts)]
"""Names of hosts, without patterns, separated by commas in one text."""

Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_lowered), AfterValidator(_check_hosts)]
"""Host names, separated by commas in one text."""

Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""An address that ZeroMQ listens on."""

Collector = Annotated[str, AfterValidator(_check_collector)]
"""URL of an OpenTelemetry collector."""

MetricsPrefix = Annotated[str, AfterValidator(_check_metrics_prefix)]
"""First part of metric names, before a colon."""

UrlPrefix = Annotated[str, AfterValidator(_check_url_prefix)]
"""A path that a proxy strips, without a slash at its end; empty for none."""

Revision = Annotated[str, AfterValidator(_check_revision)]
"""A branch, tag or commit on the hub."""

File = Annotated[Path, AfterValidator(_expand_home)]
"""A file to read."""


def _iso_date(value: object) -> object:
    """A date in ISO 8601 as text; YAML reads one without quotes as a date."""
    text = value.isoformat() if isinstance(value, date) else value
    if isinstance(text, str):
        try:
            datetime.fromisoformat(text)
        except ValueError:
            message = "expected a date in ISO 8601, such as 2026-11-28 or 2026-11-28T09:30:00+01:00"
            raise PydanticCustomError("no_date", message) from None
    return text


IsoDate = Annotated[str, BeforeValidator(_iso_date)]
"""A date, or a date and time, in ISO 8601."""
