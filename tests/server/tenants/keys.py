"""Files of keys, and time that passes when the test says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI

from server.tenants.usage_counters import UsageCounters
from tests.server.helpers import client_of


def write_keys(path: Path, **tenants: Mapping[str, Any]) -> Path:
    """Each name's key is the name with "-key" behind it, unless it has others."""
    entries = [{"name": name, **({} if "sha256" in fields else {"key": f"{name}-key"}), **fields}
               for name, fields in tenants.items()]  # fmt: skip
    path.write_text(yaml.safe_dump({"keys": entries}))
    return path


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


class Clock:
    """In the middle of a minute of a day."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 86400.0 * 20000 + 3600 * 12 + 30
        monkeypatch.setattr(UsageCounters, "now", lambda _: self.now)


def of_tenant(app: FastAPI, name: str) -> httpx.AsyncClient:
    client = client_of(app)
    client.headers.update(bearer(name))
    return client
