"""An engine with room for tools."""

import pytest

from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()
