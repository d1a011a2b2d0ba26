import os
from collections.abc import Iterator

import pytest

from tests.cli.fake_openai import FakeOpenAI, running


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SAMEWISE_", "OPENAI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
def base_url(fake: FakeOpenAI) -> Iterator[str]:
    with running(fake.app()) as address:
        yield address
