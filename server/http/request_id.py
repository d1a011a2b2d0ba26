"""Ids by which a request is found in the log."""

import secrets


def new_request_id() -> str:
    """An id that no other request has."""
    return f"req_{secrets.token_hex(16)}"
