"""JSON in events: nothing but ASCII."""

import json

import msgspec


def ascii_json(value: object) -> bytes:
    """The value in one line. Some readers of events take U+2028 and its like for the end of one."""
    encoded = msgspec.json.encode(value)
    return encoded if encoded.isascii() else json.dumps(value, separators=(",", ":")).encode()
