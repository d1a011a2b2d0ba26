"""Messages while the application is built, without a cluster."""

import importlib
import logging
import warnings
from typing import Any

import pytest

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def ray_is_imported() -> None:
    """Import Ray first, because its own warnings are not tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("server.ray.application")


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({}, "without an API key"),
        ({"api_key": "k"}, ""),
        ({"api_key": "k", "learn": True, "speculation": "off"}, "learn is on, but speculation is off"),
    ],
)
def test_what_may_not_be_meant_is_said(
    arguments: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    from server.ray.application import build  # noqa: PLC0415  (needs Ray)

    build(arguments)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == bool(warned)
    assert all(warned in line for line in told)
