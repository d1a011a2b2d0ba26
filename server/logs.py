"""Logging as text or JSON, with the request's id on each line. Never logs keys, and prompts only with --log-prompts."""

import json
import logging
import sys
import time
from typing import Any, Literal

_PLAIN_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
_CHATTY_LOGGERS = {
    **dict.fromkeys(("sse_starlette", "httpx", "httpcore", "asyncio"), logging.WARNING),
    "opentelemetry.trace.span": logging.ERROR,
}


def configure_logging(format: Literal["text", "json"], level: str) -> None:  # noqa: A002 - the setting's name
    """Send the logs of this process to standard error, replacing earlier configuration.

    Some libraries log the text of streams at debug level: they are limited to warnings. OpenTelemetry warns of each
    unreadable header and quotes it: it is limited to errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name, least in _CHATTY_LOGGERS.items():
        logging.getLogger(name).setLevel(least)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00Z INFO samewise.access: message key=value ...`"""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = (f"{key}={_plain(value)}" for key, value in _extra(record).items())
        line = super().formatMessage(record)
        if not line.isprintable():  # a line break in a path must not start a new log line
            line = line.encode("unicode_escape").decode()
        return " ".join([line, *fields])


class JSONFormatter(logging.Formatter):
    """One JSON object per line."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _PLAIN_ATTRIBUTES and value is not None}


def _plain(value: object) -> str:
    """A value on a line of text, quoted if it has spaces or unprintable characters."""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
