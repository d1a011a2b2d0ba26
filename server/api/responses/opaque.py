"""Texts that a client keeps for the server without looking into them: they carry what they stand for."""

import base64
import binascii
import json
from typing import Any

from server.errors import InvalidRequestError
from server.http.strict_json import parse_json

_VERSION = 1


def sealed(**content: Any) -> str:
    """The content as an opaque text."""
    return base64.b64encode(json.dumps({"v": _VERSION, **content}, separators=(",", ":")).encode()).decode()


def opened(text: str, key: str) -> Any:
    """What a sealed text has under this key; None if it was not sealed here or has nothing there."""
    try:
        content = parse_json(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, InvalidRequestError):
        return None
    if not isinstance(content, dict) or content.get("v") != _VERSION:
        return None
    return content.get(key)
