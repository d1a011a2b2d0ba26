from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.server.tenants.keys import Clock, write_keys


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def make_with_keys(make_app: Callable[..., FastAPI], tmp_path: Path) -> Callable[..., FastAPI]:
    """An application with keys of these names."""

    def make(tenants: dict[str, dict[str, Any]], **settings: Any) -> FastAPI:
        return make_app(api_keys_file=write_keys(tmp_path / "keys.yaml", **tenants), **settings)

    return make
